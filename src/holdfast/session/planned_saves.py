"""Steps with a foreign plan: each rank writes the parts that the planner gives it, and one rank commits the
step.

    coordinator   attempt = saves.begin(step)       the number of the step, and the folder of this try of it
    other ranks   attempt = saves.begun(step)       the same, by the process group
    every rank    written = saves.prepare(attempt, rank, parts).write()              its image, durable
    coordinator   saves.commit([written, ...])      one manifest: from here on the step exists

A planner (torch's DCP, a script that reads another format) says which boxes of which tensors a rank saves.
The planner also brings the results of `write` to the coordinator; the layout of the images follows from
these alone.  Each tensor has a sharding of its own, and tensors are sorted by name, so that ranks can lay
out their parts without knowing those of others.

There is no claim on the root: an attempt is a try of one save, and the next attempt deletes the files of a
failed one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from holdfast.base.arguments import instance_of, path_of
from holdfast.base.errors import AgentError, HoldfastError, UsageError
from holdfast.base.events import emit, span
from holdfast.base.threads import Worker
from holdfast.base.version import __version__
from holdfast.base.wire import WireError, decode_msgpack
from holdfast.core.checkpoint.committing import commit
from holdfast.core.checkpoint.lineage import Lineage, is_in_line
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.pruning import prune
from holdfast.core.checkpoint.tidying import Keep, discard
from holdfast.core.codec.digest import ALGORITHM, CHUNK_BYTES, hexdigest
from holdfast.core.format.checking import check
from holdfast.core.format.image import plan_image
from holdfast.core.format.manifest import (
    FORMAT_VERSION,
    FileEntry,
    FragmentEntry,
    Manifest,
    ShardingEntry,
    TensorEntry,
    readable,
)
from holdfast.core.group.passed_values import hand, handed, take_away
from holdfast.core.layout import Box, whole
from holdfast.core.layout.pieces import Pieces
from holdfast.core.store import Store, open_store
from holdfast.live.roots import sweep_host
from holdfast.live.saving.image_assembly import Gathered
from holdfast.live.saving.writing import write_blocks
from holdfast.live.state.devices import devices_of, wait_for, wait_for_writers
from holdfast.live.state.placed import dtype_name
from holdfast.live.state.tensor_kinds import check_kind
from holdfast.session.attempts import SaveAttempt, under_way


@dataclass(frozen=True)
class Part:
    """A tensor, or a box of one, which a rank saves.

    `tensor` has the values in `box` of a tensor of `shape`; without these it is the whole tensor, on any
    device.  It is not copied before `write` or `staged`.  `state`: `param`, `buffer`, an optimizer state
    such as `exp_avg`, or `tensor`.  `planned`: the planner's own name of the tensor, if it differs from
    `name`.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...] | None = None
    box: Box | None = None
    state: str = "tensor"
    planned: str | None = None


class TensorShare(msgspec.Struct, frozen=True, array_like=True):
    """The part of a tensor that a rank saves."""

    planned: str
    name: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Start and stop of each part, in the order of the file."""


class RankWritten(msgspec.Struct, frozen=True, array_like=True):
    """The parts that a rank has written: plain data, which the planner brings to the coordinator."""

    rank: int
    attempt: SaveAttempt
    file: FileEntry | None
    shares: list[TensorShare]
    values: dict[str, Any]
    """Values that are no tensors, as JSON trees, by the planner's names."""

    @property
    def bytes(self) -> int:
        """Number of bytes of the rank's image."""
        return 0 if self.file is None else self.file.bytes


