"""Candidates of a restart: full steps, snapshots, and the records that lead on from them.

A candidate is a full step in one place, with the state that records lead to from it.  Warnings name newer
states that cannot be restored: records that lead nowhere, steps with damaged manifests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from holdfast.base.errors import NotFound, NotRecoverable, warn_user
from holdfast.base.wire import decode_json
from holdfast.core.checkpoint.listing import came_later, stated_attempt
from holdfast.core.checkpoint.names import Saved, steps_text
from holdfast.core.checkpoint.naming import step_named
from holdfast.core.checkpoint.notes import NEWEST
from holdfast.core.checkpoint.recorded import last_recorded
from holdfast.core.checkpoint.unproved import tell_passed_over
from holdfast.core.group import Group
from holdfast.live.restore.candidates import Candidate, Identity, newest_first
from holdfast.live.restore.result import FoundAt
from holdfast.live.shelves import Shelf, Trail

if TYPE_CHECKING:
    from holdfast.session.tiers import Tiers


class Survey:
    """All full steps that a state can be restored from, with the records that lead on from them."""

    def __init__(self, tiers: Tiers) -> None:
        """Looks at all tiers, into which no save may be under way.  Collective; blocks."""
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
        """The records that lead on from these steps."""
        self.candidates = newest_first(
            replace(c, tip=self._tip(c), replaced=c.attempt in replaced) for c in bases
        )

    def _replaced(self, tiers: Tiers, bases: Iterable[Candidate]) -> set[str]:
        """Return the snapshots of steps that were saved to storage again later, for example by a script
        that edits them.  Collective."""
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
        """The steps of all stores: the root first, then the home behind it."""
        return [s for shelf in reversed(self.shelves.values()) for s in shelf.saved]

    def copies(self, run: int, step: int) -> list[Candidate]:
        """Return the candidates of one full step, in the order of all candidates."""
        return [c for c in self.candidates if c.base == (run, step)]

    def lost_with_nodes(self) -> tuple[str, int]:
        """Return the newest snapshot in memory, and the number of nodes that have lost their part of it."""
        lost = [shelf.lost_nodes() for shelf in self.shelves.values()]
        return max(lost, key=lambda one: one[1])

    # -- what leads to a state --------------------------------------------------------------------

    def after(self, base: Candidate, until: int | None = None) -> list[Identity]:
        """The recorded states that lead on from a step, all or up to one of that number."""
        states = self.trail.after(base.base)
        return [state for state in states if until is None or state[1] <= until]

    def leading(self, at: FoundAt) -> list[Identity]:
        """Return the recorded states from a base to a found state.  NotRecoverable if one is gone."""
        states: list[Identity] = []
        state, base = at.tip or (at.run, at.step), (at.run, at.step)
        while state != base:
            parent = self.trail.parent(state)
            if parent is None:
                raise gone(state[1])
            states.insert(0, state)
            state = parent
        return states

    def number_of(self, step: int | str | None) -> int | None:
        """Return the number of the step that a label names, in the root, or else in the home behind it;
        None: the newest.  NotFound.  Collective for a label."""
        if not isinstance(step, str):
            return step
        if step == NEWEST:
            return None
        stores = [one.store for one in reversed(self.shelves.values()) if one.store is not None]

        def look() -> bytes:
            for store in stores[:-1]:
                with suppress(NotFound):
                    return str(step_named(store, step)).encode()
            return str(step_named(stores[-1], step)).encode()

        return int(self._group.from_rank0(look))

    def leading_to(self, step: int) -> Candidate:
        """Return the candidate with the fewest records to the newest state of this number.  NotFound."""
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
        return Candidate(0, step)  # reading it raises the error of storage, which lists its steps

    def warn_of_unproved(self, taken: int) -> None:
        """Warn of steps with damaged manifests: they count as the oldest, but may be the newest."""
        for shelf in reversed(self.shelves.values()) if self._group.rank == 0 else ():
            tell_passed_over(shelf.place or self._url, shelf.saved, taken)


class NoTrail(Trail):
    """The trail of a run that replays nothing."""

    def __init__(self, group: Group, log: Collection[str]) -> None:
        """`log`: on rank 0, the keys of the records in the root."""
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
    """Return the error for a found state that no longer exists."""
    return NotRecoverable(
        f"step {step}, which find() has found, no longer exists",
        step=step,
        hint="call find() again, and restore what it finds now",
    )
