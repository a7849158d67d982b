"""Snapshots that take longer than the window: the rest of the copies is carried over, never torn.

When the optimizer's step comes before everything is copied, training waits for the rest; or, with memory
set aside for it, the training thread copies the rest there (from device to device, which takes a hundredth
of the time that the way to the host takes) and goes on.  The copier goes on from there, over as many steps
as it takes.  All of it is of one moment: the optimizer has changed nothing yet when the rest is set aside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from holdfast.base.events import emit
from holdfast.live.state.devices import Moment, devices_of, on, wait_for_writers
from holdfast.live.state.graphs import is_capturing


class CarryBuffer:
    """Memory of `size` bytes on each device for the copies that are carried over."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory: dict[torch.device, torch.Tensor] = {}

    def make(self, devices: Iterable[torch.device]) -> None:
        """Allocate the memory, once.  Called off the training thread, which new pages would hold up for ten
        times a copy.  If allocation fails, nothing is carried over from then on.
        """
        try:
            for device in dict.fromkeys(devices):
                if device not in self._memory and self.size:
                    with on(device):
                        memory = torch.empty(self.size, dtype=torch.uint8, device=device)
                    self._memory[device] = memory.zero_() if device.type == "cpu" else memory
        except RuntimeError as error:  # torch's
            self.size = 0
            emit("window.not_carried", error=str(error))

    def views(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Room for each source, aligned to 16 bytes; they have `size` bytes in all at most."""
        used: dict[torch.device, int] = {}
        found = []
        for source in sources:
            memory = self._memory[source.device]
            at = used.get(source.device, 0)
            end = at + source.numel() * source.element_size()
            used[source.device] = -(-end // 16) * 16
            found.append(memory[at:end].view(source.dtype).view(source.shape))
        return found


class CarriedCopies:
    """The sources of a list of copies, each taken in turn by the copier; the rest may be carried over."""

    def __init__(
        self, sources: Sequence[torch.Tensor], room: CarryBuffer, sound: Callable[[], bool]
    ) -> None:
        self._sources = list(sources)
        self._room = room
        room.make(s.device for s in sources)
        self._sound = sound
        """Returns True if nothing was written since the snapshot's moment."""
        self._sizes = [-(-s.numel() * s.element_size() // 16) * 16 for s in sources]
        self._left = sum(self._sizes)
        self._next = 0
        self._busy = 0
        self._closed = False
        self._wanted = False
        """The training thread waits to set the rest aside: as soon as it fits, the copier lets it."""
        self._aside: Moment | None = None
        self._changed = threading.Condition()
        self.is_carried = False

    def take(self, number: int) -> torch.Tensor:
        """The source of copy `number`, where it is now; to be told `done`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._may_carry() or self._busy)
            self._next = number + 1
            self._busy += 1
            self._left -= self._sizes[number]
            return self._sources[number]

    def before(self, streams: Iterable[torch.Stream]) -> None:
        """Have streams wait until the sources that were set aside are there."""
        if self._aside is not None:
            for stream in streams:
                self._aside.before(stream)

    def done(self) -> None:
        """Note that all copies that were taken are made."""
        with self._changed:
            self._busy = 0
            self._changed.notify_all()

    def close(self) -> bool:
        """Note that the copier has ended, however it did.  True if something was carried, and was
        sound then."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return self.is_carried

    def carry(self) -> bool:
        """On the training thread, before the optimizer's step: set the rest aside, when it fits.

        False if that cannot be, and the copier must be waited for.
        """
        with self._changed:
            if self.is_carried:
                return True
            if not self._room.size or is_capturing():
                return False
            self._wanted = True
            try:
                self._changed.wait_for(self._fits)
                if not self._closed and self._sound():
                    self._set_aside()
                    self.is_carried = True
            finally:  # the copier may be waiting
                self._wanted = False
                self._changed.notify_all()
            return self.is_carried

    def _set_aside(self) -> None:
        rest = self._sources[self._next :]
        aside = self._room.views(rest)
        wait_for_writers(rest)
        for device in dict.fromkeys(source.device for source in rest):
            here = [n for n, source in enumerate(rest) if source.device == device]
            torch._foreach_copy_([aside[n] for n in here], [rest[n] for n in here])
        self._sources[self._next :] = aside
        self._aside = Moment(devices_of(rest))

    def _may_carry(self) -> bool:
        """True if the copier has to let the training thread at the rest, when a batch is done."""
        return self._wanted and self._left <= self._room.size

    def _fits(self) -> bool:
        return self._closed or (not self._busy and self._left <= self._room.size)
