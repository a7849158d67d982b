"""Directories of Megatron-Core: names, and damage that is named.  Real ones: tests/system/distributed."""

from __future__ import annotations

import io
import json
import os
import shutil
import zipfile
from argparse import Namespace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from capabilities import ALONE
from holdfast.errors import Corrupt, FormatError, HoldfastError, NotFound, StateMismatch
from holdfast.formats.read.megatron.opening import open_megatron
from holdfast.formats.read.megatron.tensors import template, unfused
from holdfast.store import LocalStore

FOLDER = "iter_0000007"
LAYERS, EXPERTS = 3, 2


class Backend(Enum):
    """Pickled as a class of Megatron's, which is not here."""

    FLASH = 1


Backend.__module__, Backend.__qualname__ = "megatron.core.nowhere", "Backend"


@pytest.fixture(scope="module")
def saved() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    fc2 = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    return {
        "embedding.word_embeddings.weight": torch.randn(20, 4),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": torch.randn(LAYERS, 4),
        fc2: torch.randn(LAYERS, EXPERTS, 4, 6).bfloat16(),
        f"chained_1.optimizer.state.fp32_param.{fc2}": torch.randn(LAYERS, EXPERTS, 4, 6),
        f"chained_1.optimizer.state.exp_avg.{fc2}": torch.randn(LAYERS, EXPERTS, 4, 6),
        "decoder.final.linear_fc1.weight_w": torch.randn(5, 4),
        "decoder.final.linear_fc1.weight_v": torch.randn(5, 4),
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, saved: dict[str, Any]) -> Path:
    """A directory in the format of Megatron-Core, written by torch."""
    root = tmp_path_factory.mktemp("megatron")
    numbers = np.random.RandomState(0).get_state()
    objects = {
        "rng_state/shard_0.1_1.2": [{"np_rng_state": numbers, "torch": torch.arange(9)}],
        "decoder.layers.mlp._extra_state/shard_1_3": io.BytesIO(b"scales"),
    }
    archives = {name: [value] for name, value in objects.items()}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(saved | archives, checkpoint_id=root / FOLDER, planner=planner, **ALONE)
    common = {
        "iteration": 7,
        "args": Namespace(backend=Backend.FLASH, dtype=torch.bfloat16, path=Path("/data")),
        "optimizer": {
            0: {"optimizer": {"param_groups": [{"lr": 0.5, "betas": (0.9, 0.95), "step": 7}]}},
            1: {"optimizer": {"param_groups": []}, "grad_scaler": {"scale": torch.ones(1)}},
        },
    }
    write_common(root / FOLDER, common)
    kind = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (root / FOLDER / "metadata.json").write_text(json.dumps(kind))
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    return root


def write_common(folder: Path, common: dict[str, Any]) -> None:
    import sys
    import types

    sys.modules["megatron.core.nowhere"] = types.ModuleType("megatron.core.nowhere")
    sys.modules["megatron.core.nowhere"].Backend = Backend
    try:
        torch.save(common, folder / "common.pt")
    finally:
        del sys.modules["megatron.core.nowhere"]


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    return shutil.copytree(source, tmp_path / "copy")


def test_templates() -> None:
    assert template("decoder.layers.mlp.linear_fc1.weight") == (
        "decoder.layers.{}.mlp.linear_fc1.weight",
        1,
    )
    assert template("decoder.layers.3.mlp.linear_fc1.weight")[1] == 0
    stacked = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    alone = "decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc2.weight"
    assert template(stacked) == (alone, 2)
    numbered = "decoder.layers.3.mlp.experts.experts.1.linear_fc2.weight"
    assert template(numbered) == (alone.format(3, 1), 0)
    assert template("decoder.layers.mlp.shared_experts.linear_fc1.weight")[1] == 1
    assert template("{}.layers.{0:99}.x") == (".layers.{}.0:99.x", 1)


def test_norms_have_two_names() -> None:
    fused = "model.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    assert unfused([fused]) == {"model.decoder.layers.0.input_layernorm.weight": fused}


