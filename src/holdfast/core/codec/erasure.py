"""An erasure code by XOR alone: k data blocks, m parity blocks; any k of the k + m rebuild the others.

Cauchy Reed-Solomon (`cauchy`): m = 1 is plain XOR (RAID 5), k = 1 is copying, and the first parity of every
code is the XOR of the data, so one lost block never needs more than XOR.  Blocks are numbered: data
0 .. k-1, parity row r is k + r.

A block is divided into *units* of w packets.  Bit b of byte i of a unit's w packets, taken together, is an
element of GF(2^w), and a unit of parity depends only on the units of data at the same place.  So ranges of
whole units can be encoded and rebuilt by themselves, and data blocks can be added to a parity one by one:

    >>> code, data = Erasure(2, 1), [np.full(64, 5, np.uint8), np.full(64, 3, np.uint8)]
    >>> parity = np.empty(64, np.uint8)
    >>> code.accumulate({0: parity}, 0, data[0], fresh=True)
    >>> code.accumulate({0: parity}, 1, data[1])
    >>> lost = np.empty(64, np.uint8)
    >>> code.rebuild({0: data[0], 2: parity}, {1: lost})
    >>> bool((lost == 3).all())
    True

Input blocks may be shorter than output blocks; they count as padded with zeros.  Output blocks have whole
units and must not overlap input blocks.  No block is copied or allocated: work proceeds in tiles that fit
in a core's cache.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.base.errors import UsageError
from holdfast.core.codec.cauchy import Matrix, coding_matrix, field, rebuilding_matrix, word_bits
from holdfast.core.codec.xors import Program, compiled

Octets = NDArray[np.uint8]

PACKET_BYTES = 16 << 10
"""Four packets make a unit of 64 KiB.  4 KiB packets were 9 to 14 % slower; 64 KiB packets were 15 %
faster, but quadruple the unit."""
_XOR_UNIT_BYTES = 64
"""Unit of a code whose elements are all 1, so that bytes are independent: a cache line."""
TILE_BYTES = 1 << 20
"""Bytes of all blocks processed at a time: they fit in a core's L2 cache."""

_SOURCES_AT_ONCE = 16
"""Blocks that one program reads: longer programs take long to find and outgrow the cache."""


