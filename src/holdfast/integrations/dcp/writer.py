"""`Writer`: what `dcp.save` and `dcp.async_save` write, as a step of a root."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint import Metadata, StorageWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from holdfast.base.arguments import path_of, unfit
from holdfast.base.errors import AgentError, HoldfastError, UsageError
from holdfast.base.events import emit, span
from holdfast.base.threads import Worker
from holdfast.base.version import __version__
from holdfast.base.wire import decode_msgpack
from holdfast.core.checkpoint.committing import commit
from holdfast.core.checkpoint.lineage import Line, is_in_line
from holdfast.core.checkpoint.pruning import prune
from holdfast.core.checkpoint.tidying import Keep, discard
from holdfast.core.codec.digest import ALGORITHM, CHUNK_BYTES, hexdigest
from holdfast.core.format.checking import check
from holdfast.core.format.extras import DCP_NAMES
from holdfast.core.format.image import plan_image
from holdfast.core.format.manifest import (
    VERSION,
    FileEntry,
    FragmentEntry,
    Manifest,
    ShardingEntry,
    TensorEntry,
    readable,
)
from holdfast.core.group.handed import hand, handed, take_away
from holdfast.core.layout import Pieces
from holdfast.core.store import Store, open_store
from holdfast.integrations.dcp.attempts import SaveAttempt, under_way
from holdfast.integrations.dcp.gathered import Gathered
from holdfast.integrations.dcp.ids import CheckpointId, step_of_id
from holdfast.integrations.dcp.names import Listing, StateDictNames, table_for
from holdfast.integrations.dcp.values import encoded, named
from holdfast.live.roots import require_native_root, sweep_host
from holdfast.live.saving.writing import write_blocks
from holdfast.live.state.devices import devices_of, wait_for
from holdfast.live.state.kinds import check_kind
from holdfast.live.state.managed import wait_for_writers
from holdfast.live.state.placed import dtype_name


class TensorShare(msgspec.Struct, frozen=True, array_like=True):
    """The part of a tensor that a rank saves."""

    flat: str
    name: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Start and stop of each part, in the order of the file."""


class RankWritten(msgspec.Struct, frozen=True, array_like=True):
    """The parts that a rank has written: the one result of its `write_data`."""

    rank: int
    attempt: SaveAttempt
    file: FileEntry | None
    shares: list[TensorShare]
    values: dict[str, Any]
    """Values that are no tensors, as JSON trees, by flat name."""

    @property
    def result(self) -> WriteResult:
        """The form in which DCP hands it to the coordinator."""
        size = 0 if self.file is None else self.file.bytes
        return WriteResult(MetadataIndex(f"rank {self.rank}"), size, self)


_Parts = dict[tuple[str, tuple[int, ...]], tuple[WriteItem, torch.Tensor]]
"""Parts of tensors, by flat name and start."""

_Row = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.Tensor]
"""A part of a tensor: minus the width of its elements, number of the tensor, start, stop, the part."""


@dataclass
class Prepared:
    """The parts that a rank has to write.  It can be pickled, if its tensors can."""

    rank: int
    attempt: SaveAttempt
    values: dict[str, Any]
    shares: list[TensorShare]
    entries: tuple[TensorEntry, ...]
    pieces: Pieces
    tensors: list[torch.Tensor]
    """The part of a tensor that each piece holds."""

    def staged(self) -> Prepared:
        """The same, with copies of the tensors on the host."""
        wait_for_writers(self.tensors)
        copies = [t.to("cpu", copy=True, non_blocking=True) for t in self.tensors]
        wait_for(devices_of(self.tensors))
        return replace(self, tensors=copies)

    def write(self, root: str) -> RankWritten:
        """Write the image, if there is one.  Blocks until it is durable."""
        file = None
        if self.tensors:
            image = plan_image(self.entries, self.pieces)
            path = f"{self.attempt.name}/r{self.rank:05d}.safetensors"
            with span("persist", step=self.attempt.step, bytes=image.total_bytes):
                blocks, store = Gathered(image, self.tensors), open_store(root)
                file = write_blocks(store, self.attempt.step, path, self.rank, image, blocks)
        return RankWritten(self.rank, self.attempt, file, self.shares, self.values)


