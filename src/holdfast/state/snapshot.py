"""The snapshot: from live tensors into the image, inside the window between two optimizer steps.

Parameters and optimizer state change only inside `optimizer.step()`.  So after step t their copy may go
on in the background until step t + 1's optimizer step begins; `Window` is that time: a hook on every
torch optimizer waits for what is not copied yet.  What the forward pass changes (buffers) is set aside at
once.  A script that edits weights outside the optimizer is found by the tensors' version counters: then
the copy is taken again, whole, until nothing changed while it ran.

The image's memory and the list of copies are made once and used again while shapes and addresses stay.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.errors import HoldfastError
from holdfast.events import emit, span
from holdfast.format.image import Image
from holdfast.format.manifest import TensorEntry
from holdfast.layout import Box
from holdfast.state.live import Live, LiveTensor

MAX_RETAKES = 100
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Memory:
    """Page-aligned host memory that grows when it must and is kept.

    Pages are zero until first touched, and the first touch is slow: keep it.
    """

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self.view = memoryview(b"")

    def reserve(self, size: int) -> memoryview:
        """A view of at least `size` bytes; earlier views become stale if it has to grow."""
        if len(self.view) < size:
            self._map = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._map.madvise(mmap.MADV_HUGEPAGE)
            self.view = memoryview(self._map)
        return self.view


def raw_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A CPU tensor's elements as a numpy array of the same shape and element size; shares memory."""
    plain = tensor.detach()
    if plain.is_conj():
        plain = plain.resolve_conj()
    if plain.is_neg():
        plain = plain.resolve_neg()
    size = plain.element_size()
    return plain.view(_RAW[size]).numpy() if plain.dtype != torch.bool else plain.numpy()


class Window:
    """From a snapshot's call to the next optimizer step.  `close` is the hook's, `done` the copier's."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._copied = threading.Event()
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Wait until the copy is complete or given up."""
        if not self._copied.is_set():
            with span("window.wait", step=self.step):
                self._copied.wait()
        self._hook.remove()

    def done(self) -> None:
        """The copy is complete, or will not be."""
        self._copied.set()


def set_aside(live: Live, kept: dict[str, torch.Tensor]) -> None:
    """Copy what may change before the next optimizer step into `kept`, which is reused."""
    for name, t in live.tensors.items():
        if t.steady:
            continue
        local = t.placed.local
        old = kept.get(name)
        if old is None or old.shape != local.shape or old.dtype != local.dtype:
            kept[name] = local.detach().clone(memory_format=torch.contiguous_format)
        else:
            old.copy_(local)


def versions(live: Live) -> list[int]:
    """Version counters of the tensors that are copied in the window."""
    return [t.placed.local._version for t in live.tensors.values() if t.steady]


def fingerprint(live: Live) -> list[tuple[int, ...]]:
    """What must not change for a list of copies to be used again: addresses and strides."""
    return [
        (t.placed.local.data_ptr(), *t.placed.local.stride()) for t in live.tensors.values()
    ]


@dataclass
class Copies:
    """The copies that fill an image: numpy pairs for host tensors, torch pairs for device tensors."""

    host: list[tuple[Any, Any]]
    device: list[tuple[torch.Tensor, torch.Tensor]]

    @staticmethod
    def plan(
        image: Image,
        entries: tuple[TensorEntry, ...],
        live: Live,
        kept: dict[str, torch.Tensor],
        memory: memoryview,
    ) -> Copies:
        """One copy per piece; the header is written now."""
        memory[: image.data_start] = image.header
        copies = Copies([], [])
        p = image.pieces
        columns = (p.tensor, p.start, p.stop, p.offset, p.bytes)
        for index, start, stop, offset, size in zip(*(c.tolist() for c in columns)):
            entry = entries[index]
            t = live.tensors[entry.name]
            n = len(entry.shape)
            at = image.data_start + offset
            copies._add(
                memory[at : at + size], Box(tuple(start[:n]), tuple(stop[:n])), t,
                t.placed.local if t.steady else kept[entry.name],
            )  # fmt: skip
        return copies

    def _add(self, into: memoryview, box: Box, t: LiveTensor, source: torch.Tensor) -> None:
        part = source[box.within(t.placed.box.start)] if box.start else source
        if part.device.type == "cpu":
            raw = raw_array(part)
            self.host.append((np.frombuffer(into, raw.dtype).reshape(raw.shape), raw))
        else:
            flat = torch.frombuffer(into, dtype=torch.uint8).view(part.dtype)
            self.device.append((flat.view(part.shape), part.detach()))

    def run(self) -> None:
        """Do them all.  Device copies go over a stream of their own; blocks until they are there."""
        if self.device:
            self._run_device()
        for into, source in self.host:
            np.copyto(into, source)

    def _run_device(self) -> None:
        device = self.device[0][1].device
        stream = torch.Stream(device)
        stream.wait_event(_recorded(device))
        with stream:
            for into, source in self.device:
                into.copy_(source, non_blocking=True)
        stream.synchronize()


def _recorded(device: torch.device) -> torch.Event:
    """An event after all that the training stream has been given so far."""
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def pin(memory: memoryview) -> None:
    """Page-lock the image's memory so that device copies run at full speed, beside the training."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        address = np.frombuffer(memory, np.uint8).ctypes.data
        torch.cuda.cudart().cudaHostRegister(address, len(memory), 0)  # type: ignore[attr-defined]


def copy_steadily(copies: Copies, live: Live, before: list[int], step: int) -> None:
    """Copy until nothing changed meanwhile; `before` are the versions at the call."""
    for attempt in range(MAX_RETAKES):
        with span("snapshot.copy", step=step):
            copies.run()
        after = versions(live)
        if after == before:
            return
        emit("snapshot.retaken", step=step, attempt=attempt, changed=changed(live, before, after))
        before = after
    raise HoldfastError(
        f"weights were written while they were copied, {MAX_RETAKES} times in a row",
        step=step,
        hint="do not change parameters outside optimizer.step() while a snapshot is under way",
    )


def changed(live: Live, before: Iterable[int], after: Iterable[int]) -> str:
    steady = [name for name, t in live.tensors.items() if t.steady]
    names = [n for n, a, b in zip(steady, before, after) if a != b]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
