"""Comparing steps: against numpy, over layouts, with NaN, in bounded memory."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from builders import FSDP_TP, Tensor, build, memory, transformer
from holdfast.core.checkpoint import diffing
from holdfast.core.checkpoint.diffing import Difference, batches, blocks, compare_checkpoints
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.format.dtypes import numpy_dtype
from holdfast.core.format.extras import memory_file
from holdfast.core.format.manifest import TensorEntry
from holdfast.layout import Cut, Mesh, Sharding


def two(a: dict[str, Tensor], b: dict[str, Tensor], **options: object) -> Difference:
    one = Mesh((("dp", 2),))
    stores = memory(), memory()
    opened = [Checkpoint(s, build(s, one, t)) for s, t in zip(stores, (a, b))]
    return compare_checkpoints(*opened, **options)  # type: ignore[arg-type]


def test_layouts_do_not_matter() -> None:
    a, b = memory(), memory()
    one = Mesh((("fsdp", 3),))
    x = build(a, FSDP_TP, transformer())
    y = build(b, one, transformer(one))
    found = compare_checkpoints(Checkpoint(a, x), Checkpoint(b, y))
    assert found.identical
    assert found.num_equal == len(x.tensors)


def test_names_kinds_and_values() -> None:
    f = np.arange(12, dtype="f4").reshape(3, 4)
    g = f.copy()
    g[1, 2] += 0.5
    g[2, 3] = -g[2, 3]
    found = two(
        {"m.a": Tensor(f), "m.b": Tensor(f), "m.c": Tensor(f), "m.same": Tensor(f)},
        {"m.a": Tensor(g), "m.b": Tensor(f.T.copy()), "m.d": Tensor(f), "m.same": Tensor(f)},
    )
    assert (found.only_a, found.only_b) == (["m.c"], ["m.d"])
    assert found.kinds == [("m.b", "float32 [3, 4]", "float32 [4, 3]")]
    (v,) = found.values
    assert (v.name, v.size, v.num_differing, v.num_nan) == ("m.a", 12, 2, 0)
    assert v.max_abs == 22.0
    p, q = f.astype("f8"), g.astype("f8")
    larger = max(np.linalg.norm(p), np.linalg.norm(q))
    assert math.isclose(v.rel_l2, np.linalg.norm(p - q) / larger, rel_tol=1e-12)
    assert not found.identical


def test_nan_and_infinity() -> None:
    nan, inf = math.nan, math.inf
    a = np.array([nan, nan, 1.0, inf, inf, 0.0], "f4")
    b = np.array([nan, 1.0, 1.0, inf, 2.0, -0.0], "f4")
    (v,) = two({"m": Tensor(a)}, {"m": Tensor(b)}).values
    assert (v.num_differing, v.num_nan, v.max_abs, v.rel_l2) == (3, 1, inf, inf)
    (v,) = two({"m": Tensor(a[-1:])}, {"m": Tensor(b[-1:])}).values
    assert (v.num_differing, v.max_abs, v.rel_l2) == (1, 0.0, 0.0)


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int64", "uint64", "bfloat16", "float8_e4m3fn", "complex64"]
)
def test_every_kind_of_element(dtype: str) -> None:
    kind = numpy_dtype(dtype)
    a = np.array([0, 1, 1], kind)
    b = np.array([0, 1, 0], kind)
    (v,) = two({"m": Tensor(a)}, {"m": Tensor(b)}).values
    assert (v.num_differing, v.max_abs) == (1, 1.0)
    assert math.isclose(v.rel_l2, math.sqrt(0.5))


def test_equal_blocks_count_in_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large tensor is compared in blocks, most of which may be equal."""
    monkeypatch.setattr(diffing, "SLICE", 3)
    monkeypatch.setattr(diffing, "batches", lambda tensors: batches(tensors, 40))
    a = np.arange(1, 31, dtype="f4").reshape(5, 6)
    b = a.copy()
    b[4, 5] += 3
    (v,) = two({"m": Tensor(a)}, {"m": Tensor(b)}).values
    assert (v.num_differing, v.max_abs) == (1, 3.0)
    assert math.isclose(v.rel_l2, 3 / np.linalg.norm(b), rel_tol=1e-6)


def test_large_integers_do_not_lose_their_last_digit() -> None:
    a, b = np.array([2**62], "i8"), np.array([2**62 + 1], "i8")
    (v,) = two({"m": Tensor(a)}, {"m": Tensor(b)}).values
    assert v.max_abs == 1.0