class _Turn(threading.local):
    """The save that a thread is doing: DCP does each on one thread, and may do two at once."""

    asked: int | None = None
    """The step that the next save is to be of."""
    wanted: int | None = None
    """The step that was asked for; None for the one after the highest."""
    rank = 0
    is_coordinator = False
    attempt: SaveAttempt | None = None


class Writer(StorageWriter):  # torch gives no types
    """Saves what `torch.distributed.checkpoint` saves as steps of `root`, a path or URL.

    `checkpoint_id` is the number of the step (`"10"`); without it, the step is the one after the newest.
    A step is there whole, with its digests, once `dcp.save` returns, and not at all if any rank failed.
    `keep`: which steps stay, of those that this process has saved or that it went on from with a `Reader`;
    the others of them are deleted behind each save (`wait`).
    UsageError for `use_collectives=False`, and for values that are no plain data.  What else a
    `Checkpointer` does (snapshots, records, generators, a claim on the root) DCP does not ask for.
    """

    def __init__(self, root: str | os.PathLike[str], *, keep: Keep | None = None) -> None:
        self.root = path_of(root, "Writer", "root")
        require_native_root(self.root)
        if keep is not None and not isinstance(keep, Keep):
            raise unfit("Writer", "keep", keep, "a Keep", typed=True)
        self.keep = keep
        self._turn = _Turn()
        self._is_behind = False
        """True in the process of `async_save`: training does not wait for what is done here."""

    def __getstate__(self) -> dict[str, Any]:
        """For the process of `async_save`: no thread has anything under way there."""
        if self.root.startswith("memory://"):
            raise UsageError(
                f"{self.root} is memory of one process, and the process of async_save another",
                hint="save to a folder or a bucket, or by AsyncCheckpointerType.THREAD",
            )
        store = open_store(self.root)
        line = under_way(os.getpid()).line(store.url)
        return {"root": self.root, "keep": self.keep, "line": line}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["root"], keep=state["keep"])  # type: ignore[misc]
        self._is_behind = True
        store, here = open_store(self.root), under_way(os.getpid())
        if state["line"] and not here.line(store.url):
            here.take_over(store.url, state["line"])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: DCP is to make no `Writer` by itself of an id, for that says no root."""
        return False

    def wait(self) -> None:
        """Block until all is deleted that saves of this process have replaced, or `keep` let go."""
        _deletions(os.getpid()).settle(None)

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        """Begin another save, of the step `checkpoint_id`."""
        self._turn.asked = step_of_id(checkpoint_id, self.root)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take note of this rank.  DCP tells it only to a parameter that is called `kwargs`."""
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "use_collectives=False: ranks that do not talk cannot commit a step together",
                hint="leave it out",
            )
        turn = self._turn  # each save comes here, and only one with an id to `reset`
        turn.wanted, turn.asked, turn.attempt = turn.asked, None, None
        self._turn.rank = kwargs.get("rank") or 0
        self._turn.is_coordinator = is_coordinator

    def storage_meta(self) -> StorageMeta:
        """The store that the step goes to."""
        return StorageMeta(checkpoint_id=self.root, save_id=str(self._turn.asked or ""))

    # -- planning ---------------------------------------------------------------------------------

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: give the number of the step, and the name of the attempt, to all ranks.

        Not by their plans: with plan caching a rank goes by the one that it had before.
        """
        self.wait()  # a step that is being deleted may be the one to save
        store = open_store(self.root)
        sweep_host(store)
        self._turn.attempt = attempt = under_way(os.getpid()).begin(store, self._turn.wanted)
        hand(self._key(), msgspec.msgpack.encode(attempt))
        return plans

    def _key(self) -> str:
        step = "next" if self._turn.wanted is None else self._turn.wanted
        return f"dcp/{hexdigest(self.root.encode())}/{step}"

    def _attempt(self) -> SaveAttempt:
        given = None if self._turn.is_coordinator else handed(self._key())
        found = self._turn.attempt if given is None else decode_msgpack(given, SaveAttempt)
        if found is None:
            raise UsageError("the coordinator has not planned this save")
        under_way(os.getpid()).take(self.root, found)
        return found

    # -- writing ----------------------------------------------------------------------------------

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's image.  Blocks until it is durable."""
        done: Future[list[WriteResult]] = Future()
        done.set_result([self.prepare(plan, planner).write(self.root).result])
        return done

    def prepare(self, plan: SavePlan, planner: SavePlanner) -> Prepared:
        """Lay out what this rank has to write; its tensors are the planner's own."""
        values: dict[str, Any] = {}
        parts: _Parts = {}
        for item in plan.items:
            flat, data = item.index.fqn, planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                values[flat] = encoded(data, flat)
            else:
                start = tuple(_tensor_data(item).chunk.offsets)
                parts[flat, start] = item, _local(item, data)
        laid_out = _laid_out(parts, StateDictNames(plan.planner_data))
        return Prepared(self._turn.rank, self._attempt(), values, *laid_out)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: commit the step.  An error if what ranks saved does not fit together."""
        written = [one.storage_data for of_rank in results for one in of_rank]
        attempt, store, began = written[0].attempt, open_store(self.root), time.perf_counter()
        if any(w.attempt != attempt for w in written):
            raise HoldfastError("ranks have written parts of different saves", step=attempt.step)
        line = () if self.keep is None else under_way(os.getpid()).line(store.url)
        names = StateDictNames(metadata.planner_data)
        manifest = _manifest(attempt, written, names, len(results), line)
        replaced = commit(store, readable(manifest))
        others = under_way(os.getpid()).end(store, attempt)
        metadata.storage_meta = StorageMeta(checkpoint_id=self.root, save_id=str(attempt.step))
        with suppress(AgentError):  # the step is there; the next save puts another value
            take_away(self._key())
        emit("save.committed", step=attempt.step, seconds=round(time.perf_counter() - began, 3))
        if replaced is None and self.keep is None:
            return
        due = store, attempt, replaced, [attempt.step, *others]
        if self._is_behind or threading.current_thread() is not threading.main_thread():
            self._tidy(*due)
        else:
            _deletions(os.getpid()).submit(self._tidy, *due)

    def _tidy(
        self, store: Store, attempt: SaveAttempt, replaced: str | None, spare: list[int]
    ) -> None:
        """Delete what a commit has replaced, and what `keep` lets go of what training goes on from."""
        here, run = under_way(os.getpid()), attempt.run
        line = here.line(store.url)
        try:
            with span("tidy", step=attempt.step):
                discard(store, attempt.step, replaced)
                if self.keep is not None:
                    owns = partial(is_in_line, run=run, line=line)
                    prune(store, self.keep, spare=spare, owns=owns)
                    here.go_on(store, run, attempt.step, line)
        except Exception as error:
            emit("tidy.failed", error=str(error))


@cache
def _deletions(pid: int) -> Worker:
    """The one thread of a process that deletes steps: the next save, by any `Writer`, waits for it."""
    return Worker("holdfast-tidy")


def _tensor_data(item: WriteItem) -> TensorWriteData:
    """Return the place of an item's tensor in the whole; UsageError if the planner has said none."""
    if item.tensor_data is None:
        raise UsageError(
            f"{item.index.fqn}: the planner's item is of a tensor, and has no tensor_data",
            hint="a planner of your own gives it, as DefaultSavePlanner does",
        )
    return item.tensor_data


