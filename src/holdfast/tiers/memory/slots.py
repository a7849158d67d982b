"""The agent's memory as this process sees it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.base.errors import AgentError, StoreError
from holdfast.core.store.oserrors import translated
from holdfast.live.state.devices import LockedPages, devices_in, lock_pages
from holdfast.live.state.named import Collected
from holdfast.live.state.snapshot import Buffer, PrivateBuffer
from holdfast.tiers.memory.node import messages as w


@dataclass
class _Mapped:
    view: memoryview
    locked: LockedPages | None


class Slots:
    """Files of the agent, each mapped once.  Their pages are allocated, so touching them cannot fail.

    `forget` is called with the view of a file that was removed; its memory is freed when nobody has
    that view.
    """

    def __init__(self, directory: Path, forget: Callable[[memoryview], None]) -> None:
        self._directory = directory
        self._forget = forget
        self._mapped: dict[tuple[str, int], _Mapped] = {}

    def view(self, name: str, live: Collected) -> memoryview:
        """Return a view of all of a file; the same object each time.  StoreError."""
        path = str(self._directory / name)
        with translated("map", "", path), open(path, "r+b", buffering=0) as file:
            stat = os.fstat(file.fileno())
            key = (name, stat.st_ino)
            if key not in self._mapped:
                self._forget_removed()
                flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
                view = memoryview(mmap.mmap(file.fileno(), stat.st_size, flags))
                self._mapped[key] = _Mapped(view, lock_pages(view, devices_in(live)))
            return self._mapped[key].view

    def _forget_removed(self) -> None:
        for key in [k for k in self._mapped if not self._is_there(*k)]:
            one = self._mapped.pop(key)  # whoever still uses the memory keeps it
            self._unlock(one)
            self._forget(one.view)

    def _is_there(self, name: str, number: int) -> bool:
        """True if the file is the one that was mapped: another agent's files have the same
        names."""
        try:
            return (self._directory / name).stat().st_ino == number
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Let go of all files; nothing may be copying into them."""
        for one in self._mapped.values():
            self._unlock(one)
        self._mapped.clear()

    @staticmethod
    def _unlock(one: _Mapped) -> None:
        if one.locked is not None:
            one.locked.undo()


class SlotBuffer:
    """Memory for one image, leased from the agent when its size is known.

    `spare`: what to use if the agent has none to give, for a save that must not depend on it.
    """

    def __init__(
        self, slots: Slots, lease: Callable[[int], w.Lease], spare: PrivateBuffer | None
    ) -> None:
        self.view = memoryview(b"")
        self.lease: w.Lease | None = None
        self.refusal: Exception | None = None
        """Why the spare memory had to be used."""
        self._slots = slots
        self._ask = lease
        self._spare = spare

    def reserve(self, size: int, live: Collected) -> memoryview:
        """Return at least `size` bytes, like `Buffer.reserve`."""
        if self.lease is None or self.lease.capacity < size:
            try:
                self.lease = self._ask(size)
                self.view = self._slots.view(self.lease.name, live)
            except (AgentError, StoreError) as error:
                if self._spare is None:
                    raise
                self.lease, self.refusal = None, error
                self.view = self._spare.reserve(size, live)
        return self.view


def lease_of(buffer: Buffer) -> w.Lease | None:
    """Return the lease of the agent's memory that an image is in; None if it is in spare memory."""
    return buffer.lease if isinstance(buffer, SlotBuffer) else None
