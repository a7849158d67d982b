"""Devices: how the package gives them work beside the training's.

A thread begins on device 0, and torch goes to a stream's device and back to the thread's for each event.
Going back to device 0 for sure makes a context there: half a gigabyte for each rank of the node.  So every
call that touches a device is made inside of `on` or `on_stream`, which go back only where that makes none.

A copy is of a moment: `Moment` holds an event for each device, behind all work that the calling thread had
given to it, and a stream of this package begins `after` that.

A device may also write to tensors of the host: those in page-locked memory, or in memory that bitsandbytes
pages.  A copy into page-locked memory returns before it is made (`non_blocking=True`), as where optimizer
states are offloaded.  `wait_for_writers` has to come before such a tensor is read.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from holdfast.base.errors import warn_user
from holdfast.base.events import emit
from holdfast.live.state.graphs import is_barred, working

if TYPE_CHECKING:
    from holdfast.live.state.named import NamedTensors


def is_device(device: torch.device) -> bool:
    """True if work on it goes through streams."""
    return device.type not in ("cpu", "meta")


def devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """The devices of some tensors, each once, without the CPU."""
    return [device for device in dict.fromkeys(t.device for t in tensors) if is_device(device)]


def devices_in(live: NamedTensors) -> list[torch.device]:
    """The devices that this rank has tensors of a state on."""
    if live.devices is None:
        tensors = live.tensors.values()
        # which is asked within each save's call
        on_host = all(t.placed.local.is_cpu for t in tensors)
        live.devices = [] if on_host else devices_of(p.local for t in tensors for p in t.parts)
        _met.update(live.devices)
    return live.devices


_met: set[torch.device] = set()
"""Devices that a state of this process had tensors on."""


def devices_in_use() -> list[torch.device]:
    """The devices that may write to memory of the host: those of states, else the current device; empty if
    the process has used none."""
    kind = _accelerator()
    module = torch.get_device_module(kind) if kind else None
    if module is None or not module.is_initialized():
        return []
    return [*_met] or [torch.device(kind, module.current_device())]


@cache
def _accelerator() -> str:
    """The kind of this machine's devices; empty if it has none."""
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:
        return ""  # torch 2.6 that is made for CUDA, without a device; newer ones return None
    return "" if accelerator is None else accelerator.type


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """A context in which a device is the calling thread's, while no graph is captured by another; the host
    needs none."""
    if not is_device(device):
        yield
        return
    with working(), _made_current(device):
        yield


def _made_current(device: torch.device) -> AbstractContextManager[Any]:
    if device.type == "cuda":
        return torch.cuda.device(device)
    index = getattr(torch.accelerator, "device_index", None)  # since torch 2.8
    return nullcontext() if index is None else index(device.index)


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """A context in which work goes to `stream`."""
    with on(stream.device), torch.cuda.stream(stream) if stream.device.type == "cuda" else stream:
        yield


@contextmanager
def on_streams(streams: Iterable[torch.Stream]) -> Iterator[None]:
    """A context in which each device's work goes to its stream in `streams`."""
    with ExitStack() as entered:
        for stream in streams:
            entered.enter_context(on_stream(stream))
        yield


_streams: dict[tuple[torch.device, str], torch.Stream] = {}
_streams_lock = threading.Lock()


def stream_of(device: torch.device, purpose: str) -> torch.Stream:
    """The package's stream of a device for a purpose: one for the life of the process.

    torch gives out 32 streams of a device in turn, and those of NCCL are among them: a new stream for each
    save would come before the collectives of a training now and then.
    """
    with _streams_lock:
        if (device, purpose) not in _streams:
            with on(device):
                _streams[device, purpose] = _new_stream(device)
        return _streams[device, purpose]


def _new_stream(device: torch.device) -> torch.Stream:
    if device.type == "cuda":  # NCCL's are of the other pool, unless that is asked for
        return torch.cuda.Stream(device, priority=-1)
    return torch.Stream(device)


_stepped_on: dict[torch.device, set[torch.Stream]] = {}
"""Streams on which optimizers have stepped: a script may not have joined them before its next call."""
_places: weakref.WeakKeyDictionary[Any, list[torch.device]] = weakref.WeakKeyDictionary()
"""The devices of each optimizer's parameters."""


def note_streams(optimizer: Any) -> None:
    """Note, behind an optimizer's step, on which streams it was made."""
    if optimizer not in _places:
        _places[optimizer] = devices_of(p for g in optimizer.param_groups for p in g["params"])
    for device in _places[optimizer]:
        _stepped_on.setdefault(device, set()).add(torch.accelerator.current_stream(device))


def join_streams() -> None:
    """Have the calling thread's streams go on behind the steps that were noted."""
    while _stepped_on:
        device, streams = _stepped_on.popitem()
        current = torch.accelerator.current_stream(device)
        for stream in streams - {current}:
            with on(device):
                current.wait_stream(stream)