@dataclass
class PreparedPart:
    """The parts that a rank has to write.  It can be pickled if its tensors can."""

    root: str
    rank: int
    attempt: SaveAttempt
    values: dict[str, Any]
    shares: list[TensorShare]
    entries: tuple[TensorEntry, ...]
    pieces: Pieces
    tensors: list[torch.Tensor]
    """The part of a tensor that each piece holds."""

    def staged(self) -> PreparedPart:
        """Return the same with copies of the tensors on the host.  Blocks until they are copied."""
        wait_for_writers(self.tensors)
        copies = [t.to("cpu", copy=True, non_blocking=True) for t in self.tensors]
        wait_for(devices_of(self.tensors))
        return replace(self, tensors=copies)

    def write(self) -> RankWritten:
        """Write the image, if there is one.  Blocks until it is durable; StoreError."""
        file = None
        if self.tensors:
            image = plan_image(self.entries, self.pieces)
            path = f"{self.attempt.name}/r{self.rank:05d}.safetensors"
            with span("persist", step=self.attempt.step, bytes=image.total_bytes):
                blocks, store = Gathered(image, self.tensors), open_store(self.root)
                file = write_blocks(store, self.attempt.step, path, self.rank, image, blocks)
        return RankWritten(self.rank, self.attempt, file, self.shares, self.values)

    def write_and_note(self, note: str) -> None:
        """Write, and put the result or the error into the file `note`, for another process."""
        try:
            text = msgspec.msgpack.encode((None, self.write()))
        except Exception as error:
            text = msgspec.msgpack.encode((WireError.of(error), None))
        with open(f"{note}.new", "wb") as file:
            file.write(text)
        os.replace(f"{note}.new", note)

    def take_note(self, note: str) -> RankWritten:
        """Return the result in the file `note`, and delete the file.  Raises the error in it; HoldfastError
        if it is empty."""
        with open(note, "rb") as file:
            text = file.read()
        for path in (note, f"{note}.new"):
            with suppress(FileNotFoundError):
                os.unlink(path)
        if not text:
            raise HoldfastError(
                f"the process that wrote the image of rank {self.rank} ended without having done so"
            )
        error, written = decode_msgpack(text, tuple[WireError | None, RankWritten | None])
        if error is not None:
            raise error.error(rank=self.rank)
        assert written is not None
        return written


