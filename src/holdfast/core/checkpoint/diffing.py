"""Comparison of two checkpoints of any layouts, in bounded memory.

Both are read in batches of at most `COMPARED_BYTES`: many small tensors at once, and large ones in blocks
of rows.  Values are compared bit for bit first, and differing ones as numbers.  NaN equals NaN; 0.0 and
-0.0 differ in bits but not in value.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import msgspec
import numpy as np

from holdfast.base.errors import UsageError
from holdfast.base.suggest import did_you_mean_pattern, matching_nothing
from holdfast.core.checkpoint.formatting import format_value
from holdfast.core.checkpoint.opened import Checkpoint, plain_tensor
from holdfast.core.checkpoint.reading import read_alone
from holdfast.core.checkpoint.rows import RAW, Array, ArrayTarget, Want
from holdfast.core.format.dtypes import DTYPES, numpy_dtype
from holdfast.core.format.extras import decode
from holdfast.core.format.manifest import TensorEntry
from holdfast.core.layout import Box, flat_range

COMPARED_BYTES = 64 << 20
SLICE = 1 << 20
"""Elements converted at a time, to bound the memory of float64 copies."""


@dataclass
class ValueDifferences:
    """Differences between the values of one tensor in two checkpoints.

    `num_differing` counts elements whose bits differ; `rel_l2` is ||a - b|| / max(||a||, ||b||) over the
    elements that are finite in both, infinite if an infinity differs; elements that are NaN on one side
    only are counted in `num_nan` alone.
    """

    name: str
    state: str
    """As in the manifest: `param`, `buffer`, `tensor`, or the name of an optimizer's state."""
    size: int
    num_differing: int = 0
    num_nan: int = 0
    max_abs: float = 0.0
    rel_l2: float = 0.0


@dataclass
class _Squares:
    """Sums of squares over the finite elements of a tensor."""

    gap: float = 0.0
    a: float = 0.0
    b: float = 0.0

    def relative(self) -> float:
        norm = max(self.a, self.b)
        found = math.sqrt(self.gap / norm) if norm and norm < math.inf else self.gap and math.inf
        return math.inf if math.isnan(found) else found


@dataclass
class Difference:
    """Differences between checkpoints a and b; `num_equal` tensors are equal bit for bit."""

    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    kinds: list[tuple[str, str, str]] = field(default_factory=list)
    """(name, dtype and shape in a, in b)"""
    values: list[ValueDifferences] = field(default_factory=list)
    extras: list[tuple[str, str, str]] = field(default_factory=list)
    """(path, value in a, in b)"""
    notes: list[str] = field(default_factory=list)
    """What was not compared, and why."""
    num_equal: int = 0
    bytes: int = 0

    @property
    def identical(self) -> bool:
        return not (self.only_a or self.only_b or self.kinds or self.values or self.extras)


_Part = tuple[TensorEntry, Box]


def compare_checkpoints(
    a: Checkpoint,
    b: Checkpoint,
    *,
    only: str | None = None,
    progress: Callable[[int], object] | None = None,
) -> Difference:
    """Compare tensors and extras; `only`: a pattern for names of tensors and paths of extras.

    `progress` is called with the bytes just compared.  UsageError if the pattern matches nothing in either;
    Corrupt if either checkpoint is damaged.
    """
    found = Difference()
    if only is not None:
        _check_pattern(a, b, only)
    shared = _match_names(a, b, only, found)
    differing = {t.name: ValueDifferences(t.name, t.state, math.prod(t.shape)) for t in shared}
    squares = {t.name: _Squares() for t in shared}
    for batch in batches(shared):
        for (t, _), x, y in zip(batch, read_batch(a, batch), read_batch(b, batch)):
            _compare_values(differing[t.name], squares[t.name], t.dtype, x, y)
            found.bytes += x.nbytes
            if progress is not None:
                progress(x.nbytes)
    found.values = [v for v in differing.values() if v.num_differing]
    for v in found.values:
        v.rel_l2 = squares[v.name].relative()
    found.num_equal = len(shared) - len(found.values)
    _compare_extras(a, b, only, found)
    return found


def _check_pattern(a: Checkpoint, b: Checkpoint, only: str) -> None:
    """UsageError for a pattern that matches nothing, which would otherwise report no difference."""
    names = [*a.names(), *b.names()]
    if not matching_nothing([only], names):
        return
    paths = [path for c in (a, b) for path in _extras_paths(c)]
    if matching_nothing([only], paths):
        raise UsageError(
            f"only={only!r} matches no tensor and no extra of either step",
            hint=did_you_mean_pattern(only, [*names, *paths])
            or "`holdfast inspect` lists their names",
        )


