"""Megatron-Core's `dist_checkpointing` over holdfast: strategies for saving and loading sharded state.

    import holdfast.integrations.megatron      # registers ("holdfast", 1)

    dist_checkpointing.save(sharded_state_dict, directory, sharded_strategy=("holdfast", 1))
    dist_checkpointing.load(sharded_state_dict, directory)     # metadata.json names the strategy

Besides Megatron's own `common.pt` and `metadata.json` the directory is a root of holdfast with one step,
whose number is in the directory's name (`iter_0000100`), else 0.  Megatron's planners decide which rank
saves what; `holdfast.dcp` writes and reads it.

With `async_sharded_save=True` ranks plan together at the call, and their tensors are copied to the host
when the request is scheduled.  Then a process that Megatron starts writes each rank's image, and leaves its
result in a file for the finalization, in which all ranks commit the step together.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies import torch as of_torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    StrategyAction,
    register_default_strategy,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.storage import WriteResult

from holdfast import errors
from holdfast.extend import PreparedPart
from holdfast.integrations.dcp import Reader, Writer
from holdfast.integrations.dcp.writer import result_of

(_DistWrapper,) = errors.need("torch", "torch.distributed.checkpoint.utils", "_DistWrapper")
errors.need(
    "megatron-core", of_torch,
    "_replace_sharded_keys_with_state_dict_keys", "_replace_state_dict_keys_with_sharded_keys",
    "_restore_dict_types", "_unwrap_pyt_sharded_tensor",
)  # fmt: skip

BACKEND = "holdfast"
VERSION = 1


def step_in_name(checkpoint_dir: str | os.PathLike[str]) -> int:
    """Return the step in the name of a directory of Megatron's; 0 if the name has none."""
    match = re.search(r"(\d+)$", os.path.basename(os.fspath(checkpoint_dir).rstrip("/")))
    return int(match[1]) if match else 0


class SaveStrategy(AsyncSaveShardedStrategy):
    """Saves sharded tensors and objects as one step; at the call, or by an `AsyncRequest`."""

    def __init__(self) -> None:
        super().__init__(BACKEND, VERSION)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: objects are saved with the tensors."""
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Save, and wait until the step is durable.  Collective."""
        dcp.save(
            _flat(sharded_state_dict),
            storage_writer=Writer(str(checkpoint_dir)),
            checkpoint_id=str(step_in_name(checkpoint_dir)),
            planner=_planner(),
        )

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> AsyncRequest:
        """Plan together now; write in Megatron's process, and commit when the request is finalized.
        Collective."""
        writer, planner, ranks = (
            Writer(str(checkpoint_dir)),
            _planner(),
            _DistWrapper(None, True, 0),
        )
        state, metadata, made_ready = _flat(sharded_state_dict), [], []

        def local() -> Any:
            writer.reset(str(step_in_name(checkpoint_dir)))
            planner.set_up_planner(state, writer.storage_meta(), ranks.is_coordinator)
            writer.set_up_storage_writer(ranks.is_coordinator, rank=ranks.rank)
            return planner.create_local_plan()

        def together(plans: Any) -> Any:
            plans, made = planner.create_global_plan(plans)
            metadata.append(made)
            return writer.prepare_global_plan(plans)

        plan = planner.finish_plan(ranks.reduce_scatter("plan", local, together))
        ranks.all_gather("prepare", lambda: made_ready.append(writer.prepare(plan, planner)))
        prepared: PreparedPart = made_ready[0]
        handle, note = tempfile.mkstemp(prefix="holdfast-megatron-")
        os.close(handle)

        def result() -> list[WriteResult]:
            return [result_of(prepared.take_note(note))]

        def commit(results: Any) -> Metadata:
            writer.finish(metadata[0], results)
            return metadata[0]

        def finalize() -> None:
            ranks.all_reduce("write", result, commit)

        return AsyncRequest(
            write_for_later, (writer.root, prepared, note), [finalize], preload_fn=prepared.staged
        )


def write_for_later(root: str, prepared: PreparedPart, note: str) -> None:
    """Write a rank's image, and its result or error into the file `note`.  Runs in a process of its own."""
    prepared.write_and_note(note)


def _flat(sharded_state_dict: Any) -> dict[str, Any]:
    """Return the state by its names in the checkpoint, main replicas only, in DCP's form."""
    flat, _, _ = of_torch._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
    state: dict[str, Any] = of_torch.mcore_to_pyt_state_dict(flat, False)
    return state


def _planner() -> Any:
    return of_torch.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)


class LoadStrategy(LoadShardedStrategy):
    """Loads checkpoints of `SaveStrategy`, on any layout."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: objects are loaded with the tensors."""
        return True

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        """Load into the sharded tensors, and return the state dict.  Collective."""
        wanted = [t for t in nested_values(sharded_state_dict) if isinstance(t, ShardedTensor)]
        flat, paths, names = of_torch._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = of_torch.mcore_to_pyt_state_dict(flat, True)
        planner = of_torch.MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[t for t in wanted if not t.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={
                t.key: t for t in wanted if t.allow_shape_mismatch
            },
        )
        dcp.load(state, storage_reader=Reader(str(checkpoint_dir)), planner=planner)
        loaded = {k: of_torch._unwrap_pyt_sharded_tensor(v) for k, v in state.items()}
        found = of_torch._replace_sharded_keys_with_state_dict_keys(loaded, paths, names)
        of_torch._restore_dict_types(found, sharded_state_dict)
        return found

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Return the sharded tensors without data, by name."""
        saved = Reader(str(checkpoint_dir)).read_metadata().state_dict_metadata
        return {
            name: ShardedTensor.from_rank_offsets(
                name, torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            ).without_data()
            for name, entry in saved.items()
            if not isinstance(entry, BytesStorageMetadata)
        }

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Return the sharded tensors and objects without data, by name."""
        saved = Reader(str(checkpoint_dir)).read_metadata().state_dict_metadata
        objects = [
            ShardedObject.empty_from_unique_key(name)
            for name, entry in saved.items()
            if isinstance(entry, BytesStorageMetadata)
        ]
        return {o.unique_key: o for o in objects} | self.load_tensors_metadata(checkpoint_dir)

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """HoldfastError if another backend saved it."""
        if loaded_backend != BACKEND:
            raise errors.HoldfastError(
                f"the checkpoint was saved by the backend {loaded_backend!r}, not by {BACKEND!r}"
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        """HoldfastError if a newer strategy saved it."""
        if loaded_version > VERSION:
            raise errors.HoldfastError(
                f"the checkpoint was saved by version {loaded_version} of the strategy {BACKEND!r}; this "
                f"holdfast has version {VERSION}",
                hint="load it with a newer holdfast",
            )


register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, VERSION, SaveStrategy())
register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, VERSION, LoadStrategy())