class PlannedSaves:
    """Saves with a foreign plan into one root.  Each thread makes one save after the other.

    `keep`: which steps stay, of those that this process has saved or went on from (`go_on_from`); the
    others of these are deleted in the background after each save (`wait`).  It can be pickled, so that
    another process of the same training can save.
    """

    def __init__(self, root: str, keep: Keep | None = None) -> None:
        self.root = path_of(root, "PlannedSaves", "root")
        if keep is not None:
            instance_of(keep, Keep, "PlannedSaves", "keep", "a holdfast.Keep(...), or None")
        self.keep = keep
        self._keys: dict[str, str] = {}
        """On the coordinator: the name of the attempt that was last handed to other ranks, by key."""
        self._is_behind = False
        """True in a process beside the training's, which does not wait for this one."""

    def __getstate__(self) -> dict[str, Any]:
        line = under_way(os.getpid()).line(open_store(self.root).url)
        return {"root": self.root, "keep": self.keep, "line": line}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["root"], state["keep"])  # type: ignore[misc]
        self._is_behind = True
        store, here = open_store(self.root), under_way(os.getpid())
        if state["line"] and not here.line(store.url):
            here.take_over(store.url, state["line"])

    @staticmethod
    def go_on_from(saved: Checkpoint) -> None:
        """Note that training goes on from a loaded step, so `keep` applies to that step and its lineage."""
        if saved.format == "holdfast":
            m = saved.manifest
            under_way(os.getpid()).go_on(saved.store, m.run, m.step, m.line)

    def wait(self) -> None:
        """Block until the steps that saves of this process replaced, or `keep` does not keep, are
        deleted."""
        _deletions(os.getpid()).settle(None)

    def begin(self, step: int | None = None) -> SaveAttempt:
        """On the coordinator: begin to save a step (default: the one after the highest) for all
        ranks.  Blocks for earlier deletions."""
        self.wait()  # a step that is being deleted may be the one to save
        store = open_store(self.root)
        sweep_host(store)
        attempt = under_way(os.getpid()).begin(store, step)
        key = self._key(step)
        self._keys[key] = attempt.name
        hand(key, msgspec.msgpack.encode(attempt))
        return attempt

    def begun(self, step: int | None = None) -> SaveAttempt | None:
        """On the other ranks: return the coordinator's attempt, by the process group; None without a
        group."""
        given = handed(self._key(step))
        return None if given is None else decode_msgpack(given, SaveAttempt)

    def _key(self, step: int | None) -> str:
        which = "next" if step is None else step
        return f"planned/{hexdigest(self.root.encode())}/{which}"

    def prepare(
        self,
        attempt: SaveAttempt,
        rank: int,
        parts: Iterable[Part],
        values: Mapping[str, Any] | None = None,
    ) -> PreparedPart:
        """Lay out this rank's image.  The tensors still belong to the planner, and must not change until
        they are written or staged.

        `values`: values that are not tensors, as JSON trees by the planner's names.  UsageError for tensors
        that cannot be saved.
        """
        under_way(os.getpid()).take(self.root, attempt)
        return PreparedPart(self.root, rank, attempt, dict(values or {}), *_laid_out(parts))

    def commit(
        self,
        written: Sequence[RankWritten],
        extras: Callable[[Mapping[str, TensorEntry]], dict[str, Any]] | None = None,
        *,
        by: str = "",
    ) -> int:
        """On the coordinator: commit the step from the results of all ranks; return its number.  Blocks.

        `extras` is called with the step's tensors by the planner's names, and returns the JSON trees of
        values that are not tensors; without it they are the `values` of all ranks.  `by`: the planner's
        name, which the manifest states.  UsageError or HoldfastError if the parts of the ranks do not fit
        together.
        """
        attempt, store, began = written[0].attempt, open_store(self.root), time.perf_counter()
        if any(w.attempt != attempt for w in written):
            raise HoldfastError("ranks have written parts of different saves", step=attempt.step)
        line = () if self.keep is None else under_way(os.getpid()).line(store.url)
        replaced = commit(store, readable(_manifest(attempt, written, extras, line, by)))
        others = under_way(os.getpid()).end(store, attempt)
        for key in self._key(attempt.step), self._key(None):
            if self._keys.get(key) == attempt.name:
                del self._keys[key]
                with suppress(AgentError):  # the step is there; the next save puts another value
                    take_away(key)
        emit("save.committed", step=attempt.step, seconds=round(time.perf_counter() - began, 3))
        if replaced is None and self.keep is None:
            return attempt.step
        due = store, attempt, replaced, [attempt.step, *others]
        if self._is_behind or threading.current_thread() is not threading.main_thread():
            self._tidy(*due)
        else:
            _deletions(os.getpid()).submit(self._tidy, *due)
        return attempt.step

    def _tidy(
        self, store: Store, attempt: SaveAttempt, replaced: str | None, spare: list[int]
    ) -> None:
        """Delete the replaced attempt, and the training's own steps that `keep` does not keep."""
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
    """The one thread of a process that deletes steps: the next save, by any planner, waits for it."""
    return Worker("holdfast-tidy")


# -- one rank's image -------------------------------------------------------------------------------

_Row = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.Tensor]
"""A part of a tensor: minus the width of its elements, number of the tensor, start, stop, the part."""


def _laid_out(
    parts: Iterable[Part],
) -> tuple[list[TensorShare], tuple[TensorEntry, ...], Pieces, list[torch.Tensor]]:
    """Return a rank's shares and entries, and the pieces of its image, sorted by width of elements, name
    and start: the order of the format for tensors that are sorted by name and have a sharding each."""
    placed = sorted(map(_placed, parts), key=lambda p: (p.name, p.state, p.planned, p.box.start))
    shares: list[TensorShare] = []
    entries: list[TensorEntry] = []
    rows: list[_Row] = []
    for planned, of_one in groupby(placed, key=lambda p: p.planned):
        held = [*of_one]
        name, state, shape = held[0].name, held[0].state, held[0].shape
        dtype = dtype_name(held[0].tensor.dtype)
        boxes = tuple((p.box.start, p.box.stop) for p in held if p.box.size)
        rows += [
            (-p.tensor.element_size(), len(entries), p.box.start, p.box.stop, p.tensor)
            for p in held
            if p.box.size
        ]
        shares.append(TensorShare(planned, name, state, dtype, shape, boxes))
        entries.append(TensorEntry(name, dtype, shape, len(entries), state))
    rows.sort(key=lambda row: row[:3])
    return shares, tuple(entries), _pieces(rows), [row[4] for row in rows]


