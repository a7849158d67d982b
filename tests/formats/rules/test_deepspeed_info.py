"""DeepSpeed's universal_checkpoint_info against DeepSpeed's own merging of the same slices."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import RuleError
from holdfast.formats.rules.deepspeed import Slices

torch = pytest.importorskip("torch")
VOCABULARY = 50


def merged_by_deepspeed(
    info: dict[str, Any], slices: dict[str, list[Any]], folder: Path
) -> dict[str, Any]:
    """What ds_to_universal makes of each parameter's slices, None if it refuses."""
    ds = pytest.importorskip("deepspeed.checkpoint.ds_to_universal")
    found = {}
    for name, parts in slices.items():
        for rank, part in enumerate(parts):
            for state in ("fp32", "exp_avg", "exp_avg_sq"):
                path = folder / "slices" / name / str(rank) / f"{state}.00"
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.save(part.reshape(-1), path)
        shapes = [tuple(p.shape) for p in parts]
        arguments = (info, str(folder / "out"), str(folder / "slices"), len(parts), (name, shapes))
        try:
            ds.merge_tp_slices(*arguments)
        except (AssertionError, RuntimeError, KeyError, IndexError, NotImplementedError):
            found[name] = None
            continue
        made = torch.load(folder / "out" / name / "fp32.pt", weights_only=False)
        found[name] = made["param"].numpy()
    return found


def merged(found: Slices, name: str, slices: list[Any]) -> np.ndarray:
    """The same by fragments; the mean of what is averaged."""
    whole = np.full(found.shape(name), np.nan, np.float32)
    replica = found.replica(name)
    stored = [s.numpy() for s in slices]
    if replica == "averaged":
        stored = [sum(stored) / len(stored)] * len(stored)
    for rank, array in enumerate(stored):
        flat = np.ascontiguousarray(array).reshape(-1)
        for f in found.view(name, rank).fragments():
            strides = [s * flat.itemsize for s in f.strides]
            part = np.lib.stride_tricks.as_strided(flat[f.offset :], f.box.shape, strides)
            whole[f.box.within((0,) * whole.ndim)] = part * f.scale
    return whole


def numbered(shape: tuple[int, ...], first: int) -> Any:
    return torch.arange(first, first + prod(shape), dtype=torch.float32).reshape(shape)


def slices_of(shapes: list[tuple[int, ...]], same: bool = False) -> list[Any]:
    return [numbered(s, 0 if same else 1000 * r) for r, s in enumerate(shapes)]


INFO: dict[str, Any] = {
    "universal_checkpoint_version": 0.4,
    "original_vocab_size": VOCABULARY,
    "tp_replicated_parameter_patterns": [r".*norm", r"position"],
    "parameter_to_average_patterns": [r".*alibi$"],
    "parameter_with_row_parallelism_patterns": [r"\d+\.dense\.weight", r"embed_row"],
    "vocabulary_parameter_patterns": [r"embed", r"position"],
    "parameter_with_2_sub_params_cat_dim_0": [r"\d+\.swiglu"],
    "parameter_with_sub_params": [
        {"patterns": [r"\d+\.qkv"], "shape": [(16, 4, 5), -1], "partition_dim": 0},
        {"patterns": [r"\d+\.experts"], "shape": [3, (6,), 4], "partition_dim": 1},
    ],
    "sub_param_shard_widths": {
        r"\d+\.qkv": [[8, 8], [2, 2], [3, 2]],
        r"\d+\.experts": [[4, 2]],
    },
}
SLICES = {
    "0.norm.weight": slices_of([(8,)] * 2, same=True),
    "1.norm.weight": slices_of([(8,)] * 2, same=True),
    "0.alibi": slices_of([(8, 2)] * 2),
    "0.dense.weight": slices_of([(8, 3)] * 2),
    "1.dense.weight": slices_of([(8, 4), (8, 2)]),
    "embed.weight": slices_of([(32, 4)] * 2),
    "embed_row.weight": slices_of([(64, 4)] * 2),
    "position.weight": slices_of([(64, 4)] * 2, same=True),
    "0.swiglu.weight": slices_of([(8, 4), (6, 4)]),
    "0.qkv.weight": slices_of([(13, 3), (12, 3)]),
    "0.qkv.bias": slices_of([(13,), (12,)]),
    "0.experts.weight": slices_of([(12, 4), (6, 4)]),
    "0.other": slices_of([(5, 3), (2, 3)]),
    "0.vector": slices_of([(5,), (5,)]),
}


def shapes(slices: dict[str, list[Any]]) -> dict[str, list[tuple[int, ...]]]:
    return {name: [tuple(s.shape) for s in some] for name, some in slices.items()}


