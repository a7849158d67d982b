"""Who reads which chunks: each has exactly one reader, one that needs it, and the load is even."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.checkpoint.read_assignment import assign

RUNS = st.tuples(st.integers(0, 7), st.integers(0, 60), st.integers(0, 60)).map(
    lambda r: (r[0], min(r[1:]), max(r[1:]))
)


@settings(max_examples=100, deadline=None)
@given(st.lists(RUNS.filter(lambda r: r[1] < r[2]), max_size=12))
def test_every_chunk_has_one_reader_that_needs_it(claims) -> None:
    need: dict[int, set[int]] = {}
    for rank, a, b in claims:
        for chunk in range(a, b):
            need.setdefault(chunk, set()).add(rank)
    load: dict[int, int] = {}
    reader_of: dict[int, int] = {}
    for a, b, reader, needers in assign(claims, load):
        for chunk in range(a, b):
            assert chunk not in reader_of
            reader_of[chunk] = reader
            assert set(needers) == need[chunk]
            assert reader in need[chunk]
    assert reader_of.keys() == need.keys()
    assert sum(load.values()) == len(need)
    assert all(load[r] == list(reader_of.values()).count(r) for r in load)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 8), st.integers(1, 200))
def test_what_all_need_is_shared_evenly(ranks, chunks) -> None:
    load: dict[int, int] = {}
    list(assign([(rank, 0, chunks) for rank in range(ranks)], load))
    shares = [load.get(rank, 0) for rank in range(ranks)]
    assert max(shares) - min(shares) <= 1


def test_load_is_kept_even_from_file_to_file() -> None:
    load: dict[int, int] = {}
    for _ in range(30):
        list(assign([(rank, 0, 1) for rank in range(3)], load))
    assert load == {0: 10, 1: 10, 2: 10}
