"""Programs of XORs: the product of packets with a matrix of bits, in few steps.

Target r is the XOR of the sources in row r of the matrix.  Common sums are computed once: the pair of terms
that most rows share becomes a term of its own, until no two rows share a pair
(Paar, "Optimized Arithmetic for Reed-Solomon Encoders", 1997).  Two parities of six blocks take 40 XORs of
packets instead of 50, a data block rebuilt from four others and both parities 31 instead of 55.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MOST_BITS = 1 << 14
"""Pairs are not searched in a matrix of more bits: that would take seconds."""

_Step = tuple[int, int | None, int]
"""Place z becomes place x XOR place y, or place x if y is None."""


@dataclass(frozen=True, slots=True)
class Program:
    """Steps over places: the sources, then the targets, then `num_scratch` more."""

    steps: tuple[_Step, ...]
    num_scratch: int


def compiled(rows: list[set[int]], num_sources: int, *, fresh: bool) -> Program:
    """Return the program that sets each target to the sum of its row's sources, or adds it if not `fresh`.

    No row may be empty.
    """
    pairs: dict[int, tuple[int, int]] = {}
    if len(rows) * num_sources <= _MOST_BITS:
        rows, pairs = share_pairs(rows, num_sources)
    return _Emitter(rows, pairs, num_sources, fresh).program()


def share_pairs(
    rows: list[set[int]], num_sources: int
) -> tuple[list[set[int]], dict[int, tuple[int, int]]]:
    """Return equal rows in which shared pairs are terms of their own, numbered from `num_sources` on."""
    bits = np.zeros((len(rows), num_sources), np.int32)
    for r, row in enumerate(rows):
        bits[r, list(row)] = 1
    shared = np.triu(bits.T @ bits, 1)
    pairs: dict[int, tuple[int, int]] = {}
    while (best := int(shared.argmax())) and shared.flat[best] > 1:
        a, b = divmod(best, len(shared))
        both = bits[:, a] & bits[:, b]
        bits[:, a] -= both
        bits[:, b] -= both
        pairs[bits.shape[1]] = a, b
        bits = np.concatenate([bits, both[:, None]], axis=1)
        shared = np.pad(shared, (0, 1))
        for term in (a, b, len(shared) - 1):
            _count(shared, bits, term)
    return [set(np.flatnonzero(row).tolist()) for row in bits], pairs


def _count(shared: NDArray[np.int32], bits: NDArray[np.int32], term: int) -> None:
    """Recount the rows that a term shares with each other term, above the diagonal."""
    counts = bits[:, term] @ bits
    shared[:term, term] = counts[:term]
    shared[term, term + 1 :] = counts[term + 1 :]


class _Emitter:
    """Orders the sums: a pair is computed at its first use, its place is reused after its last use."""

    def __init__(
        self, rows: list[set[int]], pairs: dict[int, tuple[int, int]], num_sources: int, fresh: bool
    ) -> None:
        self.rows, self.pairs, self.fresh = rows, pairs, fresh
        self.first_target = num_sources
        self.first_scratch = self.next_place = num_sources + len(rows)
        self.place = {i: i for i in range(num_sources)}
        self.free: list[int] = []
        self.steps: list[_Step] = []
        self.uses = Counter(t for terms in (*rows, *pairs.values()) for t in terms)
        self.home: dict[int, int] = {}
        if fresh:  # a pair that equals a target is computed in its place
            self.home = {
                next(iter(r)): self.first_target + i for i, r in enumerate(rows) if len(r) == 1
            }

    def program(self) -> Program:
        for i, row in enumerate(self.rows):
            self._sum(sorted(row), self.first_target + i)
        return Program(tuple(self.steps), self.next_place - self.first_scratch)

    def _sum(self, terms: list[int], target: int) -> None:
        for term in self._missing(terms):
            a, b = self.pairs[term]
            x, y = self.place[a], self.place[b]
            self._used(a)
            self._used(b)
            self.place[term] = self._new_place(term)
            self.steps.append((x, y, self.place[term]))
        places = [self.place[t] for t in terms]
        if places != [target]:
            if self.fresh:
                self.steps.append((places[0], places[1] if len(places) > 1 else None, target))
                places = places[2:]
            self.steps += [(target, x, target) for x in places]
        for term in terms:
            self._used(term)

    def _missing(self, terms: list[int]) -> list[int]:
        """The pairs among the terms, and within those, that have no place yet; inner pairs first."""
        found: set[int] = set()
        look = list(terms)
        while look:
            term = look.pop()
            if term not in self.place and term not in found:
                found.add(term)
                look += self.pairs[term]
        return sorted(found)

    def _new_place(self, term: int) -> int:
        if term in self.home:
            return self.home[term]
        if self.free:
            return self.free.pop()
        self.next_place += 1
        return self.next_place - 1

    def _used(self, term: int) -> None:
        self.uses[term] -= 1
        if not self.uses[term] and self.place[term] >= self.first_scratch:
            self.free.append(self.place[term])