def test_extras() -> None:
    a, b = memory(), memory()
    tensors = {"m": Tensor(np.ones(2, "f4"))}
    mesh = Mesh((("dp", 2),))
    extras = {"s": {"lr": [0.1, 0.2], "nan": math.nan, "gone": 1, "a": np.ones(3)}}
    other = {"s": {"lr": [0.1, 0.3], "nan": math.nan, "a": np.ones(3)}, "new": True}
    extras |= {"file": memory_file(b"x", 1), "log": memory_file(b"x", 0)}
    other |= {"file": memory_file(b"x", 1), "log": memory_file(b"xy", 0)}
    x = build(a, mesh, tensors, extras=extras, per_rank={"rng": ("fresh", [1, 2])})
    y = build(b, mesh, tensors, extras=other, per_rank={"rng": ("fresh", [1, 5])})
    opened = Checkpoint(a, x), Checkpoint(b, y)
    assert compare_checkpoints(*opened).extras == [
        ("s.lr[1]", "0.2", "0.3"),
        ("s.gone", "1", "-"),
        ("log", "BytesIO of 1 bytes, at 0", "BytesIO of 2 bytes, at 0"),
        ("new", "-", "True"),
        ("rank1.rng", "2", "5"),
    ]
    assert compare_checkpoints(*opened, only="s.lr*").extras == [("s.lr[1]", "0.2", "0.3")]


def test_only_a_pattern() -> None:
    a, b = np.zeros(3, "f4"), np.ones(3, "f4")
    pair = {"m.a": Tensor(a), "o.a": Tensor(a)}, {"m.a": Tensor(a), "o.a": Tensor(b)}
    assert two(*pair, only="m.*").identical
    assert not two(*pair).identical


@given(st.lists(st.integers(0, 5), max_size=4), st.integers(1, 40))
def test_blocks_cover_every_element_once_in_order(shape: list[int], most: int) -> None:
    seen = np.zeros(shape, int)
    order = np.arange(math.prod(shape)).reshape(shape)
    flat = []
    for box in blocks(tuple(shape), most):
        assert 0 < box.size <= most
        seen[box.within((0,) * len(shape))] += 1
        flat += order[box.within((0,) * len(shape))].reshape(-1).tolist()
    assert np.all(seen == 1)
    assert flat == sorted(flat)


def test_batches_are_bounded() -> None:
    shapes = [(), (100, 3), (7,), (1000,), (2, 2)]
    tensors = [TensorEntry(f"t{i}", "float32", s) for i, s in enumerate(shapes)]
    sizes = [sum(box.size * 4 for _, box in batch) for batch in batches(tensors, 1000)]
    assert max(sizes) <= 1000
    assert sum(sizes) == 4 * sum(math.prod(s) for s in shapes)


def test_a_column_cut_against_a_row_cut() -> None:
    values = np.random.default_rng(0).standard_normal((33, 17)).astype("f4")
    a, b = memory(), memory()
    mesh = Mesh((("dp", 4),))
    x = build(a, mesh, {"m": Tensor(values, Sharding((Cut(0, ("dp",)),)))})
    y = build(b, mesh, {"m": Tensor(values, Sharding((Cut(1, ("dp",)),)))})
    assert compare_checkpoints(Checkpoint(a, x), Checkpoint(b, y)).identical


def test_a_weight_that_is_tied_in_one_of_them(tmp_path: Path) -> None:
    """It differs in either order, though the first name's values are equal."""

    def saved(name: str, *, tied: bool) -> Checkpoint:
        model = torch.nn.ModuleDict(
            {n: torch.nn.Linear(3, 3, bias=False) for n in ("embed", "head")}
        )
        torch.nn.init.ones_(model["embed"].weight)
        if tied:
            model["head"].weight = model["embed"].weight
        holdfast.save(tmp_path / name, {"model": model}, step=1)
        return holdfast.open(tmp_path / name)

    tied, untied = saved("tied", tied=True), saved("untied", tied=False)
    for one, other in ((tied, untied), (untied, tied)):
        (found,) = compare_checkpoints(one, other).values
        assert found.name == "model.head.weight" and found.num_differing == 9
    assert compare_checkpoints(tied, saved("again", tied=True)).identical
