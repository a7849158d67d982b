"""The copies into the record under way.

A thread copies gradients on a device, behind the training's kernels, while the optimizer reads them, and
longer where that is possible (`gradient_copies`).  It copies other values on a device, too.  Gradients on
the CPU are copied before the optimizer's step: the threads of its kernels wait for each other, so a copy
beside them, which takes the core of one, would delay all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.base.errors import HoldfastError
from holdfast.base.threads import Worker
from holdfast.live.state.devices import (
    Moment,
    after,
    devices_of,
    is_device,
    on_streams,
    wait_for_stream,
    wait_for_writers,
)
from holdfast.live.state.gradient_copies import Lender, Lent, on_device, only_reads
from holdfast.live.state.placed import memory_of
from holdfast.live.state.writes import times_written
from holdfast.tiers.records.optimizers import NamedOptimizer
from holdfast.tiers.records.packing import NotAsDeclared, Pack
from holdfast.tiers.records.places import Place, RecordLayout, copy, spread
from holdfast.tiers.records.segment import Applied

SMALL_BYTES = 64 << 20
"""Bytes of values other than gradients (batch norm's statistics, counters) that are copied on their device
first, even if `device_bytes` is less."""


@dataclass
class OpenRecord:
    """The record that is being made."""

    slot: int
    memory: memoryview
    layout: RecordLayout
    applied: list[Applied] = field(default_factory=list)
    copying: list[DeviceCopy] = field(default_factory=list)
    extras: bytes = b""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of the packed tensors, by name."""
    misdeclared: list[NotAsDeclared] = field(default_factory=list)
    """Gradients that are not as declared: the record must be dropped."""
    early: dict[str, tuple[int, int]] | None = None
    """`Watch.versions` when the first step began that may read tensors which no optimizer changes; None if
    no step may."""

    def wait_copied(self) -> None:
        """Wait for all copies that were begun."""
        for copying in self.copying:
            copying.done.result()

    def let_go(self) -> None:
        """Have what the training does next, on the calling thread, wait for copies of tensors that it may
        write to."""
        if self.layout.packs or self.layout.rounded:
            self.wait_copied()
        for copying in self.copying:
            copying.let_go()


@dataclass
class DeviceCopy:
    """A copy from devices that was begun."""

    lent: Lent
    queued: Future[Moment] = field(default_factory=Future)
    """The end of the copies on their streams, once they are queued there."""
    done: Future[None] = field(default_factory=Future)
    is_let_go: bool = False

    def fail(self, error: BaseException) -> None:
        """End the copy by an error."""
        if not self.queued.done():
            self.queued.set_exception(error)
        if not self.done.done():
            self.done.set_exception(error)

    def let_go(self) -> None:
        """Have the training's current streams wait for the copies, if they must."""
        if self.lent.way == "stream" and not self.is_let_go:
            copied = self.queued.result()
            for device in copied.devices:
                copied.before(torch.accelerator.current_stream(device))
        self.is_let_go = True


class GradientCopier:
    """Copies gradients into records, on a thread that also does the work after the copies (`then`)."""

    def __init__(self, device_bytes: int, tell: Callable[[str], None]) -> None:
        """`tell`: takes a message for the user, or an empty text."""
        self._tell = tell
        self._thread = Worker("holdfast-delta")
        self._beside = ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), "holdfast-copy")
        self._lender = Lender(device_bytes)
        self._cloned: list[DeviceCopy] = []
        """Copies that may still hold memory of a device."""

    def forget(self) -> None:
        """Forget what was seen of gradients: the state may be another."""
        self._lender.forget()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def copy(self, record: OpenRecord, one: NamedOptimizer) -> None:
        """Begin to copy the gradients of one optimizer; they must stay as they are until `let_go`."""
        places = record.layout.places(record.slot, record.memory, one.key)
        all_given = [place for place in places if place.piece.tensor.grad is not None]
        given = [place for place in all_given if is_device(place.piece.tensor.grad.device)]
        devices = devices_of(p.grad for _, p in one.params if p.grad is not None)
        pack = record.layout.packs.get(one.key)
        if len(given) < len(all_given):  # of an optimizer with parameters on the host, too
            on_host = [p for p in all_given if not is_device(p.piece.tensor.grad.device)]
            self._copy_on_host(record, [(p, p.part_of(p.piece.tensor.grad)) for p in on_host])
        if not devices:
            _pack(record, pack, self._beside.map if torch.get_num_threads() > 1 else map)
            return
        # `memory_of`: an alias would count as another owner
        held = [memory_of(place.piece.tensor.grad) for place in given]
        may_keep = self._lender.may_keep(one.key, held) and only_reads(one.optimizer)
        parts = [place.part_of(place.piece.tensor.grad) for place in given]
        if record.layout.packs or record.layout.rounded:  # the copy shows if they are as declared
            lent = Lent(parts, "thread")
        elif may_keep:
            lent = Lent(parts, "lent", [times_written(part) for part in parts])
        else:
            lent = on_device(parts, self._room)
            if lent.way == "stream":
                needed = sum(part.nbytes for part in parts)
                self._tell(self._lender.wait(one.key, needed))
        self._begin(record, given, lent, devices, pack)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def copy_values(self, record: OpenRecord, placed: list[tuple[Place, torch.Tensor]]) -> None:
        """Begin to copy values other than gradients; those on the host are copied at once."""
        parts = [(place, place.part_of(tensor)) for place, tensor in placed]
        on_host = [(place, part) for place, part in parts if not is_device(part.device)]
        wait_for_writers(part for _, part in on_host)
        copy(on_host)
        places = [place for place, part in parts if is_device(part.device)]
        tensors = [part for _, part in parts if is_device(part.device)]
        if tensors:
            lent = on_device(tensors, max(self._room, SMALL_BYTES))
            self._begin(record, places, lent, devices_of(tensors), None)

    @property
    def _room(self) -> int:
        """Bytes of `device_bytes` that are free."""
        self._cloned = [one for one in self._cloned if not one.done.done()]
        used = sum(t.nbytes for one in self._cloned for t in one.lent.tensors)
        return max(self._lender.device_bytes - int(used), 0)

    def _begin(
        self,
        record: OpenRecord,
        places: list[Place],
        lent: Lent,
        devices: list[torch.device],
        pack: tuple[Pack, int] | None,
    ) -> None:
        copying, moment = DeviceCopy(lent), Moment(devices)
        record.copying.append(copying)
        try:
            if lent.way == "cloned":
                self._cloned.append(copying)
            self._thread.submit(_copy, record, copying, places, moment, devices, pack)
        except BaseException as error:  # else a wait for this copy would never end
            copying.fail(error)
            raise

    def _copy_on_host(self, record: OpenRecord, grads: list[Any]) -> None:
        """Copy with as many threads as the optimizer's kernels have."""
        parts = spread(grads, torch.get_num_threads())
        others = [self._beside.submit(_copy_part, record, part) for part in parts[1:]]
        for part in parts[:1]:
            _copy_part(record, part)
        for other in others:
            other.result()

    def then(self, work: Callable[..., None], *args: Any) -> Future[None]:
        """Do `work` on the copying thread, after the copies that were begun.  Returns at once."""
        return self._thread.submit(work, *args)

    def settle(self, limit_s: float) -> None:
        """Wait until the thread has done all its work.  TimeoutError."""
        self._thread.settle(limit_s)

    def shutdown(self) -> None:
        """Take no more work."""
        self._thread.shutdown()
        self._beside.shutdown(wait=False)


