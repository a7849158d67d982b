"""Cauchy matrices over GF(2^w) with few ones: the arithmetic of `erasure`.

An element of GF(2^w) is an integer whose bits are the coefficients of a polynomial modulo a primitive
polynomial; addition is XOR.  Multiplication by an element e is linear over bits, so it is a w x w matrix
of bits whose column c is e * x^c: a product of w packets of data needs as many XORs of packets as that
matrix has ones, and no table is looked up per byte (Bloemer et al., "An XOR-Based Erasure-Resilient
Coding Scheme", 1995).

Every square part of a Cauchy matrix 1 / (x_i + y_j) is invertible, and stays so when rows and columns are
scaled.  Columns are scaled to make row 0 all ones, so the first parity is plain XOR; the other rows are
scaled, and the columns chosen, for few ones (Plank and Xu, "Optimizing Cauchy Reed-Solomon Codes for
Fault-Tolerant Network Storage Applications", 2006).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

Matrix = tuple[tuple[int, ...], ...]

_PRIMITIVE = {1: 0b11, 4: 0b1_0011, 8: 0b1_0001_1101}
"""The polynomial of GF(2^w): x + 1, x^4 + x + 1, x^8 + x^4 + x^3 + x^2 + 1."""


class Field:
    """GF(2^w), with tables of powers and logarithms of x."""

    def __init__(self, w: int) -> None:
        self.w = w
        self.size = 1 << w
        self._power = [1]
        while len(self._power) < self.size - 1:
            self._power.append(_shifted(self._power[-1], w))
        self._log = {e: i for i, e in enumerate(self._power)}

    def mul(self, a: int, b: int) -> int:
        if not a or not b:
            return 0
        return self._power[(self._log[a] + self._log[b]) % (self.size - 1)]

    def inverse(self, a: int) -> int:
        """1 / a; a is not 0."""
        return self._power[-self._log[a] % (self.size - 1)]

    def bits(self, a: int) -> list[tuple[int, int]]:
        """(row, column) of each 1 in the bit matrix of multiplication by a."""
        columns = [self.mul(a, 1 << c) for c in range(self.w)]
        return [(r, c) for r in range(self.w) for c in range(self.w) if columns[c] >> r & 1]

    def solve(self, a: list[list[int]], b: list[list[int]]) -> list[list[int]]:
        """Solve a x = b for x by Gauss-Jordan; a is square and invertible, b has any number of columns."""
        rows = [[*left, *right] for left, right in zip(a, b)]
        for i in range(len(rows)):
            pivot = next(r for r in range(i, len(rows)) if rows[r][i])
            rows[i], rows[pivot] = rows[pivot], rows[i]
            scale = self.inverse(rows[i][i])
            rows[i] = [self.mul(scale, e) for e in rows[i]]
            for r in range(len(rows)):
                if r != i and (factor := rows[r][i]):
                    rows[r] = [e ^ self.mul(factor, f) for e, f in zip(rows[r], rows[i])]
        return [row[len(a) :] for row in rows]


def _shifted(a: int, w: int) -> int:
    """a * x."""
    return a << 1 if a < 1 << (w - 1) else (a << 1) ^ _PRIMITIVE[w]


@lru_cache
def field(w: int) -> Field:
    """GF(2^w)."""
    return Field(w)


def word_bits(num_data: int, num_parity: int) -> int:
    """Smallest w for a code: 1 for plain XOR or copies, 4 for up to 16 blocks in all, 8 for up to 256."""
    if num_data == 1 or num_parity <= 1:
        return 1
    return 4 if num_data + num_parity <= 16 else 8


@lru_cache
def coding_matrix(num_data: int, num_parity: int, w: int) -> Matrix:
    """`num_parity` x `num_data` elements: parity i is the sum over j of element [i][j] times data j.

    Any `num_data` rows of the identity and this matrix together are invertible.  Row 0 is all ones; so is
    every row for one parity or one data block.  The result must not change: parity may be read by another
    version than wrote it.
    """
    if w == 1:
        return ((1,) * num_data,) * num_parity
    gf = field(w)
    x, y = range(num_parity), range(num_parity, gf.size)
    ratios = np.array([[gf.mul(b, gf.inverse(a ^ b)) for b in y] for a in x])  # x[0] is 0
    num_ones, products = _costs(w)
    chosen, best = np.arange(len(y)), np.inf
    matrix: Matrix = ()
    while True:  # the best scales for the columns, then the best columns for the scales
        per_scale = num_ones[products[1:, ratios[:, chosen]]].sum(axis=2)
        scaled = products[per_scale.argmin(axis=0)[:, None] + 1, ratios]
        costs = num_ones[scaled].sum(axis=0)
        chosen = np.sort(np.argsort(costs, kind="stable")[:num_data])
        if costs[chosen].sum() >= best:
            return matrix
        best = costs[chosen].sum()
        matrix = tuple(map(tuple, scaled[:, chosen].tolist()))


def _costs(w: int) -> tuple[np.ndarray, np.ndarray]:
    """Ones in the bit matrix of each element, and the table of all products."""
    gf = field(w)
    num_ones = np.array([len(gf.bits(e)) for e in range(gf.size)])
    return num_ones, np.array([[gf.mul(a, b) for b in range(gf.size)] for a in range(gf.size)])


@lru_cache(maxsize=1024)
def rebuilding_matrix(
    num_data: int, num_parity: int, have: tuple[int, ...], want: tuple[int, ...]
) -> Matrix:
    """The `len(want)` x `len(have)` matrix by which the `num_data` blocks `have` give the blocks `want`.

    Blocks are numbered data first, then parity; `have` is ascending.  Only lost data blocks are unknowns,
    so the linear system is as large as the loss, not as the code.
    """
    w = word_bits(num_data, num_parity)
    gf, parity = field(w), coding_matrix(num_data, num_parity, w)
    known = [i for i in have if i < num_data]
    rows = [parity[i - num_data] for i in have if i >= num_data]
    lost = [i for i in range(num_data) if i not in known]
    ones = [[int(i == j) for j in range(len(rows))] for i in range(len(rows))]
    solved = gf.solve(
        [[row[i] for i in lost] for row in rows],
        [[row[i] for i in known] + ones[n] for n, row in enumerate(rows)],
    )
    data = {i: [int(i == j) for j in have] for i in known} | dict(zip(lost, solved))
    return tuple(
        tuple(data[i]) if i < num_data else _combined(gf, parity[i - num_data], data) for i in want
    )


def _combined(gf: Field, row: tuple[int, ...], data: dict[int, list[int]]) -> tuple[int, ...]:
    """Parity row `row` in terms of the given blocks; `data`: each data block in terms of them."""
    total = [0] * len(data)
    for i, element in enumerate(row):
        total = [t ^ gf.mul(element, e) for t, e in zip(total, data[i])]
    return tuple(total)
