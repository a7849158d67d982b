"""Room for the log: how much storage records may take, and whether there is as much.  Torch-free.

A bound holds for the records of all ranks together, and each rank keeps to its share without asking.  When
it has recorded a quarter of it since the newest full save, it asks for another one; at half it pauses until
that is complete.  Then older records go, until at most the other half is left (`log.mark_log`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from holdfast.base.errors import HoldfastError, OutOfSpace, UsageError
from holdfast.base.sizes import size_text
from holdfast.core.checkpoint.names import Saved, committed
from holdfast.core.checkpoint.recorded import parse_segment
from holdfast.core.checkpoint.reserved_space import room_for
from holdfast.core.store import LocalStore, Store
from holdfast.tiers.records.segment import Identity

if TYPE_CHECKING:
    from holdfast.live.saving import Save


class Space:
    """Counts bytes recorded since the newest full save.  `max_bytes`: the bound of all ranks; 0: none."""

    def __init__(self, max_bytes: int, num_ranks: int) -> None:
        self.max_bytes = max_bytes
        self.num_ranks = num_ranks
        self.record_bytes = 0
        """Bytes of a record with its header, as planned."""
        self.save_every: int | None = None
        """Steps between full saves, if known."""
        self.save_bytes = 0
        """Bytes of a full save of all ranks, 0 if unknown: records leave room for one."""
        self.notice: HoldfastError | None = None
        """An error to tell the user, once."""
        self._looked_for = 0
        """Records of up to so many bytes need no further look for room in storage."""
        self._recorded = 0
        self._covered = 0
        """Bytes recorded before the newest full save."""
        self._saving: list[tuple[Save, int]] = []
        self._paused = False

    @property
    def _share(self) -> int:
        return self.max_bytes // self.num_ranks

    def add(self, num_bytes: int) -> None:
        """Count so many bytes more as recorded."""
        self._recorded += num_bytes

    def saving(self, save: Save) -> None:
        """Note that a full save has begun."""
        self._saving.append((save, self._recorded))

    @property
    def is_saving(self) -> bool:
        """True if a full save is under way."""
        done = [one for one in self._saving if one[0].done()]
        self._saving = [one for one in self._saving if one not in done]
        good = [one for one in done if one[0].error is None and not one[0].skipped]
        self._covered = max([self._covered, *(before for _, before in good)])
        sizes = [save.image_bytes * self.num_ranks for save, _ in good]
        self.save_bytes = max([self.save_bytes, *sizes])
        return bool(self._saving)

    @property
    def leave_bytes(self) -> int:
        """Bytes of a local disk that records leave free."""
        _ = self.is_saving
        return room_for(self.save_bytes)

    @property
    def is_due(self) -> bool:
        """True if a full save is to be made, for older records to go."""
        return self._share > 0 and not self.is_saving and self._since() >= self._share // 4

    @property
    def has_room(self) -> bool:
        """True if another record keeps within the bound."""
        return not self._share or self._since() + self.record_bytes <= self._share // 2

    def _since(self) -> int:
        _ = self.is_saving
        return self._recorded - self._covered

    def check(self) -> None:
        """Raise UsageError if the bound has no room for four records."""
        if self._share and self.record_bytes > self._share // 4:
            least = 4 * self.record_bytes * self.num_ranks
            took = size_text(self.record_bytes)
            raise UsageError(
                f"Delta(max_bytes={self.max_bytes}): a step's record takes {took} on this rank",
                hint=f"at least four steps must fit, of all ranks: about {size_text(least)}",
            )

    def look_for_room(self, store: Store) -> None:
        """Set a notice if a local disk has no room for the bound, or for records until older ones go."""
        if self.record_bytes <= self._looked_for:
            return
        self._looked_for = self.record_bytes * 5 // 4
        free = store.free_bytes() if isinstance(store, LocalStore) else None
        step_bytes = self.record_bytes * self.num_ranks
        needs = [n for n in (self.max_bytes, (self.save_every or 0) * step_bytes) if n]
        if free is not None and needs and min(needs) > free:
            self.notice = OutOfSpace(
                f"records take about {size_text(step_bytes)} a step and {size_text(min(needs))} until "
                f"older ones go, but {size_text(free)} are free in {store.url}",
                hint="save more often (Every(durable=...)), or bound the log (Delta(max_bytes=...))",
            )

    @property
    def is_paused(self) -> bool:
        """True while records pause: older ones go when the full save under way is complete."""
        self._paused = self._paused and self.is_saving
        return self._paused

    def pause(self) -> None:
        """Pause records until the full save under way is complete, and set a notice."""
        self._paused = True
        self.notice = OutOfSpace(
            "records pause: since the newest full save they take half of "
            f"Delta(max_bytes={self.max_bytes})",
            hint="they begin again when the save under way is complete; a larger bound leaves it time",
        )


def newest_of(saved: Iterable[Saved]) -> Identity:
    """The newest of these full steps: the last one of the latest run."""
    return max(((s.run, s.step) for s in saved), default=(0, 0))


def by_age(entries: Iterable[tuple[str, int]], newest: Identity) -> list[tuple[int, str, bool]]:
    """Size and key of each segment among these objects, oldest first, and whether a restart from the full
    step `newest` may need it."""
    segments = []
    for key, size in entries:
        parsed = parse_segment(key)
        if parsed is not None:
            run, _, last, _ = parsed
            needed = run > newest[0] or (run == newest[0] and last > newest[1])
            segments.append(((run, last), size, key, needed))
    return [(size, key, needed) for _, size, key, needed in sorted(segments)]


def needed_bytes(store: Store) -> int:
    """Bytes of the records after the newest full step."""
    sizes = by_age(store.entries("log/"), newest_of(committed(store)))
    return sum(size for size, _, needed in sizes if needed)
