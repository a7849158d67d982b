"""The rotating layout of a group: which member holds which block, and what to read after a loss.

Each of n members holds a *share*, a byte string; shares have nearly equal lengths.  A share is cut into k
blocks of `block_bytes`; shorter blocks count as padded with zeros, which are not stored.  There are n
stripes of k data and m parity blocks (`erasure`), k + m <= n, all on different members (indices modulo
n):

    block b of member j's share       is data block b of stripe j + 1 + b
    parity row r of stripe s          is on member s + r, at `r * block_bytes` of its kept area

Redundancy schemes are choices of k and m: `none` is k = 1, m = 0; `copy(r)` is k = 1, m = r - 1, so that
each member keeps the shares of the r - 1 before it; `rs(m)` is k = n - m, so that a stripe spans the group
and each member keeps m blocks of a share's (n - m)th; `parity` is rs(1), RAID 5 over memories.
For n = 4, by member:

    parity    0     1     2     3          rs(2)     0     1     2     3
    stripe 0  row0  d2    d1    d0         stripe 0  row0  row1  d1    d0
    stripe 1  d0    row0  d2    d1         stripe 1  d0    row0  row1  d1
    stripe 2  d1    d0    row0  d2         stripe 2  d1    d0    row0  row1
    stripe 3  d2    d1    d0    row0       stripe 3  row1  d1    d0    row0

This module only plans.  A plan lists `Extent`s: byte ranges of a member's areas.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from holdfast.base.errors import NotRecoverable, UsageError
from holdfast.core.codec.erasure import PACKET_BYTES, Erasure, Octets

Area = Literal["share", "kept"]
"""A member's own share, or what it keeps for others: parity blocks or copies."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes `start..stop` of an area of a member; empty for padding."""

    member: int
    area: Area
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Contribution:
    """Data block `index` of a stripe, at `source`, for parity `row` at byte `at` of a member's kept area.

    Apply with `Erasure.accumulate({row: kept[at : at + block_bytes]}, index, bytes of source)`, or in
    windows of whole units.  Each row has k contributions, some possibly empty, so the first may overwrite
    (`fresh`).
    """

    row: int
    at: int
    index: int
    source: Extent


@dataclass(frozen=True, slots=True)
class Piece:
    """A way to obtain bytes `start..stop` of an area.

    If `want` is None, `reads` is the one extent that holds them.  Else `reads[i]` is a range of the
    stripe's block `have[i]`; padded with zeros to `size` bytes, these rebuild that range of block `want`,
    and the wanted bytes begin at its byte `skip`.
    """

    start: int
    stop: int
    reads: tuple[Extent, ...]
    want: int | None = None
    have: tuple[int, ...] = ()
    skip: int = 0
    size: int = 0


