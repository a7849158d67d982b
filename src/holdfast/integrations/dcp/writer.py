"""`Writer`: lets `dcp.save` and `dcp.async_save` write a step of a root."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import Metadata, StorageWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from holdfast import Box, Keep, errors
from holdfast.extend import (
    Part,
    PlannedSaves,
    PreparedPart,
    StateDictNames,
    check_root,
    path_of,
    unfit,
)
from holdfast.integrations.dcp.ids import CheckpointId, step_of_id
from holdfast.integrations.dcp.names import DcpListing, table_for
from holdfast.integrations.dcp.values import encoded, make_stand_in


class _Turn(threading.local):
    """The save on a thread: DCP does each save on one thread, and may do two at the same time."""

    asked: int | None = None
    """The step of the next save, from its id."""
    wanted: int | None = None
    """The step of the present save; None: the number after the highest."""
    rank = 0
    is_coordinator = False
    attempt: Any = None


class Writer(StorageWriter):  # torch gives no types
    """Saves with `torch.distributed.checkpoint` into steps of `root`, a path or URL.

    `checkpoint_id` is the number of the step (`"10"`); without it, the number after the newest step.  Once
    `dcp.save` returns, the step exists completely, with its digests; if any rank failed, it does not exist.
    `keep`: which steps stay, of those that this process has saved or gone on from with a `Reader`; the
    others are deleted in the background after each save (`wait`).  UsageError for `use_collectives=False`,
    and for values that are not plain data.  The other features of a `Checkpointer` (snapshots, records,
    generators, a claim on the root) are not available through DCP.
    """

    def __init__(self, root: str | os.PathLike[str], *, keep: Keep | None = None) -> None:
        self.root = path_of(root, "Writer", "root")
        check_root(self.root)
        if keep is not None and not isinstance(keep, Keep):
            raise unfit("Writer", "keep", keep, "a Keep", typed=True)
        self._saves = PlannedSaves(self.root, keep)
        self._turn = _Turn()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for the process of `async_save`, where no save is under way."""
        if self.root.startswith("memory://"):
            raise errors.UsageError(
                f"{self.root} is memory of one process, and async_save runs in another process",
                hint="save to a folder or a bucket, or by AsyncCheckpointerType.THREAD",
            )
        return {"root": self.root, "_saves": self._saves}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _turn=_Turn())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: DCP must not make a `Writer` from an id alone, since it does not name the root."""
        return False

    def wait(self) -> None:
        """Block until the steps that saves have replaced, or `keep` does not keep, are deleted."""
        self._saves.wait()

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        """Begin another save, of the step `checkpoint_id`."""
        self._turn.asked = step_of_id(checkpoint_id, self.root)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Note this rank, which DCP passes only to a parameter named `kwargs`, and not before torch 2.8."""
        if not kwargs.get("use_collectives", True):
            raise errors.UsageError(
                "use_collectives=False: without collectives ranks cannot commit a step together",
                hint="leave it out",
            )
        turn = self._turn  # every save calls this method; `reset` only if it has an id
        turn.wanted, turn.asked, turn.attempt = turn.asked, None, None
        own = 0 if is_coordinator or not dist.is_initialized() else dist.get_rank()
        self._turn.rank = kwargs.get("rank", own)
        self._turn.is_coordinator = is_coordinator

    def storage_meta(self) -> StorageMeta:
        """Return the root to which the step is saved."""
        return StorageMeta(checkpoint_id=self.root, save_id=str(self._turn.asked or ""))

    # -- planning ---------------------------------------------------------------------------------

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: send the step's number and the attempt's name to all ranks.

        The plans cannot carry them: with plan caching a rank uses its earlier plan.
        """
        self._turn.attempt = self._saves.begin(self._turn.wanted)
        return plans

    def _attempt(self) -> Any:
        turn = self._turn
        found = turn.attempt if turn.is_coordinator else self._saves.begun(turn.wanted)
        found = found or turn.attempt  # without a process group there is one rank
        if found is None:
            raise errors.UsageError("the coordinator has not planned this save")
        return found

    # -- writing ----------------------------------------------------------------------------------

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's image.  Blocks until it is durable."""
        done: Future[list[WriteResult]] = Future()
        done.set_result([result_of(self.prepare(plan, planner).write())])
        return done

    def prepare(self, plan: SavePlan, planner: SavePlanner) -> PreparedPart:
        """Lay out this rank's image; the tensors are the planner's own."""
        names = StateDictNames(plan.planner_data)
        values: dict[str, Any] = {}
        parts: dict[tuple[str, Box | None], Part] = {}
        for item in plan.items:
            flat, data = item.index.fqn, planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                values[flat] = encoded(data, flat)
            else:
                part = _part(item, data, names)
                parts[flat, part.box] = part
        return self._saves.prepare(self._attempt(), self._turn.rank, parts.values(), values)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: commit the step.  HoldfastError if the parts of the ranks do not fit
        together."""
        written = [one.storage_data for of_rank in results for one in of_rank]
        names = StateDictNames(metadata.planner_data)

        def extras(tensors: Mapping[str, Any]) -> dict[str, Any]:
            return _extras(written, tensors, names)

        step = self._saves.commit(written, extras, by="dcp")
        metadata.storage_meta = StorageMeta(checkpoint_id=self.root, save_id=str(step))


def result_of(written: Any) -> WriteResult:
    """Return a rank's written image as the single result of `write_data`, which DCP sends to the
    coordinator."""
    return WriteResult(MetadataIndex(f"rank {written.rank}"), written.bytes, written)


def _part(item: WriteItem, data: Any, names: StateDictNames) -> Part:
    """Return the part of a tensor that an item of a plan saves."""
    if item.tensor_data is None:
        raise errors.UsageError(
            f"{item.index.fqn}: the planner's item is a tensor without tensor_data",
            hint="a custom planner must set it, as DefaultSavePlanner does",
        )
    whole, flat = item.tensor_data, item.index.fqn
    start = tuple(whole.chunk.offsets)
    box = Box(start, tuple(a + n for a, n in zip(start, whole.chunk.sizes)))
    # a shard may still have the attributes of the parameter that was cut
    tensor = data if item.type == WriteItemType.TENSOR else data.detach()
    name, state = names.of(flat)
    return Part(name, tensor, tuple(whole.size), box, state=state, planned=flat)


def _extras(
    written: list[Any], tensors: Mapping[str, Any], names: StateDictNames
) -> dict[str, Any]:
    """Return the extras for plain values, and the table of DCP's names if `listing` needs it.

    `tensors`: the tensors of the step, by flat name.
    """
    values = {flat: tree for w in written for flat, tree in w.values.items()}
    expected: DcpListing = {
        flat: (names.path(flat), make_stand_in(t.name, t.dtype, t.shape))
        for flat, t in tensors.items()
    }
    found = names.extras(values, expected)
    expected |= {flat: (names.path(flat), tree) for flat, tree in values.items()}
    table = table_for(expected, tensors.values(), found)
    return found if table is None else {**found, StateDictNames.LISTED: table}
