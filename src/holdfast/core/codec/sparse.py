"""Packing of sparse arrays: positions as gaps of about one byte, then values.

A gap of 255 or more is written as bytes 255 and the remainder, so a byte below 255 ends an entry:

    >>> pack_sparse(np.array([3, 4, 300]), np.array([7, 8, 9], "<u2")).tolist()[16:]
    [3, 1, 255, 41, 7, 0, 8, 0, 9, 0]

The head is two little-endian u64: the number of gap bytes, and of entries.  The gaps of `n` entries among
`m` elements take at most `n + m / 255` bytes.  At a density of 1 % that is about 1.1 bytes an entry; an
index of 32 bits takes 4, a bitmap 12.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.base.errors import FormatError

_Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
_MORE = 255
SPARSE_HEAD_BYTES = 16


def most_bytes(entries: int, elements: int, itemsize: int) -> int:
    """Upper bound of the bytes that `pack_sparse` returns."""
    return SPARSE_HEAD_BYTES + entries * (1 + itemsize) + elements // _MORE


def pack_sparse(positions: Ints, values: NDArray[Any]) -> _Bytes:
    """Pack values at ascending positions."""
    gaps = np.diff(positions, prepend=0)
    wide = np.flatnonzero(gaps >= _MORE)  # few
    more = gaps[wide] // _MORE
    gaps[wide] -= more * _MORE
    lengths = np.ones(len(gaps), np.int64)
    lengths[wide] += more
    ends = np.cumsum(lengths)
    codes = np.full(int(ends[-1]) if len(ends) else 0, _MORE, np.uint8)
    codes[ends - 1] = gaps
    head = np.array([len(codes), len(positions)], "<u8").view(np.uint8)
    return np.concatenate([head, codes, np.ascontiguousarray(values).view(np.uint8)])


def unpack_sparse(data: _Bytes, dtype: np.dtype[Any]) -> tuple[Ints, NDArray[Any], _Bytes]:
    """Return positions, values of `dtype`, and the bytes after them.  FormatError if malformed."""
    if len(data) < SPARSE_HEAD_BYTES:
        raise FormatError(f"packed entries of {len(data)} bytes")
    num_codes, count = (int(n) for n in data[:SPARSE_HEAD_BYTES].view("<u8"))
    values_at = SPARSE_HEAD_BYTES + num_codes
    end = values_at + count * dtype.itemsize
    codes = data[SPARSE_HEAD_BYTES:values_at]
    is_end = codes < _MORE
    if end > len(data) or int(np.count_nonzero(is_end)) != count:
        raise FormatError(f"packed entries: {count} in {num_codes} of {len(data)} bytes")
    positions = np.cumsum(codes, dtype=np.int64)[is_end]
    return positions, data[values_at:end].copy().view(dtype), data[end:]
