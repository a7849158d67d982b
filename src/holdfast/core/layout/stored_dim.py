"""One dim of what a rank stores, beside the dim of the tensor that it comes from.

A `StoredDim` says which stored position holds which index of the tensor, as a list of runs; positions that
no run names are padding.  All that can be done to a dim is to take stored ranges and put them elsewhere,
apart by a step or not: cuts, parts cut one by one, interleaving.  So there is one operation, `moved`.

    >>> moves = [Move(2, 0, 2), Move(8, 2, 2)]                         # rank 1 of 2+4+6, cut in thirds
    >>> StoredDim.whole(0, 12).moved(moves, 4).runs
    (Run(stored=0, logical=2, length=2, step=1), Run(stored=2, logical=8, length=2, step=1))
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Run(NamedTuple):
    """Indices `logical`, `logical + 1`, ... of the tensor, at positions `stored`, `stored + step`, ..."""

    stored: int
    logical: int
    length: int
    step: int = 1

    def clipped(self, start: int, stop: int) -> Run | None:
        """The part of the run at positions `start..stop`; None if there is none."""
        first = max(0, -(-(start - self.stored) // self.step))
        last = min(self.length, -(-(stop - self.stored) // self.step))
        if first >= last:
            return None
        step = self.step if last - first > 1 else 1
        return Run(self.stored + first * self.step, self.logical + first, last - first, step)

    def continued(self, other: Run) -> Run | None:
        """Both as one run, if `other` goes on where this ends; else None."""
        if other.logical != self.logical + self.length:
            return None
        step = self.step if self.length > 1 else other.stored - self.stored
        fits = step > 0 and other.stored == self.stored + self.length * step
        if not fits or (other.length > 1 and other.step != step):
            return None
        return Run(self.stored, self.logical, self.length + other.length, step)


class Move(NamedTuple):
    """Positions `start..start + length` go to `to`, `to + step`, ..."""

    start: int
    to: int
    length: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class StoredDim:
    """A stored dim: its length, the dim of the tensor, and runs in the order of the tensor's indices.

    `parts`: lengths of parts, each of which the next cut cuts by itself; none: the whole.
    `unit`: the next cut falls on multiples of it.
    """

    dim: int
    length: int
    runs: tuple[Run, ...]
    parts: tuple[int, ...] = ()
    unit: int = 1

    @staticmethod
    def whole(dim: int, length: int) -> StoredDim:
        return StoredDim(dim, length, (Run(0, 0, length),) if length else ())

    def moved(self, moves: Iterable[Move], length: int) -> StoredDim:
        """Put what the moves take where they say; all else is left out."""
        runs = []
        for start, to, count, step in moves:
            for run in self.between(start, start + count):
                stored = to + (run.stored - start) * step
                runs.append(Run(stored, run.logical, run.length, run.step * step))
        return StoredDim(self.dim, length, _joined(runs))

    def kept(self, ranges: Sequence[tuple[int, int]]) -> StoredDim:
        """Keep ranges of positions, one after the other."""
        moves, at = [], 0
        for start, stop in ranges:
            moves.append(Move(start, at, stop - start))
            at += stop - start
        return self.moved(moves, at)

    def between(self, start: int, stop: int) -> Iterator[Run]:
        """The runs at positions `start..stop`."""
        for run in self.runs:
            clipped = run.clipped(start, stop)
            if clipped is not None:
                yield clipped


def _joined(runs: list[Run]) -> tuple[Run, ...]:
    """Sort runs by logical index, neighbours made one."""
    found: list[Run] = []
    for run in sorted(runs, key=lambda r: r.logical):
        both = found[-1].continued(run) if found else None
        if both is None:
            found.append(run)
        else:
            found[-1] = both
    return tuple(found)
