"""Optimizers that Megatron-Core stores in buckets: what is proved, and what is refused.  Real ones:
tests/system/distributed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from capabilities import ALONE
from holdfast.errors import FormatError, StateMismatch

FOLDER = "iter_0000007"
KEY = "optimizer.distributed.dp_group_idx_0"
BUCKET = f"{KEY}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
SHAPES = {
    "embedding.word_embeddings.weight": (50, 4),
    "decoder.layers.0.input_layernorm.weight": (20,),
    "decoder.layers.0.mlp.linear_fc1.weight": (100, 4),
    "decoder.layers.0.pre_mlp_layernorm.weight": (20,),
    "output_layer.weight": (50, 4),
}
Tensors = dict[str, torch.Tensor]


def padded(number: int) -> int:
    return -(-number // 64) * 64


def buckets(masters: Tensors, order: list[str]) -> tuple[Tensors, dict[str, int]]:
    """Flat tensors by state, and where each weight begins; between them is what happens to be there."""
    at, starts = 0, {}
    for name in order:
        starts[name] = at = padded(at)
        at += masters[name].numel()
    found = {s: torch.full((at,), 0.25) for s in ("param", "exp_avg", "exp_avg_sq")}
    for i, flat in enumerate(found.values()):
        for name, start in starts.items():
            flat[start : start + masters[name].numel()] = masters[name].flatten() * (1, 3, 5)[i]
    return found, starts


def write(root: Path, tensors: Tensors, objects: dict[str, Any] | None = None) -> None:
    group = {"lr": 0.5, "step": 7.0, "wd_mult": 1.0}
    saved = {f"{KEY}.optimizer/shard_0_1": {"param_groups": [group, group | {"wd_mult": 0.0}]}}
    archives = {name: [value] for name, value in (saved | (objects or {})).items()}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(tensors | archives, checkpoint_id=root / FOLDER, planner=planner, **ALONE)
    torch.save({"iteration": 7}, root / FOLDER / "common.pt")
    kind = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (root / FOLDER / "metadata.json").write_text(json.dumps(kind))
    (root / "latest_checkpointed_iteration.txt").write_text("7")


@pytest.fixture
def masters() -> Tensors:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def half(masters: Tensors) -> Tensors:
    return {name: t.bfloat16() for name, t in masters.items()}


def by_bucket(found: Tensors) -> Tensors:
    return {f"{BUCKET}.{state}": flat for state, flat in found.items()}


def is_read(root: Path, masters: Tensors) -> None:
    with holdfast.open(root) as checkpoint:
        assert len(checkpoint.manifest.tensors) == 3 * len(masters)
        for name, master in masters.items():
            assert np.array_equal(checkpoint.read(f"model.{name}"), master.numpy())
            for state, factor in (("exp_avg", 3), ("exp_avg_sq", 5)):
                found = checkpoint.read(f"optim.{name}.{state}")
                assert np.array_equal(found, master.numpy() * factor)


def refused(root: Path, match: str) -> None:
    """Weights are there in 16 bit, the optimizer is not, and an error says why and what to do."""
    with holdfast.open(root) as checkpoint:
        assert {t.dtype for t in checkpoint.manifest.tensors} == {"bfloat16"}
        assert "optim" not in checkpoint.extras
        assert [g["wd_mult"] for g in checkpoint.extras["optimizer_groups"]] == [1.0, 0.0]
    net = torch.nn.Module()
    net.embedding = torch.nn.Module()
    net.embedding.word_embeddings = torch.nn.Embedding(50, 4, dtype=torch.bfloat16)
    state = {"model": net}
    holdfast.load(root, state, strict=False)
    with pytest.raises(StateMismatch, match=match) as caught:
        holdfast.load(root, state | {"optim": torch.optim.AdamW(net.parameters())})
    assert "--dist-ckpt-optim-fully-reshardable" in str(caught.value)


def test_any_order(tmp_path: Path, masters: Tensors) -> None:
    """Where values tell, the order does not matter."""
    for number, order in enumerate((list(SHAPES), sorted(SHAPES), sorted(SHAPES, reverse=True))):
        found, _ = buckets(masters, order)
        write(tmp_path / str(number), half(masters) | by_bucket(found))
        is_read(tmp_path / str(number), masters)


def test_buckets_end_to_end(tmp_path: Path, masters: Tensors) -> None:
    """`dp_zero_gather_scatter`: aligned from where each bucket began, which is not said."""
    first, second = list(SHAPES)[3:], list(SHAPES)[:3]
    ends = [buckets(masters, order)[0] for order in (first, second)]
    both = {state: torch.cat([one[state] for one in ends]) for state in ends[0]}
    assert ends[0]["param"].numel() % 64
    key = (torch.bfloat16, torch.float32)
    state = {"buckets_coalesced": True, 0: {key: both | {"numel_unpadded": both["param"].numel()}}}
    write(tmp_path, half(masters), {f"{KEY}.param_state/shard_0_1": state})
    is_read(tmp_path, masters)


def test_a_bucket_that_is_not_contiguous_is_refused(tmp_path: Path, masters: Tensors) -> None:
    """Megatron writes none.  Its elements would be read from between the others."""
    found, _ = buckets(masters, list(SHAPES))
    strided = found | {"exp_avg": torch.stack([found["exp_avg"], found["exp_avg"] + 1], 1)[:, 0]}
    state = {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): strided}}
    write(tmp_path, half(masters), {f"{KEY}.param_state/shard_0_1": state})
    with pytest.raises(FormatError, match=r"'.*param_state\.0\.exp_avg': strides \(2,\)"):
        holdfast.open(tmp_path)


def test_a_weight_that_is_not_trained(tmp_path: Path, masters: Tensors) -> None:
    frozen = "decoder.layers.0.mlp.linear_fc1.weight"
    found, _ = buckets(masters, [name for name in SHAPES if name != frozen])
    write(tmp_path, half(masters) | by_bucket(found))
    with holdfast.open(tmp_path) as checkpoint:
        assert checkpoint.info(f"model.{frozen}").dtype == "bfloat16"
        assert f"optim.{frozen}.exp_avg" not in checkpoint.names()
        assert len(checkpoint.manifest.tensors) == 3 * len(SHAPES) - 2


def test_norms_that_are_equal(tmp_path: Path, masters: Tensors) -> None:
    """By the order of the modules, which Megatron's buckets have reversed."""
    norms = [name for name in SHAPES if "norm" in name]
    for i, name in enumerate(norms):
        masters[name] = 1 + (i + 1) * torch.full((20,), 1e-5)
    found, _ = buckets(masters, list(reversed(SHAPES)))
    write(tmp_path, half(masters) | by_bucket(found))
    is_read(tmp_path, masters)