def _local(item: WriteItem, data: Any) -> torch.Tensor:
    """The tensor that an item of a plan saves; UsageError if it is none that can be written."""
    flat, sizes = item.index.fqn, tuple(_tensor_data(item).chunk.sizes)
    if item.type == WriteItemType.TENSOR:
        check_kind(data, flat)  # a shard may have the marks of the parameter that was cut
    tensor = data.detach()
    check_kind(tensor, flat)
    if tuple(tensor.shape) != sizes:
        raise UsageError(
            f"{flat}: the planner gave a tensor of shape {tuple(tensor.shape)} for {sizes}"
        )
    return tensor


def _laid_out(
    parts: _Parts, names: StateDictNames
) -> tuple[list[TensorShare], tuple[TensorEntry, ...], Pieces, list[torch.Tensor]]:
    """Return what a rank saves, and where it lies in its image: by width of elements, name and start.

    This is the order of the format for tensors that are sorted by name and have a sharding each.
    """
    by_flat: dict[str, list[tuple[WriteItem, torch.Tensor]]] = {}
    for (flat, _), part in sorted(parts.items()):
        by_flat.setdefault(flat, []).append(part)
    shares: list[TensorShare] = []
    entries: list[TensorEntry] = []
    rows: list[_Row] = []
    for flat, (name, state) in sorted(((f, names.of(f)) for f in by_flat), key=lambda one: one[1]):
        item, first = by_flat[flat][0]
        shape, dtype = tuple(_tensor_data(item).size), dtype_name(first.dtype)
        boxes = []
        for item, tensor in by_flat[flat]:
            start = tuple(_tensor_data(item).chunk.offsets)
            stop = tuple(a + n for a, n in zip(start, tensor.shape))
            if prod(tensor.shape):
                boxes.append((start, stop))
                rows.append((-first.element_size(), len(entries), start, stop, tensor))
        shares.append(TensorShare(flat, name, state, dtype, shape, tuple(boxes)))
        entries.append(TensorEntry(name, dtype, shape, len(entries), state))
    rows.sort(key=lambda row: row[:3])
    return shares, tuple(entries), _pieces(rows), [row[4] for row in rows]


