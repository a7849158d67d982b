"""Statistics of tensors' values, read in blocks of bounded memory.

Mean and squared deviations of blocks are merged pairwise (Chan, Golub and LeVeque 1979, "Updating formulae
and a pairwise algorithm for computing sample variances"), which does not lose digits as a sum of squares
does where the mean is large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from holdfast.core.checkpoint.diffing import SLICE, as_numbers, batches, read_batch
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.rows import Array


@dataclass(slots=True)
class TensorStatistics:
    """Statistics of the finite elements of a tensor, of complex ones by magnitude; None without any.

    `deviation` is that of the population (divided by the number of elements).
    """

    name: str
    size: int
    mean: float | None = None
    deviation: float | None = None
    least: float | None = None
    most: float | None = None
    num_nan: int = 0
    num_inf: int = 0


def tensor_statistics(
    checkpoint: Checkpoint,
    names: Sequence[str],
    *,
    progress: Callable[[int], object] | None = None,
) -> list[TensorStatistics]:
    """Read tensors and return the statistics of each.  Blocks.  UsageError for an unknown name; Corrupt.

    `progress` is called with the bytes just read.
    """
    entries = checkpoint.manifest.tensors
    tensors = [msgspec.structs.replace(entries[checkpoint.index(n)], name=n) for n in names]
    found = {t.name: TensorStatistics(t.name, math.prod(t.shape)) for t in tensors}
    sums = {name: (0, 0.0, 0.0) for name in found}
    for batch in batches(tensors):
        for (t, _), raw in zip(batch, read_batch(checkpoint, batch)):
            for start in range(0, raw.size, SLICE):
                values = as_numbers(raw[start : start + SLICE], t.dtype)
                finite = _without_others(found[t.name], values)
                if finite.size:
                    sums[t.name] = _added(found[t.name], sums[t.name], finite)
            if progress is not None:
                progress(raw.nbytes)
    for name, (count, mean, squares) in sums.items():
        if count:
            found[name].mean, found[name].deviation = mean, math.sqrt(squares / count)
    return [*found.values()]


def _without_others(into: TensorStatistics, values: Array) -> Array:
    """Count NaN and infinite elements, and return the finite ones."""
    into.num_nan += int(np.isnan(values).sum())
    into.num_inf += int(np.isinf(values).sum())
    finite = values[np.isfinite(values)]
    return np.abs(finite) if finite.dtype.kind == "c" else finite.astype("f8")


def _added(
    into: TensorStatistics, before: tuple[int, float, float], values: Array
) -> tuple[int, float, float]:
    """Merge a block into number, mean and squared deviations."""
    least, most = float(values.min()), float(values.max())
    into.least = least if into.least is None else min(into.least, least)
    into.most = most if into.most is None else max(into.most, most)
    with np.errstate(over="ignore"):
        mean = float(values.mean())
        squares = float(np.square(values - mean).sum())
    count, old_mean, old_squares = before
    total, gap = count + values.size, mean - old_mean
    merged = old_mean + gap * values.size / total
    return total, merged, old_squares + squares + gap * gap * count * values.size / total