def test_stacks_are_taken_apart(source: Path, saved: dict[str, torch.Tensor]) -> None:
    fc2 = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    checkpoint = holdfast.open(source)
    for layer in range(LAYERS):
        norm = saved["decoder.layers.mlp.linear_fc1.layer_norm_weight"][layer].numpy()
        name = f"model.decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight"
        assert np.array_equal(checkpoint.read(name), norm)
        assert np.array_equal(
            checkpoint.read(f"model.decoder.layers.{layer}.pre_mlp_layernorm.weight"), norm
        )
        for expert in range(EXPERTS):
            live = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight"
            for key, name in (
                ("fp32_param", f"model.{live}"),
                ("exp_avg", f"optim.{live}.exp_avg"),
            ):
                whole = saved[f"chained_1.optimizer.state.{key}.{fc2}"][layer, expert].numpy()
                assert np.array_equal(checkpoint.read(name), whole)
                assert np.array_equal(checkpoint.read(name, ((1, 3), (2, 5))), whole[1:3, 2:5])
    halves = [saved[f"decoder.final.linear_fc1.weight_{h}"].numpy() for h in "wv"]
    assert np.array_equal(
        checkpoint.read("model.decoder.final.linear_fc1.weight"), np.concatenate(halves)
    )


def test_what_is_no_tensor(source: Path) -> None:
    extras = holdfast.open(source).extras
    kind = "megatron.core.nowhere.Backend"
    assert extras["args"].pop("backend") in (f"{kind}(1)", f"{kind}.FLASH")  # as Python pickles it
    assert extras["args"] == {"dtype": "bfloat16", "path": "/data"}
    (shard,) = extras["rng_state"]["shards"].values()
    assert np.array_equal(shard[0]["np_rng_state"][1], np.random.RandomState(0).get_state()[1])
    assert np.array_equal(shard[0]["torch"], np.arange(9))
    assert extras["extra_states"] == {"decoder.layers.1.mlp._extra_state": b"scales"}
    (group,) = extras["optim"]["param_groups"]
    assert (group["lr"], group["betas"]) == (0.5, (0.9, 0.95))
    assert set(group["params"]) == {
        f"decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc2.weight"
        for i in range(LAYERS)
        for e in range(EXPERTS)
    }


def test_places(source: Path, tmp_path: Path) -> None:
    for url in (source, source / FOLDER, f"megatron:{source}", f"megatron:{source / FOLDER}"):
        assert holdfast.open(url).step == 7
        assert holdfast.steps(url) == [7]
        assert holdfast.open(url, step=7).step == 7
        with pytest.raises(NotFound, match="7"):
            holdfast.open(url, step=6)
    with pytest.raises(NotFound, match="no megatron checkpoint"):
        holdfast.open(f"megatron:{tmp_path}")