class _Placed(NamedTuple):
    """A part with all defaults filled in."""

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    box: Box
    state: str
    planned: str


def _placed(part: Part) -> _Placed:
    """Return a part with its place.  UsageError if its values cannot be written, or have another shape."""
    planned = part.planned or part.name
    check_kind(part.tensor, planned)
    tensor = part.tensor.detach()
    check_kind(tensor, planned)
    shape = tuple(tensor.shape) if part.shape is None else part.shape
    box = whole(shape) if part.box is None else part.box
    if tuple(tensor.shape) != box.shape:
        raise UsageError(
            f"{planned}: the planner gave a tensor of shape {tuple(tensor.shape)} for {box.shape}"
        )
    return _Placed(part.name, tensor, shape, box, part.state, planned)


def _pieces(rows: list[_Row]) -> Pieces:
    width = max([1, *(len(row[2]) for row in rows)])
    start, stop = np.zeros((len(rows), width), np.int64), np.ones((len(rows), width), np.int64)
    for i, (_, _, a, b, _) in enumerate(rows):
        start[i, : len(a)], stop[i, : len(b)] = a, b
    size = np.array([-row[0] * row[4].numel() for row in rows], np.int64)
    tensor = np.array([row[1] for row in rows], np.int64)
    return Pieces(tensor, start, stop, np.cumsum(size) - size, size)


# -- the manifest -----------------------------------------------------------------------------------


def _manifest(
    attempt: SaveAttempt,
    written: Sequence[RankWritten],
    extras: Callable[[Mapping[str, TensorEntry]], dict[str, Any]] | None,
    line: Lineage,
    by: str,
) -> Manifest:
    """Make the manifest from the results of all ranks, and the run's lineage."""
    tensors, shardings, planned = _merged(written)
    values = {name: tree for w in written for name, tree in w.values.items()}
    manifest = Manifest(
        holdfast=FORMAT_VERSION,
        step=attempt.step,
        run=attempt.run,
        line=line,
        attempt=attempt.name,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        software={
            "holdfast": __version__,
            "torch": f"{torch.__version__} ({by})".removesuffix(" ()"),
        },
        mesh=(("rank", len(written)),) if len(written) > 1 else (),
        chunk_bytes=CHUNK_BYTES,
        algorithm=ALGORITHM,
        shardings=shardings,
        tensors=tensors,
        aliases={},
        files=tuple(sorted((w.file for w in written if w.file), key=lambda f: f.rank)),
        extras=values if extras is None else extras(planned),
        per_rank={},
    )
    check(manifest)  # commit nothing that readers refuse
    return manifest


def _merged(
    written: Iterable[RankWritten],
) -> tuple[tuple[TensorEntry, ...], tuple[ShardingEntry, ...], dict[str, TensorEntry]]:
    """Return all tensors, sorted by name, the sharding of each, and the tensors by the planner's names."""
    known: dict[str, TensorShare] = {}
    held: dict[str, list[FragmentEntry]] = {}
    for w in written:
        for share in w.shares:
            first = known.setdefault(share.name, share)
            if (first.planned, first.dtype, first.shape) != (
                share.planned,
                share.dtype,
                share.shape,
            ):
                raise UsageError(
                    f"{share.name!r} is {first.planned!r}, {first.dtype} {first.shape}, on one rank, and "
                    f"{share.planned!r}, {share.dtype} {share.shape}, on rank {w.rank}"
                )
            boxes = (FragmentEntry(w.rank, start, stop) for start, stop in share.boxes)
            held.setdefault(share.name, []).extend(boxes)
    order = sorted(known)
    entries = tuple(
        TensorEntry(name, known[name].dtype, known[name].shape, i, known[name].state)
        for i, name in enumerate(order)
    )
    shardings = tuple(ShardingEntry(held=tuple(held[name])) for name in order)
    return entries, shardings, {known[t.name].planned: t for t in entries}
