"""One round of the nodes, and their messages: keys of the round's store.

    holdfast/done/N     the ranks of node N have finished their work
    holdfast/out/N      the ranks of node N have ended
    holdfast/ends       the round is over; the value is the first node to say so
    holdfast/calm       the round ends without a failure: a node joins, or a process is ready
    holdfast/card/N     the failures of node N, put when its ranks have left

A node sends each message once in a round.  It also keeps its messages here: it puts them into the store
until the store confirms them, and again after a reconnect, since the new host may not have them.
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
    """The rendezvous at the last poll."""

    at_s: float = 0.0
    waiting: int = 0
    """Number of nodes that wait to be taken in."""
    members: frozenset[Any] = frozenset()
    ends: bool = False
    """A node has said that the round is over."""
    is_calm: bool = False
    """The round ends without a failure."""
    are_done: bool = False
    """The ranks of all nodes have finished their work."""
    are_out: bool = False
    """The ranks of all nodes have ended, or their node was lost after they were done."""
    cards: dict[int, EndOfRound] = field(default_factory=dict)


@dataclass
class Round:
    """The nodes of one round, in the order of their ranks."""

    store: Any
    me: int
    members: list[Any]
    nodes: list[Introduction]
    said: dict[str, bytes] = field(default_factory=dict)
    """This node's messages: `done`, `out`, and its card."""
    last_said_at: float = 0.0
    """Time of the last message."""
    ends_calmly: bool | None = None
    """Whether this node ended the round without a failure; None: it has not ended the round."""
    is_first: bool = False
    """This node was the first to end the round."""
    confirmed: set[str] = field(default_factory=set)
    """Names of the messages that the store has confirmed."""

    def lost(self, view: RoundView) -> list[int]:
        """Return the nodes that were struck off without a card."""
        if view.at_s == 0:
            return []
        return [
            n
            for n, member in enumerate(self.members)
            if member not in view.members and n not in view.cards
        ]

    def named(self, numbers: list[int]) -> str:
        return ", ".join(self.nodes[n].host for n in numbers)

    # -- in the store: each call waits for the answer ---------------------------------------------

    def put(self) -> None:
        """Put the messages of this node into the store that it has not confirmed."""
        if self.ends_calmly is not None and ENDS not in self.confirmed:
            if self.ends_calmly:
                self.store.set(CALM, b"1")
            mine = str(self.me)
            self.is_first = self.store.compare_set(ENDS, "", mine) == mine.encode()
            self.confirmed.add(ENDS)
        for what in list(self.said):  # another thread may add messages
            if what not in self.confirmed:
                self.store.set(f"holdfast/{what}/{self.me}", self.said[what])
                self.confirmed.add(what)

    def go_on(self, store: Any) -> None:
        """Go on with the store of a new connection, and repeat this node's messages there."""
        self.store = store
        self.confirmed &= {ENDS}
        self.put()

    def look(self, members: frozenset[Any], waiting: int) -> RoundView:
        """Return the present view: `members` and `waiting` come from torch, the rest from the store."""
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
        """Tell whether all these nodes, and this node, have sent a message."""
        keys = [f"holdfast/{what}/{n}" for n in nodes]
        return what in self.said and bool(self.store.check(keys))

    def _cards(self) -> dict[int, EndOfRound]:
        keys = {n: f"holdfast/card/{n}" for n in range(len(self.members))}
        here = {n: key for n, key in keys.items() if self.store.check([key])}
        return {n: decode_json(self.store.get(key), EndOfRound) for n, key in here.items()}