def test_other_weights_that_are_equal(tmp_path: Path, masters: Tensors) -> None:
    masters["output_layer.weight"] = masters["embedding.word_embeddings.weight"] * (1 + 1e-6)
    found, _ = buckets(masters, list(reversed(SHAPES)))
    write(tmp_path, half(masters) | by_bucket(found))
    refused(tmp_path, r"embedding.*output_layer.*are equal")


def test_fewer_equal_norms_than_layers_have(tmp_path: Path, masters: Tensors) -> None:
    """One of them is not trained: which, cannot be known."""
    norms = [name for name in SHAPES if "norm" in name]
    masters |= {name: torch.ones(20) for name in norms}
    for frozen in norms:
        found, _ = buckets(masters, [name for name in SHAPES if name != frozen])
        write(tmp_path / frozen, half(masters) | by_bucket(found))
        refused(tmp_path / frozen, r"input_layernorm.*pre_mlp_layernorm.*are equal")


def test_masters_of_other_weights(tmp_path: Path, masters: Tensors) -> None:
    found, starts = buckets(masters, list(SHAPES))
    found["param"][starts["output_layer.weight"]] += 1
    write(tmp_path, half(masters) | by_bucket(found))
    refused(tmp_path, rf"no weight of the model is what lies at element .* of '{KEY}")


def test_a_difference_between_the_ends(tmp_path: Path, masters: Tensors) -> None:
    """Found when something of the weight is read, whatever state it is."""
    found, starts = buckets(masters, list(SHAPES))
    found["param"][starts["decoder.layers.0.mlp.linear_fc1.weight"] + 200] += 1
    write(tmp_path, half(masters) | by_bucket(found))
    with holdfast.open(tmp_path) as checkpoint:
        for name in ("model.{}", "optim.{}.exp_avg", "optim.{}.exp_avg_sq"):
            checkpoint.read(name.format("output_layer.weight"))
            with pytest.raises(FormatError, match=r"linear_fc1.*although their ends are"):
                checkpoint.read(name.format("decoder.layers.0.mlp.linear_fc1.weight"))


def test_a_bucket_of_other_states(tmp_path: Path, masters: Tensors) -> None:
    found, _ = buckets(masters, list(SHAPES))
    found["exp_avg"] = found["exp_avg"][1:].clone()
    write(tmp_path, half(masters) | by_bucket(found))
    with pytest.raises(FormatError, match="states of"):
        holdfast.open(tmp_path)
