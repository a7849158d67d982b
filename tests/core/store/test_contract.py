"""The rules that all stores share, against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.store.contract import BLOCK_BYTES, Parts, check_prefix
from holdfast.errors import UsageError

BLOCKS = 6


@given(
    parts=st.lists(st.tuples(st.integers(0, BLOCKS), st.integers(0, BLOCKS))),
    tail=st.integers(1, BLOCK_BYTES),
)
def test_an_object_is_complete_when_every_byte_arrived(
    parts: list[tuple[int, int]], tail: int
) -> None:
    size = (BLOCKS - 1) * BLOCK_BYTES + tail
    tracked = Parts("a", size)
    blocks: set[int] = set()
    for first, last in parts:
        start, stop = first * BLOCK_BYTES, min(last * BLOCK_BYTES, size)
        if start < stop:
            tracked.check(start, stop - start)
            tracked.add(start, stop - start)
            blocks.update(range(first, last))
    if blocks == set(range(BLOCKS)):
        tracked.check_complete()
        return
    hole = min(set(range(BLOCKS)) - blocks) * BLOCK_BYTES
    with pytest.raises(UsageError, match=rf"bytes {hole}\.\.\d+ were never written"):
        tracked.check_complete()


@pytest.mark.parametrize("prefix", ["", "a", "a/", "a/.", "a/..", "steps/000", ".tm"])
def test_what_a_key_can_begin_with_is_a_prefix(prefix: str) -> None:
    check_prefix(prefix)