def _pieces(rows: list[_Row]) -> Pieces:
    width = max([1, *(len(row[2]) for row in rows)])
    start, stop = np.zeros((len(rows), width), np.int64), np.ones((len(rows), width), np.int64)
    for i, (_, _, a, b, _) in enumerate(rows):
        start[i, : len(a)], stop[i, : len(b)] = a, b
    size = np.array([-row[0] * row[4].numel() for row in rows], np.int64)
    tensor = np.array([row[1] for row in rows], np.int64)
    return Pieces(tensor, start, stop, np.cumsum(size) - size, size)


def _manifest(
    attempt: SaveAttempt,
    written: Iterable[RankWritten],
    names: StateDictNames,
    world: int,
    line: Line,
) -> Manifest:
    """The manifest of what all ranks have written; it is known from that alone, but for its `line`."""
    written = list(written)
    values = {flat: tree for w in written for flat, tree in w.values.items()}
    tensors, shardings, expected = _merged(written, names)
    extras = names.extras(values, expected)
    expected |= {flat: (names.path(flat), tree) for flat, tree in values.items()}
    table = table_for(expected, tensors, extras)
    manifest = Manifest(
        holdfast=VERSION,
        step=attempt.step,
        run=attempt.run,
        line=line,
        attempt=attempt.name,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        software={"holdfast": __version__, "torch": f"{torch.__version__} (dcp)"},
        mesh=(("rank", world),) if world > 1 else (),
        chunk_bytes=CHUNK_BYTES,
        algorithm=ALGORITHM,
        shardings=shardings,
        tensors=tensors,
        aliases={},
        files=tuple(sorted((w.file for w in written if w.file), key=lambda f: f.rank)),
        extras=extras if table is None else {**extras, DCP_NAMES: table},
        per_rank={},
    )
    check(manifest)  # what no reader would take is not committed
    return manifest


def _merged(
    written: list[RankWritten], names: StateDictNames
) -> tuple[tuple[TensorEntry, ...], tuple[ShardingEntry, ...], Listing]:
    """All tensors, sorted by name, the sharding of each, and what DCP called them."""
    known: dict[str, TensorShare] = {}
    held: dict[str, list[FragmentEntry]] = {}
    for w in written:
        for share in w.shares:
            first = known.setdefault(share.name, share)
            if (first.flat, first.dtype, first.shape) != (share.flat, share.dtype, share.shape):
                raise UsageError(
                    f"{share.name!r} is {first.flat!r}, {first.dtype} {first.shape}, on one rank, and "
                    f"{share.flat!r}, {share.dtype} {share.shape}, on rank {w.rank}"
                )
            boxes = (FragmentEntry(w.rank, start, stop) for start, stop in share.boxes)
            held.setdefault(share.name, []).extend(boxes)
    order = sorted(known)
    entries = tuple(
        TensorEntry(name, known[name].dtype, known[name].shape, i, known[name].state)
        for i, name in enumerate(order)
    )
    shardings = tuple(ShardingEntry(held=tuple(held[name])) for name in order)
    listing: Listing = {
        known[t.name].flat: (names.path(known[t.name].flat), named(t.name, t.dtype, t.shape))
        for t in entries
    }
    return entries, shardings, listing
