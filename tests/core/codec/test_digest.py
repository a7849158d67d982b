"""Digests of chunks: known values, and any change is found where it is."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.codec.digest import digest, digest_chunks, hexdigest, num_chunks
from holdfast.core.codec.table import first_difference


def table_of(data: bytes, chunk_bytes: int) -> np.ndarray:
    table = np.empty(num_chunks(len(data), chunk_bytes), "<u8")
    digest_chunks(memoryview(data), table, chunk_bytes)
    return table


def test_known_values() -> None:
    """XXH3-64, seed 0, from its specification: else nobody else can read our tables."""
    assert hexdigest(b"") == "2d06800538d394c2"
    assert hexdigest(b"a") == "e6c632b61e964e1f"
    assert digest(b"abc") == 0x78AF5F94892F3950


@given(st.binary(max_size=100), st.integers(1, 40))
def test_chunks_are_digested_one_by_one(data, chunk_bytes) -> None:
    parts = [data[i : i + chunk_bytes] for i in range(0, len(data), chunk_bytes)]
    assert table_of(data, chunk_bytes).tolist() == [digest(p) for p in parts]
    assert first_difference(memoryview(data), table_of(data, chunk_bytes), chunk_bytes) is None


@given(st.binary(min_size=1, max_size=100), st.integers(1, 40), st.data())
def test_a_flipped_bit_is_found_in_its_chunk(data, chunk_bytes, draw) -> None:
    at = draw.draw(st.integers(0, len(data) - 1))
    bad = bytearray(data)
    bad[at] ^= 1 << draw.draw(st.integers(0, 7))
    found = first_difference(memoryview(bad), table_of(data, chunk_bytes), chunk_bytes)
    assert found == at // chunk_bytes
