"""Every verb on checkpoints of DCP, Hugging Face and torch.save: text, JSON and exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import holdfast
from capabilities import ALONE
from cli.calling import call, call_json

KINDS = ("dcp", "huggingface", "torch")


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {f"h.{i}.w": torch.randn(8, 6) for i in range(3)}
    return found | {"head": torch.randn(6, 4).t()}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model as each format has it."""
    top = tmp_path_factory.mktemp("places")
    plain = {n: t.contiguous() for n, t in tensors().items()}
    dcp.save({"model": plain, "epoch": 3}, checkpoint_id=top / "dcp", **ALONE)
    (top / "huggingface").mkdir()
    save_file(plain, top / "huggingface/model.safetensors")
    torch.save({"model": tensors(), "epoch": 3, "global_step": 12}, top / "run.pt")
    return {k: top / k for k in ("dcp", "huggingface")} | {"torch": top / "run.pt"}


@pytest.mark.parametrize("kind", KINDS)
def test_ls(places: dict[str, Path], kind: str) -> None:
    step = 12 if kind == "torch" else 0
    for url in (places[kind], f"{kind}:{places[kind]}"):
        code, out, _ = call("ls", url)
        assert code == 0 and kind in out and "can be opened" in out and "672 B" in out
        code, found = call_json("ls", url)
        assert code == 0 and found["format"] == kind
        row = {"step": step, "bytes": 672, "num_tensors": 4, "num_files": 1, "problem": None}
        assert found["steps"] == [row]


@pytest.mark.parametrize("kind", KINDS)
def test_inspect(places: dict[str, Path], kind: str) -> None:
    found_in = {"dcp": "__0_0.distcp", "huggingface": "model.safetensors", "torch": "run.pt"}
    code, out, _ = call("inspect", places[kind])
    assert code == 0 and "model.h.{0..2}.w" in out and f"format    {kind}" in out
    assert "created" not in out and "rank" not in out
    code, out, _ = call("inspect", f"{kind}:{places[kind]}", "model.head")
    assert code == 0 and "unique" in out and f"│ {found_in[kind]}" in out
    code, found = call_json("inspect", places[kind], "model.head")
    ((path, at),) = found["parts"][0]["places"]
    folder = places[kind] if places[kind].is_dir() else places[kind].parent
    data = (folder / path).read_bytes()[at : at + 96]
    stored = tensors()["head"].t() if kind == "torch" else tensors()["head"]
    assert data == stored.contiguous().numpy().tobytes()
    code, found = call_json("inspect", places[kind])
    assert found["format"] == kind and found["files"][0]["parts"] == 4


@pytest.mark.parametrize("kind", KINDS)
def test_verify(places: dict[str, Path], kind: str) -> None:
    code, out, _ = call("verify", places[kind])
    assert code == 0 and "no fault found" in out
    assert ("CRC-32" in out) == (kind != "huggingface")
    assert ("a changed bit cannot be found" in out) == (kind == "huggingface")
    code, found = call_json("verify", places[kind], "--quick")
    assert code == 0 and found["good"] and found["not_checked"]


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_verify_finds_a_flipped_bit(places: dict[str, Path], kind: str, tmp_path: Path) -> None:
    source = places[kind]
    target = tmp_path / source.name
    data = {f.name: f.read_bytes() for f in (source.iterdir() if source.is_dir() else [source])}
    name = next(n for n in data if n.endswith((".distcp", ".pt")))
    _, found = call_json("inspect", source, "model.h.1.w")
    flipped = bytearray(data[name])
    flipped[found["parts"][0]["places"][0][1] + 5] ^= 16
    data[name] = bytes(flipped)
    folder = target if source.is_dir() else tmp_path
    folder.mkdir(exist_ok=True)
    for n, value in data.items():
        (folder / n).write_bytes(value)
    code, out, _ = call("verify", target)
    assert code == 1 and "damaged" in out and name in out and "CRC-32" in out
    assert "can be read" not in out


def test_verify_finds_what_is_cut_short(places: dict[str, Path], tmp_path: Path) -> None:
    for file in places["dcp"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (data,) = tmp_path.glob("*.distcp")
    os.truncate(data, data.stat().st_size - 2000)
    for quick in ([], ["--quick"]):
        code, out, _ = call("verify", tmp_path, *quick)
        assert code == 1 and data.name in out


def test_diff_across_formats(places: dict[str, Path]) -> None:
    for a in KINDS:
        for b in KINDS:
            code, found = call_json("diff", places[a], f"{b}:{places[b]}", "--only", "model.*")
            assert code == 0 and found["identical"] and found["num_equal"] == 4
    assert "torch checkpoint" in call("diff", places["dcp"], places["torch"])[1]


@pytest.mark.parametrize("kind", KINDS)
def test_plan(places: dict[str, Path], kind: str) -> None:
    code, out, _ = call("plan", places[kind], "--mesh", "dp=2")
    assert code == 0 and f"from a {kind} checkpoint to dp 2" in out
    _, found = call_json("plan", places[kind], "--mesh", "dp=2")
    assert [r["wanted_bytes"] for r in found["ranks"]] == [336, 336]


@pytest.mark.parametrize("kind", KINDS)
def test_prune_is_refused(places: dict[str, Path], kind: str) -> None:
    code, _, error = call("prune", places[kind], "--keep-last", "1")
    assert code == 2 and "only reads" in error and places[kind].exists()


def test_steps_of_our_own_win(places: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(
        (places["huggingface"] / "model.safetensors").read_bytes()
    )
    assert call_json("ls", tmp_path)[1]["format"] == "huggingface"
    holdfast.save(tmp_path, {"x": np.ones(3)}, step=9)
    assert call_json("ls", tmp_path)[1]["newest"] == 9
    assert holdfast.steps(tmp_path) == [9]
    assert call_json("ls", f"huggingface:{tmp_path}")[1]["format"] == "huggingface"


def test_typing_errors(places: dict[str, Path]) -> None:
    top = places["dcp"].parent
    for args, code, message in (
        (("inspect", f"trch:{places['torch']}"), 2, "did you mean 'torch'?"),
        (("inspect", f"dcp:{places['huggingface']}"), 1, "looks like huggingface"),
        (("verify", f"dcp:{top}/dpc"), 1, "did you mean 'dcp'?"),
        (("inspect", top / "hugingface"), 1, "did you mean 'huggingface'?"),
        (("inspect", f"{places['torch']}@7"), 1, "of step 12; it has no step 7"),
        (("inspect", f"{places['dcp']}@7"), 1, "it has no step 7"),
        (("inspect", "torch:"), 2, "names a format and no path"),
        (("inspect", places["torch"], "model.haed"), 2, "did you mean 'model.head'"),
    ):
        found = call(*args)
        assert found[0] == code and message in found[2], (args, found)


@pytest.mark.parametrize("kind", KINDS)
def test_without_torch(places: dict[str, Path], kind: str) -> None:
    code = (
        "import sys; from holdfast.cli.main import run\n"
        "for verb, *options in ['ls'], ['inspect'], ['verify'], ['plan', '--mesh', 'dp=2']:\n"
        "    assert not run([verb, sys.argv[1], *options]), verb\n"
        "    assert 'torch' not in sys.modules, verb"
    )
    command = [sys.executable, "-c", code, str(places[kind])]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
