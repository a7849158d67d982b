"""The survey that a restart begins with: full steps, snapshots, and the records that lead on from them.

A candidate is a full step in one place, with the state that records lead to from it.  Whatever is newer
than what can be restored is told: records that lead nowhere, steps whose manifests are damaged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from holdfast.base.errors import NotFound, NotRecoverable, warn_user
from holdfast.base.wire import decode_json
from holdfast.core.checkpoint.listing import came_later, stated_attempt
from holdfast.core.checkpoint.names import Saved, steps_text
from holdfast.core.checkpoint.recorded import last_recorded
from holdfast.core.checkpoint.unproved import tell_passed_over
from holdfast.core.group import Group
from holdfast.live.restore.candidates import Candidate, Identity, newest_first
from holdfast.live.restore.result import FoundAt
from holdfast.live.shelves import Shelf, Trail

if TYPE_CHECKING:
    from holdfast.session.tiers import Tiers


class Survey:
    """All that a live state can be restored from, with the records that lead on from it."""

    def __init__(self, tiers: Tiers) -> None:
        """Looks at all tiers.  Nothing may be under way to them.  Collective; blocks."""
        self._group = tiers.group
        self._url = tiers.store.url
        shelves = [shelf for tier in tiers if (shelf := tier.shelf()) is not None]
        self.shelves: dict[str, Shelf] = {shelf.tier: shelf for shelf in shelves}
        """The full steps of each tier, from the farthest to the nearest."""
        self.root = self.shelves[tiers.root]
        bases = [replace(c, nearness=n) for n, s in enumerate(shelves) for c in s.candidates]
        replaced = self._replaced(tiers, bases)
        trails = [trail for tier in tiers if (trail := tier.trail(shelves)) is not None]
        self.trail: Trail = trails[0] if trails else NoTrail(tiers.group, self.root.log or ())
        """What leads on from these steps."""
        self.candidates = newest_first(
            replace(c, tip=self._tip(c), replaced=c.attempt in replaced) for c in bases
        )

    def _replaced(self, tiers: Tiers, bases: Iterable[Candidate]) -> set[str]:
        """The snapshots of steps that storage has a later save of, by a script that edits it, say.
        Collective."""
        saved = {(s.run, s.step) for s in self.root.saved}
        both = sorted((c.step, c.attempt) for c in bases if c.attempt and c.base in saved)

        def look() -> bytes:
            found = [(stated_attempt(tiers.store, step), attempt) for step, attempt in both]
            return msgspec.json.encode(
                [a for stored, a in found if stored and came_later(stored, a)]
            )

        return decode_json(tiers.group.from_rank0(look), set[str]) if both else set()

    def _tip(self, base: Candidate) -> Identity | None:
        states = self.after(base)
        return states[-1] if states else None

    @property
    def saved(self) -> list[Saved]:
        """The steps of all stores: of the root, and then of those behind it."""
        return [s for shelf in reversed(self.shelves.values()) for s in shelf.saved]

    def copies(self, run: int, step: int) -> list[Candidate]:
        """Return the candidates that are one full step, in the order of all."""
        return [c for c in self.candidates if c.base == (run, step)]

    def lost_with_nodes(self) -> tuple[str, int]:
        """The newest snapshot in memory, and how many nodes that had part of it have it no more."""
        lost = [shelf.lost_nodes() for shelf in self.shelves.values()]
        return max(lost, key=lambda one: one[1])

    # -- what leads to a state --------------------------------------------------------------------

    def after(self, base: Candidate, until: int | None = None) -> list[Identity]:
        """The recorded states that lead on from a step, all or up to one of that number."""
        states = self.trail.after(base.base)
        return [state for state in states if until is None or state[1] <= until]

    def leading(self, at: FoundAt) -> list[Identity]:
        """The recorded states that lead to one that was found.  NotRecoverable if one is gone."""
        states: list[Identity] = []
        state, base = at.tip or (at.run, at.step), (at.run, at.step)
        while state != base:
            parent = self.trail.parent(state)
            if parent is None:
                raise gone(state[1])
            states.insert(0, state)
            state = parent
        return states

    def leading_to(self, step: int) -> Candidate:
        """Find what leads to the newest state of this number by the fewest records; older ones are
        history."""
        reached: list[tuple[Identity, int, Candidate]] = []
        for c in self.candidates:
            reached += [(s, c.step, c) for s in (c.base, *self.after(c)) if s[1] == step]
        way = max(reached, key=lambda way: way[:2], default=None)
        if way is not None:
            return way[2]
        elsewhere = {
            shelf.place: [*dict.fromkeys(c.step for c in shelf.candidates)]
            for shelf in reversed(self.shelves.values())
            if shelf.place and shelf.candidates
        }
        if elsewhere:
            raise NotFound(
                f"no step {step} in {' or in '.join([self._url, *elsewhere])}; steps there: "
                + steps_text([s.step for s in self.root.saved])
                + "".join(f"; in {where}: {steps_text(have)}" for where, have in elsewhere.items())
            )
        return Candidate(0, step)  # nor in storage, which says what it has

    def warn_of_unproved(self, taken: int) -> None:
        """Warn of steps that count as the oldest because their manifests are damaged, and may be the
        newest."""
        for shelf in reversed(self.shelves.values()) if self._group.rank == 0 else ():
            tell_passed_over(shelf.place or self._url, shelf.saved, taken)


class NoTrail(Trail):
    """The trail of a run that replays nothing."""

    def __init__(self, group: Group, log: Collection[str]) -> None:
        """`log`: on rank 0, the keys of the records that are there."""
        self._group = group
        self._log = log

    def tell(self, reached: Identity | None) -> None:
        """Warn of records that a run with `delta=` would replay."""
        if reached is None:
            return
        last = int(self._group.from_rank0(lambda: str(last_recorded(self._log, *reached)).encode()))
        if last:
            warn_user(
                f"there are newer records than step {reached[1]}, up to step {last}; without delta= none "
                "is used"
            )


def gone(step: int) -> NotRecoverable:
    """Return the error for a state that was found, and is not there any more."""
    return NotRecoverable(
        f"step {step}, which find() has found, is not there any more",
        step=step,
        hint="call find() again, and restore what it finds now",
    )
