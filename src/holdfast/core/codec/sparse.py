"""A few values among many zeros: where they are, as gaps of one byte each, and what they are.

A gap of 255 or more is written as so many bytes 255 and what is left, so a byte below 255 ends an entry:

    >>> pack(np.array([3, 4, 300]), np.array([7, 8, 9], "<u2")).tolist()[16:]
    [3, 1, 255, 41, 7, 0, 8, 0, 9, 0]

Before them stand the number of these bytes and the number of entries, as two little-endian u64.  `n`
entries among `m` elements take `n + m / 255` bytes at most, besides the values themselves: at 1 %, about
1.1 bytes an entry, where an index of 32 bits takes four and a bitmap twelve.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.base.errors import FormatError

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
MORE = 255
HEAD_BYTES = 16


def most_bytes(entries: int, elements: int, itemsize: int) -> int:
    """Most bytes that `pack` makes of so many entries among so many elements."""
    return HEAD_BYTES + entries * (1 + itemsize) + elements // MORE


def pack(positions: Ints, values: NDArray[Any]) -> Bytes:
    """Entries at ascending positions, with their values."""
    gaps = np.diff(positions, prepend=0)
    wide = np.flatnonzero(gaps >= MORE)  # few
    more = gaps[wide] // MORE
    gaps[wide] -= more * MORE
    lengths = np.ones(len(gaps), np.int64)
    lengths[wide] += more
    ends = np.cumsum(lengths)
    codes = np.full(int(ends[-1]) if len(ends) else 0, MORE, np.uint8)
    codes[ends - 1] = gaps
    head = np.array([len(codes), len(positions)], "<u8").view(np.uint8)
    return np.concatenate([head, codes, np.ascontiguousarray(values).view(np.uint8)])


def unpack(data: Bytes, dtype: np.dtype[Any]) -> tuple[Ints, NDArray[Any], Bytes]:
    """Positions, values of `dtype`, and what lies behind them.  FormatError if malformed."""
    if len(data) < HEAD_BYTES:
        raise FormatError(f"packed entries of {len(data)} bytes")
    num_codes, count = (int(n) for n in data[:HEAD_BYTES].view("<u8"))
    values_at = HEAD_BYTES + num_codes
    end = values_at + count * dtype.itemsize
    codes = data[HEAD_BYTES:values_at]
    is_end = codes < MORE
    if end > len(data) or int(np.count_nonzero(is_end)) != count:
        raise FormatError(f"packed entries: {count} in {num_codes} of {len(data)} bytes")
    positions = np.cumsum(codes, dtype=np.int64)[is_end]
    return positions, data[values_at:end].copy().view(dtype), data[end:]
