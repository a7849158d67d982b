"""One round of the nodes, and what they say in it, by keys of the round's store.

    holdfast/done/N     the ranks of node N have done what there was to do
    holdfast/out/N      they have ended, too
    holdfast/ends       the node that was the first to say that the round is over
    holdfast/calm       it is so for no failure: a node joins, or a process is ready
    holdfast/card/N     what failed at node N, put there when its ranks have left

A node says a thing once in a round.  What it has said is kept here, too, and is put into the store until
that has confirmed it, and once more over a new connection, whose host may know nothing of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.base.wire import decode_json
from holdfast.launch.nodes import EndOfRound, Introduction

ENDS, CALM = "holdfast/ends", "holdfast/calm"


@dataclass(frozen=True, slots=True)
class RoundView:
    """The rendezvous as it was when it was looked at last."""

    at_s: float = 0.0
    waiting: int = 0
    """Nodes that wait to be taken in."""
    members: frozenset[Any] = frozenset()
    ends: bool = False
    """Some node has said that the round is over."""
    is_calm: bool = False
    """It has said so for no failure."""
    are_done: bool = False
    """The ranks of all nodes have done what there was to do."""
    are_out: bool = False
    """They have ended, too, or their node was lost after that."""
    cards: dict[int, EndOfRound] = field(default_factory=dict)


@dataclass
class Round:
    """The nodes of one round, in the order of their ranks."""

    store: Any
    me: int
    members: list[Any]
    nodes: list[Introduction]
    said: dict[str, bytes] = field(default_factory=dict)
    """What this node has said of itself: `done`, `out`, and its card."""
    last_said_at: float = 0.0
    """When it said the last of it."""
    ends_calmly: bool | None = None
    """This node has said that the round is over, and whether that is for no failure; None: it has not."""
    is_first: bool = False
    """Nobody had said so before."""
    confirmed: set[str] = field(default_factory=set)
    """The store has confirmed these of them, by name."""

    def lost(self, view: RoundView) -> list[int]:
        """Return the nodes that were struck off without a word."""
        if view.at_s == 0:
            return []
        return [
            n
            for n, member in enumerate(self.members)
            if member not in view.members and n not in view.cards
        ]

    def named(self, numbers: list[int]) -> str:
        return ", ".join(self.nodes[n].host for n in numbers)

    # -- in the store: each waits for its answer --------------------------------------------------

    def put(self) -> None:
        """Put what this node has said into the store, but for what that has confirmed."""
        if self.ends_calmly is not None and ENDS not in self.confirmed:
            if self.ends_calmly:
                self.store.set(CALM, b"1")
            mine = str(self.me)
            self.is_first = self.store.compare_set(ENDS, "", mine) == mine.encode()
            self.confirmed.add(ENDS)
        for what in list(self.said):  # more may be said meanwhile
            if what not in self.confirmed:
                self.store.set(f"holdfast/{what}/{self.me}", self.said[what])
                self.confirmed.add(what)

    def go_on(self, store: Any) -> None:
        """Go on in the store of a new connection, and say there what this node has said."""
        self.store = store
        self.confirmed &= {ENDS}
        self.put()

    def look(self, members: frozenset[Any], waiting: int) -> RoundView:
        """Return what is known now: `members` and `waiting` by torch, the rest from the store."""
        everyone = range(len(self.members))
        alive = [n for n in everyone if self.members[n] in members]
        are_done = self._have_said("done", everyone)
        return RoundView(
            at_s=time.monotonic(),
            waiting=waiting,
            members=members,
            are_done=are_done,
            are_out=are_done and self._have_said("out", alive),
            ends=bool(self.store.check([ENDS])),
            is_calm=bool(self.store.check([CALM])),
            cards=self._cards() if "card" in self.said else {},
        )

    def _have_said(self, what: str, nodes: Sequence[int]) -> bool:
        """Tell whether these nodes have said it, and this one."""
        keys = [f"holdfast/{what}/{n}" for n in nodes]
        return what in self.said and bool(self.store.check(keys))

    def _cards(self) -> dict[int, EndOfRound]:
        keys = {n: f"holdfast/card/{n}" for n in range(len(self.members))}
        here = {n: key for n, key in keys.items() if self.store.check([key])}
        return {n: decode_json(self.store.get(key), EndOfRound) for n, key in here.items()}