def test_weights_load_into_a_module(source: Path, saved: dict[str, torch.Tensor]) -> None:
    class Gpt(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.ModuleDict({"word_embeddings": torch.nn.Embedding(20, 4)})

    live = Gpt()
    holdfast.load(source, {"model": live}, strict=False)
    weight = live.embedding["word_embeddings"].weight
    assert torch.equal(weight, saved["embedding.word_embeddings.weight"])
    with pytest.raises(StateMismatch, match=r"unexpected.*local_experts"):
        holdfast.load(source, {"model": live})


# -- what is wrong is named -----------------------------------------------------------------------


def read_all(root: Path) -> None:
    checkpoint = holdfast.open(root)
    for name in checkpoint.names():
        checkpoint.read(name)


def test_a_newer_iteration_that_is_not_there(copy: Path) -> None:
    (copy / "latest_checkpointed_iteration.txt").write_text("8")
    with pytest.raises(NotFound, match=r"iter_0000008.*iterations there: 7"):
        holdfast.open(copy)
    assert holdfast.open(copy, step=7).step == 7


def test_a_marker_that_names_no_iteration(copy: Path) -> None:
    """As when it is replaced between two looks: the error says what is there."""
    (copy / "latest_checkpointed_iteration.txt").write_text("soon")
    with pytest.raises(NotFound, match="names no iteration") as caught:
        open_megatron(LocalStore(copy))
    assert caught.value.hint == "iterations there: 7; name one"


def test_an_iteration_that_was_not_finished(copy: Path) -> None:
    (copy / FOLDER / "metadata.json").unlink()
    with pytest.raises(NotFound, match=r"metadata\.json"):
        holdfast.open(copy)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_missing_file(copy: Path, name: str) -> None:
    (copy / FOLDER / name).unlink()
    with pytest.raises(NotFound, match=name):
        holdfast.open(copy)


def test_missing_tensors(copy: Path) -> None:
    for path in (copy / FOLDER).glob("*.distcp"):
        path.unlink()
    with pytest.raises(NotFound, match="distcp"):
        read_all(copy)


@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp"])
def test_files_cut_short(copy: Path, name: str) -> None:
    whole = (copy / FOLDER / name).read_bytes()
    for keep in range(0, len(whole), max(1, len(whole) // 25)):
        (copy / FOLDER / name).write_bytes(whole[:keep])
        with pytest.raises((Corrupt, FormatError, NotFound)):
            read_all(copy)


@pytest.mark.parametrize("name", [".metadata", "common.pt", "metadata.json"])
def test_flipped_bytes_end_in_our_errors(copy: Path, name: str) -> None:
    path = copy / FOLDER / name
    whole = path.read_bytes()
    rng = np.random.RandomState(0)
    for at in rng.randint(0, len(whole), 60).tolist():
        path.write_bytes(whole[:at] + bytes([whole[at] ^ rng.randint(1, 256)]) + whole[at + 1 :])
        try:
            read_all(copy)
        except HoldfastError:
            pass


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_pickle_that_would_run_something(copy: Path, tmp_path: Path, name: str) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'mark'}",)

    torch.save({"iteration": 7, "args": Evil()}, copy / FOLDER / "common.pt")
    if name == ".metadata":
        import pickle

        (copy / FOLDER / name).write_bytes(pickle.dumps(Evil()))
        torch.save({"iteration": 7}, copy / FOLDER / "common.pt")
    with pytest.raises(FormatError, match=r"posix\.system") as caught:
        holdfast.open(copy)
    assert name in str(caught.value)
    assert not (tmp_path / "mark").exists()


def test_mixed_iterations(copy: Path) -> None:
    write_common(copy / FOLDER, {"iteration": 6})
    with pytest.raises(FormatError, match=r"iteration 7.*iteration 6"):
        holdfast.open(copy)


def test_another_backend(copy: Path) -> None:
    (copy / FOLDER / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(FormatError, match="zarr"):
        holdfast.open(copy)


def test_an_extra_state_of_an_unknown_class(copy: Path, saved: dict[str, Any]) -> None:
    """Its archive is kept as it is; the classes in it are not needed, and not called."""

    class Recipe:
        def __reduce__(self) -> Any:
            return os.system, ("exit 1",)

    name = "decoder.layers.mlp._extra_state/shard_0_3"
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(saved | {name: [Recipe()]}, checkpoint_id=copy / FOLDER, planner=planner, **ALONE)
    kept = holdfast.open(copy).extras["extra_states"]["decoder.layers.0.mlp._extra_state"]
    with zipfile.ZipFile(io.BytesIO(kept["archive"])) as archive:
        tree = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        assert b"exit 1" in archive.read(tree)
    read_all(copy)


def test_groups_that_cannot_be_told_apart(copy: Path) -> None:
    """Two learning rates and nothing that says whose: the optimizer is not restored by guess."""
    groups = [{"lr": 0.1, "lr_mult": m, "wd_mult": 1.0} for m in (1.0, 0.5)]
    write_common(copy / FOLDER, {"iteration": 7, "optimizer": {"param_groups": groups}})
    checkpoint = holdfast.open(copy)
    assert "optim" not in checkpoint.extras
    assert [g["lr_mult"] for g in checkpoint.extras["optimizer_groups"]] == [1.0, 0.5]