def test_every_category_gives_what_deepspeed_gives(tmp_path: Path) -> None:
    found = Slices(INFO, shapes(SLICES))
    found.check()
    expected = merged_by_deepspeed(INFO, SLICES, tmp_path)
    for name, slices in SLICES.items():
        whole = expected[name]
        assert whole is not None, name
        assert np.array_equal(merged(found, name, slices), whole.reshape(found.shape(name))), name
        if name not in ("0.experts.weight", "0.qkv.bias"):  # DeepSpeed keeps the shape of the view
            assert found.shape(name) == whole.shape, name
    replicas = {name: found.replica(name) for name in SLICES}
    assert {n for n, r in replicas.items() if r == "averaged"} == {"0.alibi"}
    assert {n for n, r in replicas.items() if r == "replicated"} == {
        "0.norm.weight", "1.norm.weight", "position.weight",
    }  # fmt: skip


def test_it_is_text_that_can_be_read_and_kept() -> None:
    text = Slices(INFO, shapes(SLICES)).text.split("\n")
    assert "*.norm.weight  replicated" in text
    assert "embed.weight  unique, padded 0 from 50 to 64, shard 0 over tp" in text
    assert "0.qkv.bias  unique, fused 0 (16, 4, 5), shard 0 over tp" in text
    assert (
        "0.experts.weight  unique, fused 0 (6, 6, 6), shard 0 over tp widths (4, 2) (4, 2) (4, 2)"
        in text
    )
    assert "1.dense.weight  unique, shard 1 over tp widths (4, 2)" in text


@st.composite
def cases(draw) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """A parameter in some categories, with metadata that may be wrong."""
    tp = draw(st.integers(1, 3))
    ndim = draw(st.integers(1, 2))
    dim = draw(st.integers(0, ndim - 1))
    other = draw(st.integers(1, 4))
    lengths = [draw(st.integers(1, 6)) for _ in range(tp)]
    if draw(st.booleans()):
        lengths = [lengths[0]] * tp
    made = [tuple(n if d == dim else other for d in range(ndim)) for n in lengths]
    info: dict[str, Any] = {"original_vocab_size": draw(st.integers(1, 12))}
    for key in ("tp_replicated_parameter_patterns", "parameter_to_average_patterns",
                "parameter_with_row_parallelism_patterns", "vocabulary_parameter_patterns",
                "parameter_with_2_sub_params_cat_dim_0"):  # fmt: skip
        info[key] = ["w"] if draw(st.integers(0, 3)) == 0 else []
    if ndim == 1:  # DeepSpeed indexes a vocabulary by two dims
        info["vocabulary_parameter_patterns"] = []
    if draw(st.booleans()):
        count = draw(st.integers(1, 3))
        shape: list[Any] = [other] * ndim
        if draw(st.booleans()):
            info["universal_checkpoint_version"] = 0.4
            cuts = [sorted(draw(st.integers(0, n)) for _ in range(count - 1)) for n in lengths]
            widths = [[b - a for a, b in zip([0, *c], [*c, n])] for c, n in zip(cuts, lengths)]
            by_part = [list(w) for w in zip(*widths)]
            info["sub_param_shard_widths"] = {"w": by_part}
            shape[dim] = tuple(map(sum, by_part))
        else:
            shape[dim] = count
        info["parameter_with_sub_params"] = [
            {"patterns": ["w"], "shape": shape, "partition_dim": dim}
        ]
    same = bool(info["tp_replicated_parameter_patterns"])
    return info, {"w": slices_of(made, same=same)}


@settings(max_examples=150, deadline=None)
@given(cases())
def test_whatever_deepspeed_merges_is_merged_alike(case) -> None:
    info, slices = case
    with TemporaryDirectory() as folder:
        expected = merged_by_deepspeed(info, slices, Path(folder))["w"]
    try:
        found = Slices(info, shapes(slices))
        found.check()
    except RuleError:
        assert expected is None or len({tuple(s.shape) for s in slices["w"]}) > 1
        return
    if expected is not None:
        assert np.array_equal(merged(found, "w", slices["w"]), expected)


# -- affine maps ----------------------------------------------------------------------------------


def maps() -> dict[str, tuple[Any, bool]]:
    """Of each kind that DeepSpeed makes; whether ranks share rows."""
    affine = pytest.importorskip("deepspeed.checkpoint.affine")
    blocks = {0: [0, 3, 1], 1: [2, 4, 5]}
    return {
        "replicated": (affine.replicated_map((6, 4), 2), True),
        "scaled": (affine.replicated_map((6,), 2, scale=0.5), True),
        "rows": (affine.contiguous_split_map((7, 4), [4, 3], 0), False),
        "columns": (affine.contiguous_split_map((4, 6), [4, 2], 1), False),
        "none on one": (affine.contiguous_split_map((4, 2), [4, 0], 0), False),
        "sub": (affine.sub_param_map((10, 2), [6, 4], [[4, 2], [2, 2]], 0), False),
        "sub columns": (affine.sub_param_map((2, 10), [6, 4], [[4, 2], [2, 2]], 1), False),
        "segments": (affine.segmented_map((10, 2), [(6, False), (4, True)], 0, 2, [[4, 2]]), True),
        "blocks": (affine.block_gather_map((12, 2), blocks, 2, 0), False),
    }


