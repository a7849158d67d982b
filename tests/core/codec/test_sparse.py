"""Packed entries: what was packed comes back, within the bound, and nonsense is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.codec.sparse import most_bytes, pack_sparse, unpack_sparse
from holdfast.errors import FormatError


@given(
    st.sets(st.integers(0, 5000), max_size=300),
    st.sampled_from([np.uint8, np.int16, np.int32, np.int64]),
    st.integers(1, 10_000),
)
def test_there_and_back(chosen: set[int], dtype: type, scale: int) -> None:
    positions = np.array(sorted(chosen), np.int64) * scale
    values = np.arange(len(positions)).astype(dtype)
    packed = pack_sparse(positions, values)
    elements = int(positions[-1]) + 1 if len(positions) else 0
    assert len(packed) <= most_bytes(len(positions), elements, values.itemsize)
    rest = np.arange(5, dtype=np.uint8)
    at, found, behind = unpack_sparse(np.concatenate([packed, rest]), values.dtype)
    assert np.array_equal(at, positions)
    assert np.array_equal(found, values)
    assert np.array_equal(behind, rest)


def test_a_literal() -> None:
    packed = pack_sparse(np.array([0, 254, 509, 1019]), np.array([1, 2, 3, 4], np.uint8))
    assert packed[:16].view("<u8").tolist() == [7, 4]
    assert packed[16:].tolist() == [0, 254, 255, 0, 255, 255, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("cut", [0, 8, 15, 17, 22])
def test_what_is_cut_is_refused(cut: int) -> None:
    packed = pack_sparse(np.array([1, 2, 600]), np.array([1, 2, 3], np.uint8))
    with pytest.raises(FormatError, match="packed entries"):
        unpack_sparse(packed[:cut], np.dtype(np.uint8))


def test_another_count_is_refused() -> None:
    packed = pack_sparse(np.array([1, 2, 600]), np.array([1, 2, 3], np.uint8))
    packed[8] = 2
    with pytest.raises(FormatError, match="2 in 5 of"):
        unpack_sparse(packed, np.dtype(np.uint8))
