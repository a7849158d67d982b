"""`Reader`: lets `dcp.load` read a step of any root, or a checkpoint of another system."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata, StorageReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from holdfast import Box, Checkpoint, errors
from holdfast import open as open_step
from holdfast.extend import (
    PlannedSaves,
    check_root,
    path_of,
    read_into,
    torch_dtype,
    unfit,
    values_in,
)
from holdfast.integrations.dcp.ids import CheckpointId, step_of_id
from holdfast.integrations.dcp.names import DcpListing, listing
from holdfast.integrations.dcp.values import Pickles, StandIn, fill_tensors, held_in


class Reader(StorageReader):  # torch gives no types
    """Loads steps of `root`, a path or URL, with `torch.distributed.checkpoint`, on any layout.

    `checkpoint_id` is the number of the step (`"10"`); without it, all ranks load the newest step.  Foreign
    checkpoints are read in place, as by `holdfast.open`.  All bytes are verified unless `verify=False`.
    Values are cast to the dtype of the target tensor, as DCP does.  Values of single ranks (generators,
    data loaders) are not offered.
    """

    def __init__(self, root: str | os.PathLike[str], *, verify: bool = True) -> None:
        self.root = path_of(root, "Reader", "root")
        check_root(self.root, foreign=True)
        if not isinstance(verify, bool):
            raise unfit("Reader", "verify", verify, "True or False")
        self.verify = verify
        self._wanted: int | None = None
        self._saved: Checkpoint | None = None
        self._listing: DcpListing = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: DCP must not make a `Reader` from an id alone, since it does not name the root."""
        return False

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        """Begin another load, of the step `checkpoint_id`."""
        self._wanted = step_of_id(checkpoint_id, self.root)
        self._saved = None

    @property
    def checkpoint(self) -> Checkpoint:
        """The step that is being loaded."""
        return self._open(self._wanted) if self._saved is None else self._saved

    def _open(self, step: int | None) -> Checkpoint:
        self._saved = saved = open_step(self.root, step=step, verify=self.verify)
        manifest = saved.manifest
        self._listing = listing(manifest.tensors, manifest.aliases, values_in(saved))
        return saved

    def read_metadata(self, *args: Any) -> Metadata:
        """Return the contents to load.  Each tensor is listed as one chunk, since any part can be read."""
        try:
            step = self._open(self._wanted).step  # there may be a newer step since the last load
        except errors.HoldfastError:
            self._wanted = None
            raise
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for flat, (_, value) in self._listing.items():
            if isinstance(value, StandIn):
                whole = ChunkStorageMetadata(torch.Size([0] * value.ndim), value.shape)
                properties = TensorProperties(dtype=value.dtype)
                entries[flat] = TensorStorageMetadata(properties, value.shape, [whole])
            else:
                entries[flat] = BytesStorageMetadata()
        paths = {flat: path for flat, (path, _) in self._listing.items()}
        meta = StorageMeta(checkpoint_id=self.root, load_id=str(step))
        return Metadata(entries, planner_data=paths, storage_meta=meta)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Forget the id: the next load gives its own, even if this load fails."""
        self._wanted = None

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: have all ranks load the step found here; saves go on from it."""
        saved = self.checkpoint
        for plan in plans:
            plan.storage_data = saved.step
        PlannedSaves.go_on_from(saved)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and verify all items of the plan, and put them into their tensors.  Blocks."""
        if isinstance(plan.storage_data, int) and plan.storage_data != self.checkpoint.step:
            self._go_back(plan.storage_data)
        saved, values, held = self.checkpoint, Pickles(), self._held(plan)
        wants: list[tuple[str, Box, torch.Tensor]] = []
        taken: dict[int, tuple[ReadItem, torch.Tensor]] = {}
        """Items whose tensors are to be filled, by address: a planner may hand out one buffer for many."""

        def fill() -> None:
            read_into(saved, wants)
            for item, target in taken.values():
                planner.commit_tensor(item, target)
            wants.clear()
            taken.clear()

        for item in plan.items:
            value = self._listing[item.storage_index.fqn][1]
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, values.pickled(fill_tensors(value, held)))
                continue
            target = planner.resolve_tensor(item)
            address = _address(target) or -len(taken) - 1
            if address in taken:
                fill()
            start = tuple(item.storage_offsets)
            box = Box(start, tuple(a + n for a, n in zip(start, item.lengths)))
            wants.append((value.saved_name, box, target))
            taken[address] = item, target
        fill()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _held(self, plan: LoadPlan) -> dict[str, torch.Tensor]:
        """Read the tensors inside values, by the names that the values use."""
        saved, found = self.checkpoint, {}
        wants: list[tuple[str, Box, torch.Tensor]] = []
        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO:
                continue
            for name in held_in(self._listing[item.storage_index.fqn][1]):
                info = saved.info(name)
                found[name] = torch.empty(info.shape, dtype=torch_dtype(info.dtype))
                wants.append((name, Box((0,) * len(info.shape), info.shape), found[name]))
        read_into(saved, wants)
        return found

    def _go_back(self, step: int) -> None:
        """Switch to the coordinator's step: a newer step was committed after one of the two ranks
        looked."""
        planned = {flat: _kind(value) for flat, (_, value) in self._listing.items()}
        self._open(step)
        if planned != {flat: _kind(value) for flat, (_, value) in self._listing.items()}:
            raise errors.HoldfastError(
                "another step was committed while ranks looked for the newest, and its contents differ "
                f"from those of step {step}",
                hint="load again, or name the step by checkpoint_id",
            )


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none."""
    try:
        return int(tensor.data_ptr())
    except RuntimeError:
        return 0


def _kind(value: Any) -> Any:
    return (value.saved_name, value.dtype, value.shape) if isinstance(value, StandIn) else None
