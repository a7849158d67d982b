"""The snapshot: from live tensors into the image, inside the window between two optimizer steps.

Parameters and optimizer state change only inside `optimizer.step()`.  So after step t their copy may go
on in the background until step t + 1's optimizer step begins (`window`).  What else may change before that
is set aside at the call: `copy_timing` knows what that is.  A script that writes in the window all the same
is found by the tensors' version counters, and by a few elements of each weight: those in the image are
compared with those at the call.  Then the save fails, by name, and what was written is set aside from
then on.

The writer follows the copier through the image (`FillProgress`), so that storage is busy from the start.

The image's memory and the list of copies are made once and used again while shapes and addresses stay.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from holdfast.base.errors import HoldfastError, need
from holdfast.base.events import span
from holdfast.base.text import listed
from holdfast.base.threads import in_threads
from holdfast.core.format.image import Image
from holdfast.core.format.manifest import TensorEntry
from holdfast.core.layout import Box
from holdfast.live.state.arrays import array_of, raw_array
from holdfast.live.state.copy_timing import (
    CopyTiming,
    Corners,
    differing_corners,
    is_on_host,
    versions,
    written_since,
)
from holdfast.live.state.devices import (
    LockedPages,
    Moment,
    after,
    devices_in,
    devices_in_use,
    devices_of,
    lock_pages,
    on_streams,
    wait_for_stream,
    wait_for_writers,
)
from holdfast.live.state.named import Collected
from holdfast.live.state.window import Window
from holdfast.live.state.writes import address_and_strides, corner

if TYPE_CHECKING:
    from holdfast.live.state.carrying import CarriedCopies, CarryBuffer

need("torch", torch, "_foreach_copy_")

PROGRESS_BYTES = 4 << 20
TOUCH_PAGES = 1 << 12
LARGE_BYTES = 4 << 20
"""Size of what one thread copies at a time, of what is set aside."""
COPY_THREADS = min(4, os.cpu_count() or 1)
BATCH_BYTES = 64 << 20
"""Bytes given to a device's stream at a time, where the rest may have to be carried over."""
SETTLE_S = 0.25
"""Least pause after a copy, in seconds, before the counters are read again where nothing else tells that
nothing is being written."""
PAUSE_COPIES = 16.0
"""Least such pause (`SETTLE_S`) in times that the copy of the largest tensor takes: filling one with random
numbers takes so long."""


class Buffer(Protocol):
    """Host memory for an image."""

    view: memoryview

    def reserve(self, size: int, live: Collected) -> memoryview:
        """At least `size` bytes on a page boundary, the same ones each time while they suffice.

        Page-locked for the device of `live`, if that is one.
        """


class PrivateBuffer:
    """Memory of this process.

    Pages are zero until first touched, and the first touch is slow: keep it.
    """

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._locked: LockedPages | None = None
        self.view = memoryview(b"")

    def reserve(self, size: int, live: Collected) -> memoryview:
        """A view of at least `size` bytes; earlier views become stale if it has to grow."""
        if len(self.view) < size:
            self._unpin()
            self._map = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._map.madvise(mmap.MADV_HUGEPAGE)
            self.view = memoryview(self._map)
            self._locked = lock_pages(self.view, devices_in(live))
        return self.view

    def _unpin(self) -> None:
        if self._locked is not None:
            self._locked.undo()
            self._locked = None

    def close(self) -> None:
        """Give the memory back; nothing may be using it."""
        self._unpin()
        self.view = memoryview(b"")
        self._map = None


class CopyTap(Protocol):
    """A reader of the same tensors at the same moment, for somebody else."""

    @property
    def sources(self) -> list[torch.Tensor]:
        """The tensors that it reads, in the order in which it does."""

    def run(self, carried: CarriedCopies | None, first: int, ready: Moment | None) -> None:
        """Read them, not before `ready`; `carried` has them from number `first` on."""