def _copy(
    record: OpenRecord,
    copying: DeviceCopy,
    places: list[Place],
    moment: Moment,
    devices: list[torch.device],
    pack: tuple[Pack, int] | None,
) -> None:
    """Copy tensors, and pack sparse gradients, on the copying thread.  Blocks until both are done."""
    try:
        streams = [after(moment, device, "records") for device in devices]
        with on_streams(streams):
            _copy_part(record, [*zip(places, copying.lent.tensors)])
            _pack(record, pack, map)
        copying.queued.set_result(Moment.of(streams))
        for stream in streams:
            wait_for_stream(stream)
        if copying.lent.is_written:
            raise HoldfastError(
                "gradients were written to while they were copied",
                hint="leave them as they are after optimizer.step(), or set them to None there",
            )
        copying.done.set_result(None)
    except BaseException as error:
        copying.fail(error)
    finally:
        copying.lent.tensors = []  # their memory is the training's again


def _copy_part(record: OpenRecord, grads: list[Any]) -> None:
    with _noting_misdeclared(record):
        copy(grads)


def _pack(
    record: OpenRecord, pack: tuple[Pack, int] | None, each: Callable[..., Iterable[Any]]
) -> None:
    """Pack an optimizer's sparse gradients, if any.  `each`: a `map`, over threads or not."""
    if pack is None:
        return
    with _noting_misdeclared(record):
        record.sizes[pack[0].name] = pack[0].into(record.memory[pack[1] :], each)


@contextmanager
def _noting_misdeclared(record: OpenRecord) -> Iterator[None]:
    """Add gradients that are not as declared to the record, in place of an error."""
    try:
        yield
    except NotAsDeclared as error:
        record.misdeclared.append(error)
