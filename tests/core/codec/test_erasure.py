"""The erasure code: right by an independent GF(2^w), whole after every loss, and few XORs.

The arithmetic here shares nothing with the code under test: products are shifts and adds, and symbols are
taken apart bit by bit.  (`galois` 0.4 gave the same parities when the code was chosen.)
"""

from __future__ import annotations

import tracemalloc
from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.codec import erasure
from holdfast.core.codec.cauchy import coding_matrix, word_bits
from holdfast.core.codec.erasure import Erasure, Octets
from holdfast.core.codec.xors import compiled
from holdfast.errors import UsageError

POLYNOMIAL = {1: 0b11, 4: 0b10011, 8: 0b100011101}
CODES = [(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (3, 2), (4, 3), (5, 3), (6, 2), (4, 4), (12, 4)]
WIDE = [(15, 2), (14, 4), (40, 3)]
MODERATE = settings(max_examples=60, deadline=None)


def times(a: int, b: int, w: int) -> int:
    """a * b in GF(2^w), as in school."""
    total = 0
    for bit in range(w):
        total ^= (a << bit) * (b >> bit & 1)
    for bit in reversed(range(w, 2 * w)):
        total ^= (POLYNOMIAL[w] << (bit - w)) * (total >> bit & 1)
    return total


def rank(rows: list[list[int]], w: int) -> int:
    found, rows = 0, [list(row) for row in rows]
    for column in range(len(rows[0])):
        pivot = next((i for i in range(found, len(rows)) if rows[i][column]), None)
        if pivot is None:
            continue
        rows[found], rows[pivot] = rows[pivot], rows[found]
        for i in range(found + 1, len(rows)):
            a, b = rows[i][column], rows[found][column]
            rows[i] = [times(b, x, w) ^ times(a, y, w) for x, y in zip(rows[i], rows[found])]
        found += 1
    return found


def symbols(block: Octets, code: Erasure) -> list[int]:
    """A block's elements of GF(2^w): the bits at one place of a unit's packets."""
    units = block.reshape(-1, code.word_bits, code.unit_bytes // code.word_bits)
    bits = np.unpackbits(units, axis=2).astype(int)
    return [int(s) for s in sum(bits[:, c] << c for c in range(code.word_bits)).reshape(-1)]


def made(code: Erasure, num_units: int, seed: int = 0) -> dict[int, Octets]:
    """Random data and their parity, by block number."""
    rng, size = np.random.default_rng(seed), num_units * code.unit_bytes
    data = [rng.integers(0, 256, size, dtype=np.uint8) for _ in range(code.num_data)]
    parity = {r: np.full(size, 77, np.uint8) for r in range(code.num_parity)}
    code.encode(data, parity)
    return dict(enumerate([*data, *parity.values()]))


@pytest.mark.parametrize(("k", "m"), [*CODES, (15, 2), (14, 4)])
def test_any_k_blocks_determine_the_data(k: int, m: int) -> None:
    w = word_bits(k, m)
    parity = [list(row) for row in coding_matrix(k, m, w)]
    rows = [[int(i == j) for j in range(k)] for i in range(k)] + parity
    assert parity[0] == [1] * k
    losses = list(combinations(range(k + m), min(m, 2 if w == 8 else m)))
    for lost in losses[:: 1 + len(losses) // 40]:
        assert rank([row for i, row in enumerate(rows) if i not in lost], w) == k


def test_matrices_are_kept() -> None:
    """A parity is read by other versions than wrote it."""
    assert coding_matrix(3, 1, 1) == ((1, 1, 1),)
    assert coding_matrix(2, 2, 4) == ((1, 1), (2, 1))
    assert coding_matrix(6, 2, 4) == ((1,) * 6, (13, 2, 1, 9, 8, 4))


@pytest.mark.parametrize(("k", "m"), [(3, 1), (1, 2), (2, 2), (6, 2), (12, 4), (14, 4)])
def test_parity_is_the_product_in_the_field(k: int, m: int) -> None:
    code = Erasure(k, m, packet_bytes=1)
    blocks = {i: symbols(block, code) for i, block in made(code, 3).items()}
    for r, row in enumerate(code.matrix):
        for at, found in enumerate(blocks[k + r]):
            expected = 0
            for j, element in enumerate(row):
                expected ^= times(element, blocks[j][at], code.word_bits)
            assert found == expected


@pytest.mark.parametrize(("k", "m"), CODES)
def test_every_loss_is_rebuilt(k: int, m: int) -> None:
    code = Erasure(k, m, packet_bytes=8)
    blocks = made(code, 3)
    losses = list(chain(*(combinations(range(k + m), size) for size in range(1, m + 1))))
    for lost in losses[:: 1 if k + m < 10 else 61]:
        check_rebuilt(code, blocks, lost)


@pytest.mark.parametrize(("k", "m"), WIDE)
def test_wide_codes_rebuild(k: int, m: int) -> None:
    code = Erasure(k, m, packet_bytes=8)
    blocks = made(code, 2)
    for lost in [(0,), (k - 1, k), tuple(range(m)), tuple(range(k, k + m))]:
        check_rebuilt(code, blocks, lost)


def check_rebuilt(code: Erasure, blocks: dict[int, Octets], lost: tuple[int, ...]) -> None:
    have = {i: block for i, block in blocks.items() if i not in lost}
    together = {i: np.full(len(blocks[i]), 99, np.uint8) for i in lost}
    alone = np.full(len(blocks[0]), 55, np.uint8)
    code.rebuild(have, together)
    code.rebuild(have, {lost[0]: alone})
    assert all((together[i] == blocks[i]).all() for i in lost)
    assert (alone == blocks[lost[0]]).all()


@MODERATE
@given(st.sampled_from(CODES), st.data())
def test_contributions_come_in_any_order_and_may_be_short(code_of, data) -> None:
    """A short block is one padded with zeros; a row can be made alone, by windows of units."""
    k, m = code_of
    code = Erasure(k, m, packet_bytes=8)
    size, unit = 3 * code.unit_bytes, code.unit_bytes
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    blocks = [
        rng.integers(0, 256, data.draw(st.integers(0, size)), dtype=np.uint8) for _ in range(k)
    ]
    whole = [np.concatenate([b, np.zeros(size - len(b), np.uint8)]) for b in blocks]
    expected = {r: np.empty(size, np.uint8) for r in range(m)}
    code.encode(whole, expected)

    row = data.draw(st.integers(0, m - 1))
    parity = np.full(size, 33, np.uint8)
    for n, j in enumerate(data.draw(st.permutations(range(k)))):
        for at in range(0, size, unit):
            code.accumulate(
                {row: parity[at : at + unit]}, j, blocks[j][at : at + unit], fresh=not n
            )
    assert (parity == expected[row]).all()
    code.accumulate({row: parity}, 0, blocks[0])
    code.encode([np.zeros(0, np.uint8), *whole[1:]], {row: expected[row]})
    assert (parity == expected[row]).all()


def test_blocks_of_many_tiles(monkeypatch: Any) -> None:
    code = Erasure(5, 3, packet_bytes=8)
    blocks = made(code, 50)
    monkeypatch.setattr(erasure, "TILE_BYTES", 16 * code.unit_bytes)
    again = made(code, 50)
    assert all((blocks[i] == again[i]).all() for i in blocks)
    check_rebuilt(code, blocks, (0, 3, 6))


@pytest.mark.parametrize(("k", "m"), [(3, 1), (6, 2)])
def test_nothing_of_the_data_s_size_is_allocated(k: int, m: int) -> None:
    code = Erasure(k, m)
    blocks = made(code, code.padded(6 << 20) // code.unit_bytes)
    out = {i: np.empty_like(blocks[i]) for i in range(m)}
    tracemalloc.start()
    try:
        code.encode([blocks[i] for i in range(k)], {0: out[0]})
        code.rebuild({i: b for i, b in blocks.items() if i >= m}, out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < erasure.TILE_BYTES


def test_what_cannot_be_meant_is_refused() -> None:
    code = Erasure(3, 2, packet_bytes=8)
    blocks, unit = made(code, 2), code.unit_bytes
    out = np.empty_like(blocks[0])
    with pytest.raises(UsageError, match=r"2 of 5 blocks cannot give the others\n.*any 3 can"):
        code.rebuild({0: blocks[0], 4: blocks[4]}, {1: out})
    with pytest.raises(UsageError, match="no block 5"):
        code.rebuild(blocks, {5: out})
    with pytest.raises(UsageError, match=r"\[1\] are wanted and given"):
        code.rebuild(blocks, {1: out})
    with pytest.raises(UsageError, match="no parity row 2"):
        code.accumulate({2: out}, 0, blocks[0])
    with pytest.raises(UsageError, match="no data block 3"):
        code.accumulate({0: out}, 3, blocks[0])
    with pytest.raises(UsageError, match="2 data blocks for a code of 3"):
        code.encode([blocks[0], blocks[1]], {0: out})
    with pytest.raises(UsageError, match=f"multiples of {unit} bytes"):
        code.accumulate({0: out[:-1]}, 0, blocks[0][:-1])
    with pytest.raises(UsageError, match="does not fit"):
        code.accumulate({0: out[:unit]}, 0, blocks[0])
    with pytest.raises(UsageError, match="contiguous"):
        code.accumulate({0: out[::2]}, 0, blocks[0])
    for k, m in [(0, 1), (1, -1), (250, 7)]:
        with pytest.raises(UsageError, match="no code"):
            Erasure(k, m)


ROWS = st.lists(st.sets(st.integers(0, 9), min_size=1), min_size=1, max_size=12)


@MODERATE
@given(ROWS, st.booleans())
def test_programs_add_up_each_row_in_fewer_steps(rows, fresh) -> None:
    """Run on integers, where XOR is Python's."""
    before = [7 << 20] * len(rows)
    program = compiled([set(row) for row in rows], 10, fresh=fresh)
    places = [1 << i for i in range(10)] + before + [0] * program.num_scratch
    for x, y, z in program.steps:
        places[z] = places[x] if y is None else places[x] ^ places[y]
    sums = [sum(1 << i for i in row) for row in rows]
    expected = sums if fresh else [b ^ s for b, s in zip(before, sums)]
    assert places[10 : 10 + len(rows)] == expected
    assert len(program.steps) <= sum(max(1, len(row) - fresh) for row in rows)


def test_sharing_saves_xors() -> None:
    """Packets XORed per packet of data: for two parities, and to rebuild one of two lost blocks."""
    code = Erasure(6, 2)
    ((_, encode),) = erasure._programs(code.matrix, code.word_bits, True)
    ones = sum(len(erasure.field(4).bits(e)) for row in code.matrix for e in row)
    assert len(encode.steps) <= 40 < ones - 8 == 50