class FillProgress:
    """Tells how far an image is filled: the copier advances, the writer waits.  Thread-safe.

    The waits need no deadline of their own: a copier completes or fails, whatever becomes of it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._upto = 0
        self._complete = False
        self._error: BaseException | None = None

    def advance(self, upto: int) -> None:
        """Bytes before `upto` are filled."""
        self._set(_upto=upto)

    def complete(self) -> None:
        """All is filled, and is of one moment."""
        self._set(_complete=True)

    def fail(self, error: BaseException) -> None:
        """It will never be complete."""
        self._set(_error=error)

    def _set(self, **fields: Any) -> None:
        with self._changed:
            self.__dict__.update(fields)
            self._changed.notify_all()

    def wait(self, upto: int) -> None:
        """Wait until bytes before `upto` are filled.  Raises the copier's error."""
        self._until(lambda: self._upto >= upto)

    def conclude(self) -> None:
        """Wait until it is known how it ends; the copier's error if it fails."""
        self._until(lambda: self._complete)

    def _until(self, reached: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: reached() or self._error)
            if self._error is not None:
                raise self._error


SetAside = dict[tuple[str, int], torch.Tensor]
"""Tensors that were copied at the call, by name and number of the part."""


@torch.inference_mode(False)  # type: ignore[untyped-decorator]  # torch refuses such copies outside
def set_aside(live: Collected, kept: SetAside) -> None:
    """Copy what may be written before the copy in the background is made (`Collected.aside`) into `kept`,
    which is reused.  Blocks; large tensors of the host are copied by several threads."""
    into, sources = [], []
    for name in live.aside:
        for number, part in enumerate(live.tensors[name].parts):
            local, old = part.local.detach(), kept.get((name, number))
            if old is None or old.shape != local.shape or old.dtype != local.dtype:
                kept[name, number] = old = _memory_for(local)
            into.append(old)
            sources.append(local)
    wait_for_writers(live.tensors[name].counted for name in live.aside)
    for key in kept.keys() - {
        (name, n) for name in live.aside for n in range(len(live.tensors[name].parts))
    }:
        del kept[key]
    copy_at_once(into, sources)


def _memory_for(local: torch.Tensor) -> torch.Tensor:
    """Memory for a copy, on the device of the tensor; on the host if that has no more."""
    try:
        return torch.empty_like(local, memory_format=torch.contiguous_format)
    except torch.OutOfMemoryError:
        return torch.empty_like(local, device="cpu", memory_format=torch.contiguous_format)