@dataclass(frozen=True)
class Stripes:
    """The layout of a group; member j's share has `lengths[j]` bytes."""

    lengths: tuple[int, ...]
    num_data: int
    num_parity: int
    packet_bytes: int = PACKET_BYTES

    def __post_init__(self) -> None:
        if self.num_data + self.num_parity > self.num_members:
            raise UsageError(
                f"{self.num_members} members cannot hold stripes of {self.num_data} data and "
                f"{self.num_parity} parity blocks",
                hint="each block of a stripe is on a member of its own",
            )
        _ = self.code  # UsageError if no code has these sizes

    @property
    def num_members(self) -> int:
        return len(self.lengths)

    @cached_property
    def code(self) -> Erasure:
        """The code that encodes and rebuilds the stripes."""
        return Erasure(self.num_data, self.num_parity, self.packet_bytes)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a block: 1/k of the longest share, rounded up to whole units."""
        return self.code.padded(-(-max(self.lengths) // self.num_data))

    @property
    def kept_bytes(self) -> int:
        """Bytes that each member keeps for others: m blocks."""
        return self.num_parity * self.block_bytes

    # -- where blocks are --------------------------------------------------------------------------

    def holder(self, stripe: int, number: int) -> int:
        """The member that holds a block of a stripe; blocks are numbered as in `erasure`."""
        k = self.num_data
        step = -1 - number if number < k else number - k
        return (stripe + step) % self.num_members

    def place(self, stripe: int, number: int) -> Extent:
        """The extent of a block of a stripe; a data block ends at the end of the share."""
        k, member = self.num_data, self.holder(stripe, number)
        if number >= k:
            at = (number - k) * self.block_bytes
            return Extent(member, "kept", at, at + self.block_bytes)
        start, stop = number * self.block_bytes, (number + 1) * self.block_bytes
        length = self.lengths[member]
        return Extent(member, "share", min(start, length), min(stop, length))

    def blocks(self, member: int, area: Area = "share") -> list[tuple[int, int]]:
        """(stripe, number) of each block of a member's area, in order."""
        n, k = self.num_members, self.num_data
        if area == "share":
            return [((member + 1 + b) % n, b) for b in range(k)]
        return [((member - r) % n, k + r) for r in range(self.num_parity)]

    def contributions(self, member: int) -> list[Contribution]:
        """The contributions to a member's kept area, row by row."""
        return [
            Contribution(row, row * self.block_bytes, index, self.place(stripe, index))
            for row, (stripe, _) in enumerate(self.blocks(member, "kept"))
            for index in range(self.num_data)
        ]

    # -- after a loss ------------------------------------------------------------------------------

    def survives(self, lost: Collection[int]) -> bool:
        """True if every share can be read or rebuilt without the members `lost`."""
        return not self.unrecoverable(lost)

    def unrecoverable(self, lost: Collection[int]) -> list[int]:
        """The lost members whose shares cannot be rebuilt from the others."""
        stripes = {s for s in range(self.num_members) if len(self._alive(s, lost)) < self.num_data}
        return [j for j in sorted(lost) if not stripes.isdisjoint(s for s, _ in self.blocks(j))]

    def sources(
        self, lost: Collection[int], member: int, start: int, stop: int, area: Area = "share"
    ) -> list[Piece]:
        """Pieces that give bytes `start..stop` of a member's area, in order.

        One direct piece if the member is not lost; else a piece per block, rebuilt from k others, whose
        ranges are widened to whole units.  NotRecoverable if fewer than k are left.
        """
        self._check_range(lost, member, start, stop, area)
        if start == stop:
            return []
        if member not in lost:
            return [Piece(start, stop, (Extent(member, area, start, stop),))]
        size = self.block_bytes
        blocks = self.blocks(member, area)
        return [
            self._rebuilt(
                lost, blocks[b], b * size, max(start, b * size), min(stop, (b + 1) * size)
            )
            for b in range(start // size, -(-stop // size))
        ]

    def is_copy(self, piece: Piece) -> bool:
        """True if a piece reads one extent that equals the wanted bytes."""
        if len(piece.reads) > 1 or piece.reads[0].size != piece.stop - piece.start:
            return False
        return piece.want is None or (self.num_data == 1 and piece.skip == 0)

    def fill(self, piece: Piece, read: Sequence[Octets], out: Octets) -> None:
        """Write a piece's `stop - start` bytes into `out`; `read` has the bytes of its `reads`, in order.

        A piece that is not of whole units allocates as many bytes, so ask for long ranges in parts.
        """
        if piece.want is None or self.is_copy(piece):
            np.copyto(out, read[0])
            return
        whole = out if len(out) == piece.size else np.empty(piece.size, np.uint8)
        self.code.rebuild(dict(zip(piece.have, read)), {piece.want: whole})
        if whole is not out:
            np.copyto(out, whole[piece.skip : piece.skip + len(out)])

    def _rebuilt(
        self, lost: Collection[int], block: tuple[int, int], origin: int, start: int, stop: int
    ) -> Piece:
        """Bytes `start..stop` of an area, within its block (stripe, number) that begins at `origin`."""
        stripe, want = block
        alive = self._alive(stripe, lost)
        if len(alive) < self.num_data:
            raise self._too_few(stripe, want, lost, len(alive))
        have, unit = self.code.choose(alive), self.code.unit_bytes
        low, high = (start - origin) // unit * unit, self.code.padded(stop - origin)
        reads = tuple(_part(self.place(stripe, number), low, high) for number in have)
        return Piece(start, stop, reads, want, have, start - origin - low, high - low)

    def _alive(self, stripe: int, lost: Collection[int]) -> list[int]:
        """Numbers of the blocks of a stripe that are not lost."""
        numbers = range(self.num_data + self.num_parity)
        return [i for i in numbers if self.holder(stripe, i) not in lost]

    def _too_few(self, stripe: int, want: int, lost: Collection[int], alive: int) -> NotRecoverable:
        who = ", ".join(map(str, sorted(lost)))
        return NotRecoverable(
            f"{len(lost)} of {self.num_members} members are lost ({who}): block {want} of stripe {stripe}, "
            f"on member {self.holder(stripe, want)}, needs {self.num_data} of the stripe's blocks and "
            f"{alive or 'none'} {'is' if alive <= 1 else 'are'} left"
        )

    def _check_range(
        self, lost: Collection[int], member: int, start: int, stop: int, area: Area
    ) -> None:
        for who in (member, *lost):
            if not 0 <= who < self.num_members:
                raise UsageError(f"no member {who} in a group of {self.num_members}")
        size = self.lengths[member] if area == "share" else self.kept_bytes
        if not 0 <= start <= stop <= size:
            raise UsageError(
                f"bytes {start}..{stop} of member {member}'s {area} area, which has {size}"
            )


def none(lengths: Sequence[int]) -> Stripes:
    """No redundancy: shares survive processes, not members."""
    return Stripes(tuple(lengths), 1, 0)


def copy(lengths: Sequence[int], copies: int) -> Stripes:
    """`copies` of each share: a member also keeps those of the `copies - 1` before it, in a ring.

    Survives any loss that leaves one of every `copies` neighbours.
    """
    return Stripes(tuple(lengths), 1, copies - 1)


def rs(lengths: Sequence[int], losses: int) -> Stripes:
    """Reed-Solomon over the group: survives the loss of any `losses` members; needs more members than
    that."""
    return Stripes(tuple(lengths), len(lengths) - losses, losses)


def _part(whole: Extent, low: int, high: int) -> Extent:
    """Bytes `low..high` of an extent, clipped to its end."""
    start, stop = min(whole.start + low, whole.stop), min(whole.start + high, whole.stop)
    return Extent(whole.member, whole.area, start, stop)
