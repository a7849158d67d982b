"""Statistics of tensors: against numpy, with NaN and infinities, in blocks."""

from __future__ import annotations

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from builders import Tensor, build, memory
from holdfast.core.checkpoint import diffing, statistics
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.statistics import TensorStatistics, tensor_statistics
from holdfast.layout import Cut, Mesh, Sharding

MESH = Mesh((("dp", 3),))
CUT = Sharding((Cut(0, ("dp",)),))


def of(values: object, sharding: Sharding = CUT) -> TensorStatistics:
    store = memory()
    checkpoint = Checkpoint(store, build(store, MESH, {"w": Tensor(values, sharding)}))
    (found,) = tensor_statistics(checkpoint, ["w"])
    return found


@pytest.mark.parametrize("dtype", ["f4", "f8", "bfloat16", "i4", "u1", "bool"])
def test_numbers_are_those_of_numpy(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "SLICE", 7)  # many blocks
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    values = (np.random.default_rng(0).standard_normal((9, 11)) * 50 + 100).astype(kind)
    wide = values.astype("f8")
    found = of(values)
    assert found.size == 99 and (found.num_nan, found.num_inf) == (0, 0)
    assert math.isclose(found.mean or 0, wide.mean(), rel_tol=1e-12)
    assert math.isclose(found.deviation or 0, wide.std(), rel_tol=1e-9, abs_tol=1e-12)
    assert (found.least, found.most) == (wide.min(), wide.max())


def test_a_large_mean_costs_no_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "SLICE", 10)
    values = np.tile([1e9, 1e9 + 1], 50)
    assert of(values) == TensorStatistics("w", 100, 1e9 + 0.5, 0.5, 1e9, 1e9 + 1)


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    nan, inf = math.nan, math.inf
    found = of(np.array([1.0, nan, inf, -inf, 3.0, nan, nan], "f4"))
    assert found == TensorStatistics("w", 7, 2.0, 1.0, 1.0, 3.0, num_nan=3, num_inf=2)
    assert of(np.array([nan, inf], "f4")) == TensorStatistics("w", 2, num_nan=1, num_inf=1)
    assert of(np.zeros((0, 4), "f4")) == TensorStatistics("w", 0)
    assert of(np.array([3 + 4j, 0], "c8")).mean == 2.5


def test_at_most_one_batch_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def batches(tensors: list[object]) -> object:
        for batch in diffing.batches(tensors, 1000):  # type: ignore[arg-type]
            sizes.append(sum(4 * box.size for _, box in batch))
            yield batch

    monkeypatch.setattr(statistics, "batches", batches)
    values = np.random.default_rng(1).standard_normal((40, 50)).astype("f4")
    found = of(values)
    assert len(sizes) >= 8 and max(sizes) <= 1000
    assert math.isclose(found.mean or 0, values.astype("f8").mean(), rel_tol=1e-12)