class Moment:
    """A moment on devices: all work that the training thread has given to its current streams."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._events: dict[torch.device, torch.Event] = {}
        while _parked:
            _let_go(_parked.pop())
        for device in devices:
            with on(device):
                event = torch.Event(device)
                event.record(torch.accelerator.current_stream(device))
            self._events[device] = event

    @staticmethod
    def of(streams: Iterable[torch.Stream]) -> Moment:
        """The moment of given streams: all work that they have been given."""
        moment = Moment(())
        for stream in streams:
            with on(stream.device):
                moment._events[stream.device] = event = torch.Event(stream.device)
                event.record(stream)
        return moment

    @property
    def devices(self) -> list[torch.device]:
        """The devices that it is of."""
        return [*self._events]

    @property
    def is_over(self) -> bool:
        """True if the devices have done it."""
        for device, event in self._events.items():
            with on(device):
                if not event.query():
                    return False
        return True

    def before(self, stream: torch.Stream) -> None:
        """Let a stream begin after the moment; the host waits if it has no event of that device."""
        with on(stream.device):
            event = self._events.get(stream.device)
            if event is None:
                torch.accelerator.synchronize(stream.device)
            else:
                stream.wait_event(event)

    def wait(self) -> None:
        """Block until the devices have done it."""
        for device, event in self._events.items():
            with on(device):
                event.synchronize()

    def __del__(self) -> None:
        if is_barred():  # the collector runs on whatever thread
            _parked.append(self._events)
        else:
            _let_go(self._events)


_parked: list[dict[torch.device, torch.Event]] = []
"""Events that are to be let go of."""


def _let_go(events: dict[torch.device, torch.Event]) -> None:
    """Destroy each event on its device, from any thread."""
    while events:
        device, event = events.popitem()
        with on(device):
            del event


def after(moment: Moment | None, device: torch.device, purpose: str) -> torch.Stream:
    """The package's stream of a device, which begins after a moment; without one, after all work that any
    thread has given to the device."""
    stream = stream_of(device, purpose)
    if moment is None:
        wait_for([device])
    else:
        moment.before(stream)
    return stream


def wait_for(devices: Iterable[torch.device]) -> None:
    """Block until devices have done all their work."""
    for device in devices:
        with on(device):
            torch.accelerator.synchronize(device)


def room_beside_peak(device: torch.device) -> float:
    """Bytes of a device beyond this process's peak use; infinite if the device does not tell."""
    module = torch.get_device_module(device.type)
    try:
        free, _ = module.mem_get_info(device)
        return float(free + module.memory_reserved(device) - module.max_memory_allocated(device))
    except AttributeError:
        return float("inf")


def wait_for_stream(stream: torch.Stream) -> None:
    """Block until a stream has done all its work."""
    with on(stream.device):
        stream.synchronize()


# -- page-locked memory ------------------------------------------------------------------------------------


class PageLocks(Protocol):
    """Page-locks memory of the host for a kind of device."""

    def lock(self, address: int, size: int) -> str:
        """Lock memory.  Returns why it would not, empty if it did."""

    def unlock(self, address: int) -> None:
        """Undo it."""


class _CudaPageLocks:
    PORTABLE = 1
    """cudaHostRegisterPortable: page-locked for every device's context."""

    def lock(self, address: int, size: int) -> str:
        failed = int(torch.cuda.cudart().cudaHostRegister(address, size, self.PORTABLE))
        if not failed:
            return ""
        self._forget_error()
        return f"cudaHostRegister: error {failed}"

    def unlock(self, address: int) -> None:
        if int(torch.cuda.cudart().cudaHostUnregister(address)):
            self._forget_error()

    @staticmethod
    def _forget_error() -> None:
        """CUDA keeps an error until it is asked for: this thread's next kernel would report it."""
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)


page_locks: dict[str, PageLocks] = {"cuda": _CudaPageLocks()}
"""The way to page-lock memory, by type of device."""


class LockedPages:
    """Memory that a thread beside page-locks, so that copies of a device into it run at full speed.

    Locking takes 0.2 to 1 s for each GB.  Until then copies take longer, and are right.  The memory is
    unlocked before it is freed, also without `undo`: a device would go on to write to it.
    """

    def __init__(self, view: memoryview, device: torch.device) -> None:
        self._view = view
        self._device = device
        self._is_locked, self._pid = False, os.getpid()
        self._thread = threading.Thread(target=self._lock, name="holdfast-pages", daemon=True)
        self._thread.start()

    def _lock(self) -> None:
        with on(self._device):
            failed = page_locks[self._device.type].lock(_address(self._view), len(self._view))
        self._is_locked = not failed
        if failed:
            emit("pages.unlocked", bytes=len(self._view), error=failed)
            _tell_unlocked(failed)

    def wait(self) -> None:
        """Block until it is locked, or cannot be."""
        if threading.current_thread() is not self._thread:  # else nobody but it has this
            self._thread.join()

    def undo(self) -> None:
        """Unlock it, before the memory goes."""
        self.wait()
        is_locked, self._is_locked = self._is_locked, False
        if is_locked:
            with on(self._device):
                page_locks[self._device.type].unlock(_address(self._view))

    def __del__(self) -> None:
        if os.getpid() == self._pid and not sys.is_finalizing():
            self.undo()


def lock_pages(view: memoryview, devices: Iterable[torch.device]) -> LockedPages | None:
    """Begin to page-lock memory for devices; None if no device has a use of it."""
    for device in devices:
        if device.type in page_locks and len(view):
            return LockedPages(view, device)
    return None


@cache
def _tell_unlocked(error: str) -> None:
    warn_user(
        f"memory for copies from devices is not page-locked ({error}): they take about ten times as long",
        "raise the limit of locked memory of this process (ulimit -l)",
    )


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


# -- tensors of the host that a device writes to ------------------------------------------------


def wait_for_writers(tensors: Iterable[torch.Tensor]) -> None:
    """Block until devices have done all their work, if they may write to one of these tensors."""
    devices = devices_in_use()
    if devices and any(map(_is_managed, tensors)):
        wait_for(devices)


def _is_managed(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and (getattr(tensor, "is_paged", False) or tensor.is_pinned())
