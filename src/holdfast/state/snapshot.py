"""The snapshot: from live tensors into the image, inside the window between two optimizer steps.

Parameters and optimizer state change only inside `optimizer.step()`.  So after step t their copy may go
on in the background until step t + 1's optimizer step begins (`window`).  What the forward pass changes
(buffers) is set aside at once.  A script that edits weights outside the optimizer is found by the tensors'
version counters: then the copy is taken again, whole, while the training thread is at rest; of several
ranks, some may have been done before the edit, so there the save fails aloud instead, and later ones hold
up the training until they are copied: it may be the forward pass that writes.

The writer follows the copier through the image (`FillProgress`), so that storage is busy from the start.

The image's memory and the list of copies are made once and used again while shapes and addresses stay.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from holdfast.errors import HoldfastError
from holdfast.events import emit, span
from holdfast.format.image import Image
from holdfast.format.manifest import TensorEntry
from holdfast.layout import Box
from holdfast.state.arrays import array_of
from holdfast.state.live import Live
from holdfast.state.window import Window
from holdfast.state.writes import address_and_strides

if TYPE_CHECKING:
    from holdfast.state.carrying import CarriedCopies, CarryBuffer

MAX_RETAKES = 100
MARK_BYTES = 4 << 20
TOUCH_PAGES = 1 << 12
BATCH_BYTES = 64 << 20
"""Bytes given to a device's stream at a time, where the rest may have to be carried over."""
PAUSE_S = 0.25
"""Least pause after a copy, in seconds, before the counters are read again where nothing else tells that
nothing is being written."""
PAUSE_COPIES = 16.0
"""Least such pause (`PAUSE_S`) in times that the copy of the largest tensor takes: filling one with random
numbers takes so long."""


class Buffer(Protocol):
    """Host memory for an image."""

    view: memoryview

    def reserve(self, size: int, live: Live) -> memoryview:
        """At least `size` bytes on a page boundary, the same ones each time while they suffice.

        Page-locked for the device of `live`, if that is one.
        """


class PrivateBuffer:
    """Memory of this process.

    Pages are zero until first touched, and the first touch is slow: keep it.
    """

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._pinned_on: torch.device | None = None
        self.view = memoryview(b"")

    def reserve(self, size: int, live: Live) -> memoryview:
        """A view of at least `size` bytes; earlier views become stale if it has to grow."""
        if len(self.view) < size:
            self._unpin()
            self._map = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._map.madvise(mmap.MADV_HUGEPAGE)
            self.view = memoryview(self._map)
            self._pinned_on = lock_pages(self.view, live)
        return self.view

    def _unpin(self) -> None:
        if self._pinned_on is not None:
            unlock_pages(self.view, self._pinned_on)
            self._pinned_on = None

    def close(self) -> None:
        """Give the memory back; nothing may be using it."""
        self._unpin()
        self.view = memoryview(b"")
        self._map = None


def lock_pages(view: memoryview, live: Live) -> torch.device | None:
    """Page-lock memory so that device copies run at full speed, beside the training.

    On the tensors' own device: a thread begins on device 0, where this would make a context.  Returns the
    device; None if there is none, or it would not.
    """
    device = first_device(live)
    if device is None or device.type != "cuda":
        return None
    with torch.cuda.device(device):
        register = torch.cuda.cudart().cudaHostRegister
        failed = int(register(_address(view), len(view), PORTABLE))
    return None if failed else device


def unlock_pages(view: memoryview, device: torch.device) -> None:
    """Undo `lock_pages`, before the memory goes."""
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(_address(view))


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


class CopyTap(Protocol):
    """A reader of the same tensors at the same moment, for somebody else."""

    @property
    def sources(self) -> list[torch.Tensor]:
        """The tensors that it reads, in the order in which it does."""

    def run(self, carried: CarriedCopies | None, first: int, ready: torch.Event | None) -> None:
        """Read them, not before `ready`; `carried` has them from number `first` on."""


class FillRestarted(Exception):
    """The image is being filled again; what was read of it is stale."""


class FillProgress:
    """Tells how far an image is filled: the copier advances, the writer waits.  Thread-safe.

    The waits need no deadline of their own: a copier completes or fails, whatever becomes of it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._upto = 0
        self._complete = False
        self._error: BaseException | None = None
        self.turn = 0

    def restart(self) -> None:
        """Begin another turn: what was filled is stale."""
        self._set(turn=self.turn + 1, _upto=0)

    def advance(self, upto: int) -> None:
        """Bytes before `upto` are filled."""
        self._set(_upto=upto)

    def complete(self) -> None:
        """All is filled and will stay."""
        self._set(_complete=True)

    def fail(self, error: BaseException) -> None:
        """It will never be complete."""
        self._set(_error=error)

    def _set(self, **fields: Any) -> None:
        with self._changed:
            self.__dict__.update(fields)
            self._changed.notify_all()

    def wait(self, upto: int, turn: int) -> None:
        """Wait until bytes before `upto` are filled.  Raises Refilled if `turn` is over, or the
        copier's error."""
        self._until(lambda: self._upto >= upto, turn)

    def settle(self, turn: int) -> None:
        """Wait until it is known that the filling of `turn` stays."""
        self._until(lambda: self._complete, turn)

    def conclude(self) -> None:
        """Wait until it is known how it ends; the copier's error if it fails."""
        with self._changed:
            self._changed.wait_for(lambda: self._complete or self._error)
        if self._error is not None:
            raise self._error

    def _until(self, reached: Callable[[], bool], turn: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: reached() or self._error or self.turn != turn)
            if self._error is not None:
                raise self._error
            if self.turn != turn:
                raise FillRestarted


