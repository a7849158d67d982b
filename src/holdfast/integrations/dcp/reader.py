"""`Reader`: what `dcp.load` reads, from a step of any root, or from a checkpoint of another system."""

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

from holdfast.base.arguments import flag_of, path_of
from holdfast.base.errors import HoldfastError
from holdfast.core.checkpoint.consolidating import keep_extras
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.reading import read_alone
from holdfast.core.checkpoint.rows import Want
from holdfast.core.layout import Box
from holdfast.core.store import open_store, split_prefix
from holdfast.formats.looking import open as open_step
from holdfast.integrations.dcp.attempts import under_way
from holdfast.integrations.dcp.ids import CheckpointId, step_of_id
from holdfast.integrations.dcp.names import Listing, listing
from holdfast.integrations.dcp.values import Pickles, StandIn, filled, held_in
from holdfast.live.restore.targets import target_of
from holdfast.live.state.placed import torch_dtype


class Reader(StorageReader):  # torch gives no types
    """Loads steps of `root`, a path or URL, with `torch.distributed.checkpoint`, on any layout.

    `checkpoint_id` is the number of the step (`"10"`); without it, the newest is loaded, the same on all
    ranks.  Checkpoints of others are read where they lie, as `holdfast.open` finds them.  All that is read
    is verified unless `verify=False`.  Values are cast to the dtype of the tensor that takes them, as DCP
    does.  What each rank had for itself (generators, data loaders) is not offered.
    """

    def __init__(self, root: str | os.PathLike[str], *, verify: bool = True) -> None:
        self.root = path_of(root, "Reader", "root")
        if split_prefix(self.root) is None:
            open_store(
                self.root
            )  # which touches nothing: an address that cannot be is told at once
        self.verify = flag_of(verify, "Reader", "verify")
        self._wanted: int | None = None
        self._saved: Checkpoint | None = None
        self._listing: Listing = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: DCP is to make no `Reader` by itself of an id, for that says no root."""
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
        trees, _ = keep_extras(saved)
        self._listing = listing(saved.manifest.tensors, saved.manifest.aliases, trees)
        return saved

    def read_metadata(self, *args: Any) -> Metadata:
        """Return what there is to load.  Each tensor is said to be one chunk: any part can be read."""
        try:
            step = self._open(self._wanted).step  # a newer one may have come since the last load
        except HoldfastError:
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
        """Take it that the id is done with: the next load says which it wants, also if this one fails."""
        self._wanted = None

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: all ranks load the step that this one has found; saves go on from it."""
        saved = self.checkpoint
        for plan in plans:
            plan.storage_data = saved.step
        if saved.format == "holdfast":
            m = saved.manifest
            under_way(os.getpid()).go_on(saved.store, m.run, m.step, m.line)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read, verify and place all that the plan wants.  Blocks."""
        if isinstance(plan.storage_data, int) and plan.storage_data != self.checkpoint.step:
            self._go_back(plan.storage_data)
        saved, values, held = self.checkpoint, Pickles(), self._held(plan)
        wants: list[Want] = []
        taken: dict[int, tuple[ReadItem, torch.Tensor]] = {}
        """Items whose tensors are to be filled, by address: a planner may hand out one buffer for many."""

        def fill() -> None:
            read_alone(saved.images, wants)
            for item, target in taken.values():
                planner.commit_tensor(item, target)
            wants.clear()
            taken.clear()

        for item in plan.items:
            value = self._listing[item.storage_index.fqn][1]
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, values.pickled(filled(value, held)))
                continue
            target = planner.resolve_tensor(item)
            address = _address(target) or -len(taken) - 1
            if address in taken:
                fill()
            start = tuple(item.storage_offsets)
            box = Box(start, tuple(a + n for a, n in zip(start, item.lengths)))
            if box.size:
                number = saved.index(value.saved_name)
                dtype = saved.manifest.tensors[number].dtype
                wants.append(Want(number, box, target_of(target.detach(), dtype, value.saved_name)))
            taken[address] = item, target
        fill()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _held(self, plan: LoadPlan) -> dict[str, torch.Tensor]:
        """Read the tensors that lie inside values, by the names that values have for them."""
        saved, found = self.checkpoint, {}
        wants: list[Want] = []
        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO:
                continue
            for name in held_in(self._listing[item.storage_index.fqn][1]):
                number = saved.index(name)
                entry = saved.manifest.tensors[number]
                found[name] = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
                if found[name].numel():
                    box = Box((0,) * len(entry.shape), entry.shape)
                    wants.append(Want(number, box, target_of(found[name], entry.dtype, name)))
        read_alone(saved.images, wants)
        return found

    def _go_back(self, step: int) -> None:
        """Load another step than this rank has planned for: a newer one was committed between two looks."""
        planned = {flat: _kind(value) for flat, (_, value) in self._listing.items()}
        self._open(step)
        if planned != {flat: _kind(value) for flat, (_, value) in self._listing.items()}:
            raise HoldfastError(
                "another step was committed while ranks looked for the newest, and holds other things "
                f"than step {step}",
                hint="load again, or name the step by checkpoint_id",
            )


def _address(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory; 0 if it has none of its own."""
    try:
        return int(tensor.data_ptr())
    except RuntimeError:
        return 0


def _kind(value: Any) -> Any:
    return (value.saved_name, value.dtype, value.shape) if isinstance(value, StandIn) else None
