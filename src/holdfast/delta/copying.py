"""The copies of gradients into the record under way, while the optimizer reads the gradients.

Gradients on a device are copied by a thread while the optimizer reads them.  On the CPU they are copied
before its step: the threads of its kernels wait for one another, and a copy beside them, which takes a core
from one of them, would hold up all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch

from holdfast.delta.optimizers import NamedOptimizer
from holdfast.delta.packing import NotAsDeclared, Pack
from holdfast.delta.places import RecordLayout, copy, spread
from holdfast.delta.segment import Applied
from holdfast.threads import Worker

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class OpenRecord:
    """The record that is being made."""

    slot: int
    memory: memoryview
    layout: RecordLayout
    applied: list[Applied] = field(default_factory=list)
    copying: list[Future[None]] = field(default_factory=list)
    extras: bytes = b""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of the sparse gradients that are packed, by name."""
    misdeclared: list[NotAsDeclared] = field(default_factory=list)
    """Gradients that prove to be other than was declared: the record must not be."""
    early: dict[str, tuple[int, int]] | None = None
    """Versions of what no optimizer changes, when the first step that may read it began; None if no step
    may."""

    def wait_copied(self) -> None:
        """Wait for the copies that were begun."""
        for copying in self.copying:
            copying.result()


class GradientCopier:
    """Copies gradients into records, and does on its thread what comes behind the copies."""

    def __init__(self) -> None:
        self._thread = Worker("holdfast-delta")
        self._beside = ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), "holdfast-copy")
        self._streams: dict[torch.device, torch.Stream] = {}
        """Streams to copy from devices, one for each: a stream's memory is its own."""

    def copy(self, record: OpenRecord, one: NamedOptimizer) -> None:
        """Begin to copy the gradients of one optimizer; they must stay as they are until `wait_copied`."""
        places = record.layout.places(record.slot, record.memory, one.key)
        grads = [(p, p.piece.tensor.grad) for p in places if p.piece.tensor.grad is not None]
        given = [p.grad for _, p in one.params if p.grad is not None]
        ready = _event(given[0].device) if given else None
        pack = record.layout.packs.get(one.key)
        if ready is None:
            self._copy_here(record, grads)
            _pack(record, pack, self._beside.map if torch.get_num_threads() > 1 else map)
            return
        if ready.device not in self._streams:
            self._streams[ready.device] = torch.Stream(ready.device)
        stream = self._streams[ready.device]
        record.copying.append(self._thread.submit(_copy, grads, ready, stream, record, pack))

    def _copy_here(self, record: OpenRecord, grads: list[Any]) -> None:
        """Copy with as many threads as the optimizer's kernels have."""
        parts = spread(grads, torch.get_num_threads())
        others = [self._beside.submit(_copy_part, record, part) for part in parts[1:]]
        for part in parts[:1]:
            _copy_part(record, part)
        for other in others:
            other.result()

    def then(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Do `work` when all is copied that was begun.  Returns at once."""
        return self._thread.submit(work, *args, **kwargs)

    def settle(self, limit_s: float) -> None:
        """Wait until the thread has done all that it was given.  TimeoutError."""
        self._thread.settle(limit_s)

    def shutdown(self) -> None:
        """Take no more work."""
        self._thread.shutdown()
        self._beside.shutdown(wait=False)


def _event(device: torch.device) -> torch.Event | None:
    """An event after all that the training thread's stream has been given; None on the CPU."""
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def _copy(
    grads: list[Any],
    ready: torch.Event,
    stream: torch.Stream,
    record: OpenRecord,
    pack: tuple[Pack, int] | None,
) -> None:
    """Copy on the copying thread.  Blocks until all are copied, and what is sparse is packed."""
    stream.wait_event(ready)
    with torch.cuda.stream(stream) if ready.device.type == "cuda" else stream:
        _copy_part(record, grads)
        _pack(record, pack, map)
    stream.synchronize()


def _copy_part(record: OpenRecord, grads: list[Any]) -> None:
    with _declared(record):
        copy(grads)


def _pack(
    record: OpenRecord, pack: tuple[Pack, int] | None, each: Callable[..., Iterable[Any]]
) -> None:
    """Pack an optimizer's sparse gradients, if any.  `each`: a `map`, over threads or not."""
    if pack is None:
        return
    with _declared(record):
        record.sizes[pack[0].name] = pack[0].into(record.memory[pack[1] :], each)


@contextmanager
def _declared(record: OpenRecord) -> Iterator[None]:
    """Keep errors of gradients that are not as declared, to be told when all is copied."""
    try:
        yield
    except NotAsDeclared as error:
        record.misdeclared.append(error)