@dataclass(frozen=True)
class Erasure:
    """A code for `num_data` data and `num_parity` parity blocks, at most 256 together."""

    num_data: int
    num_parity: int
    packet_bytes: int = PACKET_BYTES

    def __post_init__(self) -> None:
        k, m = self.num_data, self.num_parity
        if k < 1 or m < 0 or k + m > 256:
            raise UsageError(
                f"no code for {k} data and {m} parity blocks",
                hint="at least 1 data block, at most 256 blocks in all",
            )
        if self.packet_bytes < 1:
            raise UsageError(f"packets of {self.packet_bytes} bytes")

    @cached_property
    def word_bits(self) -> int:
        """w: the number of packets of a unit."""
        return word_bits(self.num_data, self.num_parity)

    @cached_property
    def matrix(self) -> Matrix:
        """Element [r][j] of GF(2^w): the factor of data block j in parity row r."""
        return coding_matrix(self.num_data, self.num_parity, self.word_bits)

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit; lengths of output blocks and ends of ranges are multiples of it."""
        return _XOR_UNIT_BYTES if self.word_bits == 1 else self.word_bits * self.packet_bytes

    def padded(self, num_bytes: int) -> int:
        """`num_bytes` rounded up to whole units."""
        return -(-num_bytes // self.unit_bytes) * self.unit_bytes

    def accumulate(
        self, parities: Mapping[int, Octets], index: int, block: Octets, *, fresh: bool = False
    ) -> None:
        """Add data block `index` to some or all parities, which are given by row.

        `fresh`: overwrite the parities, as the first contribution does.  Adding a block a second time
        removes it again (XOR).
        """
        self._check_numbers([index], self.num_data, "data block")
        self._check_numbers(parities, self.num_parity, "parity row")
        elements = tuple((self.matrix[row][index],) for row in parities)
        self._xor(elements, [block], list(parities.values()), fresh)

    def encode(self, data: Sequence[Octets], parities: Mapping[int, Octets]) -> None:
        """Encode all k data blocks into some or all parities, which are given by row."""
        if len(data) != self.num_data:
            raise UsageError(f"{len(data)} data blocks for a code of {self.num_data}")
        self._check_numbers(parities, self.num_parity, "parity row")
        self._xor(tuple(self.matrix[r] for r in parities), data, list(parities.values()), True)

    def rebuild(self, have: Mapping[int, Octets], want: Mapping[int, Octets]) -> None:
        """Write the blocks `want` from k of the blocks `have` (by `choose`), both given by number."""
        for numbers in (have, want):
            self._check_numbers(numbers, self.num_data + self.num_parity, "block")
        if both := have.keys() & want.keys():
            raise UsageError(f"blocks {sorted(both)} are wanted and given")
        use = self.choose(have)
        elements = rebuilding_matrix(self.num_data, self.num_parity, use, tuple(want))
        self._xor(elements, [have[i] for i in use], list(want.values()), True)

    def choose(self, have: Collection[int]) -> tuple[int, ...]:
        """Return the k cheapest of these block numbers to rebuild from: data, then the first parity rows.

        UsageError if there are fewer than k.
        """
        if len(have) < self.num_data:
            raise UsageError(
                f"{len(have)} of {self.num_data + self.num_parity} blocks cannot give the others",
                hint=f"any {self.num_data} can; given: {sorted(have) or 'none'}",
            )
        return tuple(sorted(have)[: self.num_data])

    def _check_numbers(self, numbers: Collection[int], limit: int, what: str) -> None:
        for number in numbers:
            if not 0 <= number < limit:
                raise UsageError(f"no {what} {number} in a code with {limit}")

    def _xor(
        self, elements: Matrix, sources: Sequence[Octets], targets: Sequence[Octets], fresh: bool
    ) -> None:
        """Add to each target (set it, if `fresh`) the sum of its row's elements times the sources."""
        if not targets:
            return
        size = self._checked_size(sources, targets)
        programs = _programs(elements, self.word_bits, fresh)
        tile = (
            max(1, TILE_BYTES // (len(sources) + len(targets)) // self.unit_bytes) * self.unit_bytes
        )
        scratch = self._scratch(max(p.num_scratch for _, p in programs), min(tile, size))
        for start in range(0, size, tile):
            stop = min(start + tile, size)
            written = [p for block in targets for p in self._packets(block, start, stop)]
            written += [packet[: len(written[0])] for packet in scratch]
            for part, program in programs:
                read = [p for block in sources[part] for p in self._packets(block, start, stop)]
                _run(program, read + written)

    def _checked_size(self, sources: Sequence[Octets], targets: Sequence[Octets]) -> int:
        for block in (*sources, *targets):
            if block.dtype != np.uint8 or block.ndim != 1 or not block.flags.c_contiguous:
                raise UsageError("a block is a contiguous one-dim array of uint8")
        size = len(targets[0])
        if size % self.unit_bytes or any(len(t) != size for t in targets):
            raise UsageError(
                f"blocks of {', '.join(str(len(t)) for t in targets)} bytes cannot be written",
                hint=f"all must be equally long and multiples of {self.unit_bytes} bytes",
            )
        if any(len(s) > size for s in sources):
            raise UsageError(
                f"a block of {max(map(len, sources))} bytes does not fit in {size} bytes of result"
            )
        return size

    def _scratch(self, num_packets: int, tile: int) -> list[NDArray[Any]]:
        """Buffers for `num_packets` packets of each unit of a tile."""
        packet = self.unit_bytes // self.word_bits
        return list(np.empty((num_packets, tile // self.unit_bytes, packet), np.uint8))

    def _packets(self, block: Octets, start: int, stop: int) -> list[NDArray[Any]]:
        """Bytes start..stop as w arrays of (units, packet bytes); padded if the block is shorter."""
        part = block[start:stop]
        if len(part) < stop - start:
            part, rest = np.zeros(stop - start, np.uint8), part
            part[: len(rest)] = rest
        units = part.reshape(-1, self.word_bits, self.unit_bytes // self.word_bits)
        return [units[:, c] for c in range(self.word_bits)]


@lru_cache(maxsize=256)
def _programs(elements: Matrix, w: int, fresh: bool) -> list[tuple[slice, Program]]:
    """Programs that multiply packets by a matrix, for consecutive slices of the sources."""
    bits = field(w).bits
    found = []
    for start in range(0, len(elements[0]), _SOURCES_AT_ONCE):
        part = slice(start, start + _SOURCES_AT_ONCE)
        rows: list[set[int]] = [set() for _ in range(len(elements) * w)]
        for i, row in enumerate(elements):
            for j, element in enumerate(row[part]):
                for r, c in bits(element):
                    rows[i * w + r].add(j * w + c)
        num_sources = len(elements[0][part]) * w
        found.append((part, compiled(rows, num_sources, fresh=fresh and not start)))
    return found


def _run(program: Program, packets: list[NDArray[Any]]) -> None:
    for x, y, z in program.steps:
        if y is None:
            np.copyto(packets[z], packets[x])
        else:
            np.bitwise_xor(packets[x], packets[y], out=packets[z])