def _extras_paths(checkpoint: Checkpoint) -> Iterator[str]:
    """Paths of all extras, of containers and of their items, as in differences."""
    trees = [("", checkpoint.extras)]
    if checkpoint.manifest.per_rank:
        ranks = sorted(checkpoint.manifest.file_of)
        trees += [(f"rank{rank}", _of_rank(checkpoint, rank)) for rank in ranks]
    for path, value in trees:
        yield from (inner for inner, _ in values_below(path, value) if inner)


def _of_rank(checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    """The extras of one rank, in plain Python."""
    return {k: decode(v, plain_tensor) for k, v in checkpoint.rank_extras(rank).items()}


def values_below(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The value at `path`, and each value in it with its path: `meta.ids[3]`."""
    yield path, value
    if isinstance(value, dict):
        for key, one in value.items():
            yield from values_below(f"{path}.{key}" if path else str(key), one)
    elif isinstance(value, (list, tuple)):
        for i, one in enumerate(value):
            yield from values_below(f"{path}[{i}]", one)


def total_bytes(a: Checkpoint, b: Checkpoint, only: str | None = None) -> int:
    """Number of bytes of each checkpoint that `compare_checkpoints` will read."""
    return sum(math.prod(t.shape) * DTYPES[t.dtype].bytes for t in _match_names(a, b, only))


def _match_names(
    a: Checkpoint, b: Checkpoint, only: str | None, into: Difference | None = None
) -> list[TensorEntry]:
    """Return the tensors with the same name, dtype and shape in both; report the others in `into`."""
    found = into or Difference()
    pattern = "*" if only is None else only
    ours = {n: a.manifest.tensors[a.index(n)] for n in a.names() if fnmatchcase(n, pattern)}
    theirs = {n: b.manifest.tensors[b.index(n)] for n in b.names() if fnmatchcase(n, pattern)}
    found.only_a = [n for n in ours if n not in theirs]
    found.only_b = [n for n in theirs if n not in ours]
    same = []
    for name in ours.keys() & theirs.keys():
        t, u = ours[name], theirs[name]
        if (t.dtype, t.shape) != (u.dtype, u.shape):
            found.kinds.append((name, _kind(t), _kind(u)))
        elif name in (t.name, u.name):  # skip aliases that are tied in both
            same.append(t if t.name == name else msgspec.structs.replace(t, name=name))
    found.kinds.sort()
    return sorted(same, key=lambda t: a.index(t.name))


def _kind(t: TensorEntry) -> str:
    return f"{t.dtype} {list(t.shape)}"


def batches(tensors: list[TensorEntry], limit: int = COMPARED_BYTES) -> Iterator[list[_Part]]:
    """Boxes that cover every tensor in order, in batches of at most `limit` bytes."""
    batch: list[_Part] = []
    size = 0
    for t in tensors:
        itemsize = DTYPES[t.dtype].bytes
        for box in blocks(t.shape, limit // itemsize):
            more = box.size * itemsize
            if batch and size + more > limit:
                yield batch
                batch, size = [], 0
            batch.append((t, box))
            size += more
    if batch:
        yield batch


def blocks(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Boxes of at most `most` elements that cover an array in order, of whole rows if one fits."""
    size = math.prod(shape)
    row = math.prod(shape[1:])
    step = most // row * row if 0 < row <= most else most
    for start in range(0, size, step):
        yield from flat_range(shape, start, min(start + step, size))


def read_batch(checkpoint: Checkpoint, batch: list[_Part]) -> list[Array]:
    """Read a batch: the raw elements of each part, flat.  Verified."""
    wants, values = [], []
    for t, box in batch:
        array: Array = np.empty(box.shape, RAW[DTYPES[t.dtype].bytes])
        wants.append(Want(checkpoint.index(t.name), box, ArrayTarget(array)))
        values.append(array.reshape(-1))
    read_alone(checkpoint.images, wants)
    return values


def _compare_values(
    into: ValueDifferences, squares: _Squares, dtype: str, a: Array, b: Array
) -> None:
    """Add the differences between two arrays of raw elements, a tensor or a block of it."""
    if a.size == into.size and np.array_equal(a.view("u1"), b.view("u1")):
        return
    for start in range(0, a.size, SLICE):
        x, y = a[start : start + SLICE], b[start : start + SLICE]
        bits = (x.view("u1") != y.view("u1")).reshape(x.size, -1).any(axis=1)
        into.num_differing += int(bits.sum())
        p = as_numbers(x, dtype)
        q = as_numbers(y, dtype) if bits.any() else p
        finite = np.isfinite(p) & np.isfinite(q)
        squares.a += _square(p[finite])
        squares.b += _square(q[finite])
        if q is not p:
            _measure(into, squares, p[bits], q[bits])


def _measure(into: ValueDifferences, squares: _Squares, x: Array, y: Array) -> None:
    lone = np.isnan(x) != np.isnan(y)
    into.num_nan += int(lone.sum())
    differ = (x != y) & ~np.isnan(x) & ~np.isnan(y)
    if differ.any():
        with np.errstate(all="ignore"):
            gap = np.abs(x[differ] - y[differ])
        into.max_abs = max(into.max_abs, float(gap.max()))
        squares.gap += _square(gap)


def _square(values: Array) -> float:
    """Sum of the squares of numbers' magnitudes."""
    values = np.abs(values) if values.dtype.kind == "c" else values
    with np.errstate(all="ignore"):
        return float(np.dot(values, values))


def as_numbers(raw: Array, dtype: str) -> Array:
    """Raw elements as numbers wide enough to subtract: float64, longdouble or complex128."""
    if dtype == "complex32":
        pairs = raw.view("f2").reshape(-1, 2).astype("f8")
        return np.asarray(pairs[:, 0] + 1j * pairs[:, 1])
    values = raw.view(numpy_dtype(dtype))
    if values.dtype.kind == "c":
        return np.asarray(values.astype("c16"))
    return np.asarray(values.astype(np.longdouble if values.dtype.kind in "iu" else "f8"))


# -- extras ---------------------------------------------------------------------------------------


def _compare_extras(a: Checkpoint, b: Checkpoint, only: str | None, found: Difference) -> None:
    rows = list(_differences("", a.extras, b.extras))
    if a.manifest.per_rank.keys() | b.manifest.per_rank.keys():
        rows += _compare_rank_extras(a, b, found)
    found.extras = [r for r in rows if only is None or fnmatchcase(r[0], only)]


def _compare_rank_extras(
    a: Checkpoint, b: Checkpoint, found: Difference
) -> Iterator[tuple[str, str, str]]:
    """Differences of per-rank extras, which are comparable only for equal numbers of ranks."""
    x, y = a.manifest, b.manifest
    foreign = [(letter, c) for letter, c in (("a", a), ("b", b)) if c.format != "holdfast"]
    why = "".join(f"{s} is a {c.format} checkpoint, which has none" for s, c in foreign[:1])
    if not why and x.layout.world != y.layout.world:
        why = f"{x.layout.world} and {y.layout.world} ranks"
    if why:
        keys = ", ".join(sorted(x.per_rank.keys() | y.per_rank.keys()))
        found.notes.append(f"extras of single ranks ({keys}) were not compared: {why}")
        return
    for rank in sorted(x.file_of.keys() | y.file_of.keys()):
        yield from _differences(f"rank{rank}", _of_rank(a, rank), _of_rank(b, rank))


def _differences(path: str, a: Any, b: Any) -> Iterator[tuple[str, str, str]]:
    """(path, a, b) of every leaf that differs."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(k for k in b if k not in a)]:
            below = f"{path}.{key}" if path else str(key)
            if key not in a or key not in b:
                yield (
                    below,
                    format_value(a[key]) if key in a else "-",
                    format_value(b[key]) if key in b else "-",
                )
            else:
                yield from _differences(below, a[key], b[key])
    elif isinstance(a, (list, tuple)) and type(a) is type(b) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b)):
            yield from _differences(f"{path}[{i}]", x, y)
    elif not _equal(a, b):
        yield path, format_value(a), format_value(b) + _extent(a, b)


def _extent(a: Any, b: Any) -> str:
    """Number of elements that differ between two arrays, in words: their shapes do not show it."""
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray) or a.size <= 1:
        return ""
    if a.dtype != b.dtype or a.shape != b.shape or a.dtype.hasobject:
        return ""
    bits = [np.frombuffer(x.tobytes(), "u1").reshape(x.size, -1) for x in (a, b)]
    return f" ({int((bits[0] != bits[1]).any(axis=1).sum()):,} elements differ)"


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        same = type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape
        return same and bool(a.tobytes() == b.tobytes())
    if isinstance(a, io.BytesIO) and isinstance(b, io.BytesIO):
        return (a.getvalue(), a.tell()) == (b.getvalue(), b.tell())
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return type(a) is type(b) and bool(a == b)