SetAside = dict[tuple[str, int], torch.Tensor]
"""Tensors that were copied at the call, by name and number of the part."""


@torch.inference_mode(False)  # type: ignore[untyped-decorator]  # torch refuses such copies outside
def set_aside(live: Live, kept: SetAside) -> None:
    """Copy what may change before the next optimizer step into `kept`, which is reused."""
    for name, t in live.tensors.items():
        if t.steady:
            continue
        for number, part in enumerate(t.parts):
            local, old = part.local, kept.get((name, number))
            if old is None or old.shape != local.shape or old.dtype != local.dtype:
                copy = local.detach().clone(memory_format=torch.contiguous_format)
                kept[name, number] = copy
            else:
                old.copy_(local)


def versions(live: Live) -> list[int]:
    """Version counters of the tensors that are copied in the window."""
    return [t.version for t in live.tensors.values() if t.steady]


def fingerprint(live: Live) -> list[tuple[int, ...]]:
    """Addresses and strides, which must not change if a list of copies is to be used again."""
    return [
        address_and_strides(part.local)
        for t in live.tensors.values()
        if t.steady  # others are copied from where they were set aside
        for part in t.parts
    ]


@dataclass
class Copies:
    """The copies that fill an image: numpy pairs for host tensors, torch pairs for device tensors."""

    host: list[tuple[Any, Any, int]]
    """(part of the image, source, where that part ends in the image)"""
    device: list[tuple[torch.Tensor, torch.Tensor]]

    @staticmethod
    def plan(
        image: Image,
        entries: tuple[TensorEntry, ...],
        live: Live,
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
            source = part.local if t.steady else kept[entry.name, number]
            if box != part.box:
                if part.box & box != box:
                    raise HoldfastError(
                        f"{entry.name!r}: this rank is to write {box}, but has {part.box}"
                    )
                source = source[box.within(part.box.start)]
            copies._add(memory, at, source, at + size)
        return copies

    def _add(self, memory: memoryview, start: int, part: torch.Tensor, stop: int) -> None:
        if part.is_cpu:
            values = array_of(part)
            into = np.ndarray(values.shape, values.dtype, memory, start)
            self.host.append((into, values, stop))
        else:
            flat = torch.frombuffer(memory[start:stop], dtype=torch.uint8).view(part.dtype)
            self.device.append((flat.view(part.shape), part.detach()))

    @property
    def sources(self) -> list[torch.Tensor]:
        """The tensors that are copied, in the order in which they are."""
        return [source for _, source in self.device] + [
            torch.from_numpy(values) for _, values, _ in self.host
        ]

    def run(
        self, filling: FillProgress, ready: torch.Event | None, carried: CarriedCopies | None = None
    ) -> None:
        """Do them all, in the image's order; those that were `carried` over from where they are now.

        Device copies come first, on a stream of their own that waits for `ready`; without it, for
        all that the device has been given.
        """
        if self.device:
            self._run_device(ready, carried)
        marked = 0
        for number, (into, source, stop) in enumerate(self.host, len(self.device)):
            if carried is None:
                np.copyto(into, source)
            else:
                np.copyto(into, carried.take(number).numpy())
                carried.done()
            if stop - marked >= MARK_BYTES and not self.device:
                filling.advance(stop)
                marked = stop

    def _run_device(self, ready: torch.Event | None, carried: CarriedCopies | None) -> None:
        """Copy in batches if the rest may have to be carried over: what a stream was given cannot be."""
        streams = {}
        for device in dict.fromkeys(source.device for _, source in self.device):
            stream = torch.cuda.Stream(device) if device.type == "cuda" else torch.Stream(device)
            if ready is not None and ready.device == device:
                stream.wait_event(ready)
            else:
                torch.accelerator.synchronize(device)
            streams[device] = stream
        given = 0
        for number, (into, live) in enumerate(self.device):
            with on_stream(streams[live.device]):
                source = live if carried is None else carried.take(number)
                into.copy_(source, non_blocking=True)
            given += into.numel() * into.element_size()
            if carried is not None and given >= BATCH_BYTES:
                streams[live.device].synchronize()
                carried.done()
                given = 0
        for stream in streams.values():
            stream.synchronize()
        if carried is not None:
            carried.done()


def on_stream(stream: torch.Stream) -> Any:
    """A context in which work goes to `stream`; torch 2.6 knows `with stream` of CUDA only so."""
    return torch.cuda.stream(stream) if stream.device.type == "cuda" else stream


def first_device(live: Live) -> torch.device | None:
    """The device of the first tensor that is not on the CPU."""
    for t in live.tensors.values():
        if not t.placed.local.is_cpu:
            return t.placed.local.device
    return None


def device_event(live: Live) -> torch.Event | None:
    """An event after all that the calling thread's device stream has been given; None on the CPU."""
    device = first_device(live)
    if device is None:
        return None
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every device's context."""


@dataclass(frozen=True)
class StateView:
    """The training thread's side of a snapshot: what the state was when it was asked for."""

    live: Live
    versions: list[int]
    ready: torch.Event | None

    @staticmethod
    def of(live: Live) -> StateView:
        return StateView(live, versions(live), device_event(live))


@dataclass(frozen=True)
class Shot:
    """The copies of one snapshot into its image, and what else is read of the same moment."""

    copies: Copies
    moment: StateView
    filling: FillProgress
    stop: int
    """End of the part of the image that the copies fill, in bytes."""
    step: int
    beside: CopyTap | None

    def carried(self, room: CarryBuffer) -> CarriedCopies:
        """All that is read; with `room`, what is left when the window ends is carried over."""
        from holdfast.state.carrying import CarriedCopies

        beside = self.beside.sources if self.beside is not None else []
        return CarriedCopies(
            self.copies.sources + beside, room, partial(self.unchanged, self.moment.versions)
        )

    def take(self, ready: torch.Event | None, carried: CarriedCopies | None = None) -> float:
        """Read it once.  Returns the seconds that it took."""
        began = time.perf_counter()
        with span("snapshot.copy", step=self.step):
            self.copies.run(self.filling, ready, carried)
            if self.beside is not None:
                first = len(self.copies.device) + len(self.copies.host)
                self.beside.run(carried, first, ready)
        self.filling.advance(self.stop)
        return time.perf_counter() - began

    def unchanged(self, before: list[int]) -> bool:
        """True if nothing was written since the counters were at `before`."""
        return versions(self.moment.live) == before

    def pause_s(self, took_s: float) -> float:
        """Seconds in which any write ends that was under way when a copy of `took_s` seconds did."""
        live, copied = self.moment.live, max(self.stop, 1)
        sizes = (part.local.nbytes for t in live.tensors.values() for part in t.parts)
        return max(PAUSE_S, PAUSE_COPIES * took_s * max(sizes, default=0) / copied)


class WrittenMeanwhile(HoldfastError):
    """Tensors were written while they were copied."""


def copy_consistently(
    shot: Shot, window: Window, *, room: CarryBuffer | None, retakes: int, rest_s: float
) -> None:
    """Copy until nothing changed meanwhile, at most `retakes` times more.

    With `room`, what neither is copied nor read beside when the window ends is carried over in it.
    A retake begins when the training thread is at rest, for which it waits `rest_s` seconds.
    WrittenMeanwhile if tensors changed to the last.
    """
    live, before = shot.moment.live, shot.moment.versions
    carried = shot.carried(room) if room is not None and room.size else None
    try:
        window.begin(carried)
        try:
            took_s = shot.take(shot.moment.ready, carried)
        finally:  # the training thread may be waiting to carry
            is_carried = carried is not None and carried.close()
        if is_carried:
            return
        for attempt in range(retakes + 1):
            if window.is_sound(partial(shot.unchanged, before), shot.pause_s(took_s)):
                return
            names = changed(live, before, versions(live))
            if attempt == retakes or not window.may_retake(rest_s):
                break
            emit("snapshot.retaken", step=shot.step, attempt=attempt, changed=names)
            before = versions(live)
            shot.filling.restart()
            took_s = shot.take(None)
    finally:
        window.done()
    raise WrittenMeanwhile(
        f"weights were written outside optimizer.step() while they were copied: {names}",
        step=shot.step,
        hint="make such changes before you call step() or save(), or after wait(), not between a save "
        "and the next optimizer step; as a forward pass may have made them, each later save holds up "
        "training until it is copied",
    )


def touch(memory: memoryview) -> None:
    """Write to every page, changing nothing, so that the first snapshot need not wait for the kernel."""
    first_bytes = np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE]
    for at in range(0, len(first_bytes), TOUCH_PAGES):
        first_bytes[at : at + TOUCH_PAGES] |= 0


def changed(live: Live, before: Iterable[int], after: Iterable[int]) -> str:
    steady = [name for name, t in live.tensors.items() if t.steady]
    names = [n for n, a, b in zip(steady, before, after) if a != b]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