@pytest.mark.parametrize("state", ["param", "exp_avg"])
def test_affine_maps_give_what_deepspeed_gives(state) -> None:
    for name, (made, _) in maps().items():
        if name == "scaled" and state != "param":
            continue
        whole = numbered(made.logical_shape, 1)
        slices = [made.extract(whole, r) for r in range(2)]
        info = {"affine_map": {"version": 1, "params": {f"^{re.escape(name)}$": made.to_dict()}}}
        found = Slices(info, {name: [tuple(s.shape) for s in slices]})
        found.check()
        assert np.array_equal(merged(found, name, slices), whole.numpy()), name
        assert found.replica(name) == (
            "replicated" if name in ("replicated", "scaled") else "unique"
        )


def test_scales_of_maps_go_by_the_state() -> None:
    info = {"affine_map": {"version": 1, "params": {"scaled": maps()["scaled"][0].to_dict()}}}
    found = Slices(info, {"scaled": [(6,), (6,)]})
    scales = [found.view("scaled", 0, state=s).scale for s in ("param", "exp_avg", "exp_avg_sq")]
    assert scales == [2, 1 / 2, 1 / 4]
    with pytest.raises(RuleError, match="what that means for state 'momentum' is not known"):
        found.view("scaled", 0, state="momentum")


# -- what is refused ------------------------------------------------------------------------------

AFFINE = {"logical_shape": [4], "ranks": {0: {"shard_shape": [4], "pieces": []}}}


@pytest.mark.parametrize(
    ("info", "made", "message"),
    [
        ({"tp_replicated_parameter_patterns": ["w", "."]}, [(2,)], "several of tp_replicated"),
        ({"tp_replicated_parameter_patterns": ["w"]}, [(2,), (3,)], "copies of different shapes"),
        ({"tp_replicated_parameter_patterns": ["(a+)+b"]}, [(2,)], "may take for ever"),
        ({"tp_replicated_parameter_patterns": ["("]}, [(2,)], "not a regular expression"),
        ({"tp_replicated_parameter_patterns": 3}, [(2,)], "cannot be understood"),
        ({"parameter_with_row_parallelism_patterns": ["w"]}, [(2,), (2,)], "along its second"),
        ({"vocabulary_parameter_patterns": ["w"]}, [(2, 2)], "no original_vocab_size"),
        ({}, [(2, 2), (2, 3)], "differ in other dims than 0"),
        ({}, [(), ()], "scalars of 2 ranks"),
        ({"autotp_unsupported_parameter_patterns": {"^w$": "it is odd"}}, [(2,)], "it is odd"),
        ({"parameter_with_sub_params": [{"patterns": ["w"]}]}, [(2,)], "cannot be understood"),
        ({"parameter_with_sub_params": [{"patterns": ["w"], "shape": [3], "partition_dim": 0}]},
         [(2,), (2,)], "4 does not divide into 3 sub-parameters"),
        ({"parameter_with_2_sub_params_cat_dim_0": ["w"]}, [(1,), (3,)], "do not halve"),
        ({"affine_map": {"version": 2}}, [(2,)], "affine maps of version 2"),
        ({"affine_map": {"params": {"w": AFFINE}}}, [(4,)], "says (0,)"),
        ({"affine_map": {"params": {"w": {**AFFINE, "ranks": {}}}}}, [(4,)], "has no rank 0"),
        ({"affine_map": {"params": {"w": []}}}, [(4,)], "cannot be understood"),
    ],
)  # fmt: skip
def test_info_that_does_not_fit_is_refused(info, made, message) -> None:
    with pytest.raises(RuleError) as error:
        Slices(info, {"w": made}).check()
    assert message in str(error.value)


def test_names_with_signs_of_the_language_are_names() -> None:
    odd = ["a*b", "a{x}", "a b", "a#b", "a/b", "h.0.w", "h.1.w", "h.x.w"]
    found = Slices({"tp_replicated_parameter_patterns": [r"h\.1"]}, {n: [(2,)] for n in odd})
    assert {n: found.rules.match(n).rule.replica for n in odd} == {
        **dict.fromkeys(odd, "unique"), "h.1.w": "replicated",
    }  # fmt: skip
    with pytest.raises(RuleError, match="is no name of a parameter"):
        Slices({}, {"a\nb": [(2,)]})
