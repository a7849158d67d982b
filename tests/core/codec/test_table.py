"""The digest table: which bytes are not what was written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.codec.digest import digest_chunks, hexdigest, num_chunks
from holdfast.core.codec.table import DigestTable
from holdfast.errors import Corrupt


def table_of(data: bytes, size: int) -> DigestTable:
    digests = np.empty(num_chunks(len(data), size), "<u8")
    digest_chunks(memoryview(data), digests, size)
    raw = digests.tobytes()
    return DigestTable.of(raw, hexdigest(raw), len(data), size)


@given(st.binary(min_size=1, max_size=200), st.integers(1, 50), st.data())
def test_any_run_of_chunks_and_any_changed_byte(
    data: bytes, size: int, draw: st.DataObject
) -> None:
    table, chunks = table_of(data, size), num_chunks(len(data), size)
    first = draw.draw(st.integers(0, chunks - 1))
    stop = draw.draw(st.integers(first + 1, chunks))
    a, b = table.span(first, stop)
    part = bytearray(data[a:b])
    table.check(first, memoryview(part))
    assert table.differing(first, memoryview(part)) == []
    at = draw.draw(st.integers(0, len(part) - 1))
    part[at] ^= 1
    with pytest.raises(Corrupt) as caught:
        table.check(first, memoryview(part))
    assert (caught.value.start, caught.value.stop) == table.span(
        *((a + at) // size + n for n in (0, 1))
    )
    assert table.differing(first, memoryview(part)) == [(a + at) // size]


def test_every_chunk_that_differs_is_named() -> None:
    table = table_of(bytes(10), 4)
    assert table.differing(0, memoryview(b"\1\0\0\0" + b"\0\0\0\0" + b"\0\1")) == [0, 2]
    with pytest.raises(
        Corrupt, match=r"^bytes 8..10 differ from what was written: digest [0-9a-f]{16}"
    ):
        table.check(1, memoryview(b"\0\0\0\0" + b"\0\1"))


def test_another_table_is_refused() -> None:
    with pytest.raises(Corrupt, match="digest table differs") as caught:
        DigestTable.of(bytes(16), "0" * 16, 8, 4)
    error = caught.value
    assert (error.start, error.stop, error.expected) == (8, 24, "0" * 16)
    assert error.found == hexdigest(bytes(16))