def copy_at_once(into: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors to others of the same shapes, at memory speed.  Blocks."""
    is_large = [source.is_cpu and source.nbytes >= LARGE_BYTES for source in sources]
    few = [pair for pair, large in zip(zip(into, sources), is_large) if not large]
    many = [pair for pair, large in zip(zip(into, sources), is_large) if large]
    if few:
        few = [(_copyable(one), _copyable(source)) for one, source in few]
        torch._foreach_copy_([one for one, _ in few], [source for _, source in few])
    pieces = [piece for pair in many for piece in _pieces(*pair)]
    in_threads(lambda piece: piece[0].copy_(piece[1]), pieces, COPY_THREADS, fills=True)


def _copyable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or its bytes, where torch (2.9) has the type and no copies of it."""
    is_float4 = tensor.dtype == getattr(torch, "float4_e2m1fn_x2", None)
    return tensor.view(torch.uint8) if is_float4 else tensor


def _pieces(
    into: torch.Tensor, source: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Split a large copy along the first dim; what has none to speak of is copied as a whole."""
    rows = len(source) if source.dim() else 1
    number = min(rows, -(-source.nbytes // LARGE_BYTES))
    if number < 2:
        yield into, source
        return
    yield from zip(into.tensor_split(number), source.tensor_split(number))


def fingerprint(live: Collected, kept: SetAside) -> list[Any]:
    """Names and places of what is set aside, and addresses and strides of the rest: they must not change if
    a list of copies is to be used again."""
    return [
        {key: tensor.data_ptr() for key, tensor in kept.items()},
        *(
            address_and_strides(part.local)
            for name, t in live.tensors.items()
            if name not in live.aside
            for part in t.parts
        ),
    ]


@dataclass
class Copies:
    """The copies that fill an image: numpy pairs for host tensors, torch pairs for device tensors."""

    host: list[tuple[Any, Any, int]]
    """(part of the image, source, where that part ends in the image)"""
    device: list[tuple[torch.Tensor, torch.Tensor]]
    corners: dict[tuple[str, int], np.ndarray[Any, Any]] = field(default_factory=dict)
    """A few elements, in the image, of each part that is there as a whole (`copy_timing.Corners`)."""
    unmoved: dict[tuple[str, Box], np.ndarray[Any, Any]] = field(default_factory=dict)
    """A few elements, in the image, of what is copied from a device and no optimizer moves."""

    @staticmethod
    def plan(
        image: Image,
        entries: tuple[TensorEntry, ...],
        live: Collected,
        kept: SetAside,
        memory: memoryview,
    ) -> Copies:
        """One copy per piece; the header is written now."""
        memory[: image.data_start] = image.header
        copies = Copies([], [])
        p, begin = image.pieces, image.data_start
        columns = (p.tensor, p.start, p.stop, p.offset, p.bytes)
        for index, start, stop, offset, size in zip(*(c.tolist() for c in columns)):
            entry = entries[index]
            t = live.tensors[entry.name]
            n = len(entry.shape)
            at = begin + offset
            box = Box(tuple(start[:n]), tuple(stop[:n]))
            number = t.holder(box) if t.rest else 0
            part = t.parts[number] if number else t.placed
            is_aside = entry.name in live.aside
            source = kept[entry.name, number] if is_aside else part.local
            if box != part.box:
                if part.box & box != box:
                    raise HoldfastError(
                        f"{entry.name!r}: this rank is to write {box}, but has {part.box}"
                    )
                source = source[box.within(part.box.start)]
            into = copies._add(memory, at, source, at + size)
            if not is_aside and not is_on_host(t) and entry.name not in live.moved:
                copies.unmoved[entry.name, box] = corner(into)
            elif not is_aside and t.state == "param" and box == part.box:
                copies.corners[entry.name, number] = corner(into)
        return copies

    def _add(
        self, memory: memoryview, start: int, part: torch.Tensor, stop: int
    ) -> np.ndarray[Any, Any]:
        if part.is_cpu:
            values = array_of(part)
            into = np.ndarray(values.shape, values.dtype, memory, start)
            self.host.append((into, values, stop))
            return into
        flat = torch.frombuffer(memory[start:stop], dtype=torch.uint8).view(part.dtype)
        self.device.append((flat.view(part.shape), part.detach()))
        return raw_array(self.device[-1][0])

    @property
    def sources(self) -> list[torch.Tensor]:
        """The tensors that are copied, in the order in which they are."""
        return [source for _, source in self.device] + [
            torch.from_numpy(values) for _, values, _ in self.host
        ]

    def run(
        self, filling: FillProgress, ready: Moment | None, carried: CarriedCopies | None = None
    ) -> None:
        """Do them all, in the image's order; those that were `carried` over from where they are now.

        Device copies come first, on a stream of their own that waits for `ready`; without it, for
        all that the device has been given.  Host tensors may be what a device writes to, too.
        """
        if self.device:
            self._run_device(ready, carried)
        elif ready is not None:
            ready.wait()
        marked = 0
        for number, (into, source, stop) in enumerate(self.host, len(self.device)):
            if carried is None:
                np.copyto(into, source)
            else:
                np.copyto(into, carried.take(number).numpy())
                carried.done()
            if stop - marked >= PROGRESS_BYTES and not self.device:
                filling.advance(stop)
                marked = stop

    def _run_device(self, ready: Moment | None, carried: CarriedCopies | None) -> None:
        """Copy in batches if the rest may have to be carried over: what a stream was given cannot be."""
        devices = devices_of(source for _, source in self.device)
        streams = [after(ready, device, "snapshot") for device in devices]
        numbers = range(len(self.device))
        batches = [numbers] if carried is None else self._batches()
        for batch in batches:
            into = [self.device[number][0] for number in batch]
            sources = [
                self.device[number][1] if carried is None else carried.take(number)
                for number in batch
            ]
            with on_streams(streams):
                if carried is not None:
                    carried.before(streams)
                torch._foreach_copy_(into, sources, non_blocking=True)
            for stream in streams:
                wait_for_stream(stream)
            if carried is not None:
                carried.done()

    def _batches(self) -> Iterator[range]:
        """Numbers of device copies, some `BATCH_BYTES` at a time."""
        first, given = 0, 0
        for number, (into, _) in enumerate(self.device):
            given += into.nbytes
            if given >= BATCH_BYTES:
                yield range(first, number + 1)
                first, given = number + 1, 0
        if first < len(self.device):
            yield range(first, len(self.device))


@dataclass(frozen=True)
class StateView:
    """The training thread's side of a snapshot: what the state was when it was asked for."""

    live: Collected
    versions: list[int]
    ready: Moment
    corners: Corners = field(default_factory=dict)
    """A few elements of each weight on the host."""

    @staticmethod
    def of(live: Collected, corners: Corners) -> StateView:
        devices = devices_in(live)
        if live.tensors and not devices:  # one may write to them on the host
            devices = devices_in_use()
        return StateView(live, versions(live), Moment(devices), corners)


@dataclass(frozen=True)
class Shot:
    """The copies of one snapshot into its image, and what else is read of the same moment."""

    copies: Copies
    moment: StateView
    filling: FillProgress
    stop: int
    """End of the part of the image that the copies fill, in bytes."""
    step: int
    copy_timing: CopyTiming
    beside: CopyTap | None

    def carried(self, room: CarryBuffer) -> CarriedCopies:
        """All that is read; with `room`, what is left when the window ends is carried over."""
        from holdfast.live.state.carrying import CarriedCopies

        beside = self.beside.sources if self.beside is not None else []
        sources = self.copies.sources + beside
        return CarriedCopies(sources, room, lambda: not self.changed() and not self.rewritten())

    def take(self, carried: CarriedCopies | None) -> float:
        """Read it.  Returns the seconds that it took."""
        began = time.perf_counter()
        ready = self.moment.ready
        with span("snapshot.copy", step=self.step):
            self.copies.run(self.filling, ready, carried)
            if self.beside is not None:
                first = len(self.copies.device) + len(self.copies.host)
                self.beside.run(carried, first, ready)
        self.filling.advance(self.stop)
        return time.perf_counter() - began

    def changed(self) -> list[str]:
        """Names of the tensors that are other than at the call, as far as counts tell."""
        return written_since(self.moment.live, self.moment.versions)

    def rewritten(self) -> list[str]:
        """Names of the weights of which a few elements are other than at the call.

        A write that nothing counts, and that has come behind the copy of these elements, is seen by it.
        """
        return differing_corners(self.moment.corners, self.copy_timing.corners(self.moment.live))

    def corners_in_image(self) -> Corners:
        """A few elements of the weights as they were copied."""
        return {key: view.tobytes() for key, view in self.copies.corners.items()}

    def compare_images(self) -> None:
        """Let it be learned what differs from the image before, of tensors on a device."""
        elements = {key: view.tobytes() for key, view in self.copies.unmoved.items()}
        self.copy_timing.compare_images(self.moment.live, elements)

    def pause_s(self, took_s: float) -> float:
        """Seconds in which any write ends that was under way when a copy of `took_s` seconds did; 0 if all
        was set aside, where nobody writes."""
        live, copied = self.moment.live, max(self.stop, 1)
        sizes = [
            part.local.nbytes
            for name, t in live.tensors.items()
            if name not in live.aside
            for part in t.parts
        ]
        return max(SETTLE_S, PAUSE_COPIES * took_s * max(sizes) / copied) if sizes else 0.0


class WrittenMeanwhile(HoldfastError):
    """Tensors were written while they were copied: `names`."""

    def __init__(self, message: str, names: tuple[str, ...] = (), **where: Any) -> None:
        super().__init__(message, **where)
        self.names = names


def copy_in_window(shot: Shot, window: Window, *, room: CarryBuffer | None) -> None:
    """Copy all that is saved; WrittenMeanwhile if that is not what was there at the call.

    With `room`, what neither is copied nor read beside when the window ends is carried over in it.
    """
    carried = shot.carried(room) if room is not None and room.size else None
    try:
        window.begin(carried)
        try:
            took_s = shot.take(carried)
        finally:  # the training thread may be waiting to carry
            is_carried = carried is not None and carried.close()
        names = [] if is_carried else shot.rewritten()
        if not is_carried:
            names += window.settle(shot.changed, shot.pause_s(took_s))
        names += differing_corners(shot.moment.corners, shot.corners_in_image())
        shot.compare_images()
    finally:
        window.done()
    if names:
        written = list(dict.fromkeys(names))
        raise WrittenMeanwhile(
            f"weights were written outside optimizer.step() while they were copied: {listed(written)}",
            tuple(written),
            step=shot.step,
            hint="later saves copy these before their call returns; make such changes before you call "
            "step() or save(), or after wait(), and nothing is lost",
        )


def touch(memory: memoryview) -> None:
    """Write to every page, changing nothing, so that the first snapshot need not wait for the kernel."""
    first_bytes = np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE]
    for at in range(0, len(first_bytes), TOUCH_PAGES):
        first_bytes[at : at + TOUCH_PAGES] |= 0
