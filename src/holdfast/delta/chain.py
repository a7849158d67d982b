"""The choice of the records that lead on from a state: a pure function of what there is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from holdfast.delta.segment import Identity

R = TypeVar("R")


def chain_from(base: Identity, follows: Mapping[Identity, Iterable[tuple[Identity, R]]]) -> list[R]:
    """The records that lead on from a state, in order.

    `follows`: by state, the states that records lead to from it.  Where two runs went on from one state,
    the later run's record counts: the earlier one's was given up.
    """
    found: list[R] = []
    at, seen = base, {base}
    while True:
        ways = [way for way in follows.get(at, ()) if way[0] not in seen]
        if not ways:
            return found
        at, record = max(ways, key=lambda way: way[0])
        seen.add(at)
        found.append(record)
