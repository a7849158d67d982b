"""The folder of one step by itself: everything that reads takes it for a root of that step."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from builders import FSDP_TP, build, transformer
from cli.calling import call, call_json
from holdfast.core.checkpoint.lone import LoneStep, as_root, root_at
from holdfast.errors import NotFound, NotRecoverable, UsageError
from holdfast.store import LocalStore, MemoryStore

NAME = "model.h.0.attn.wo.weight"


@pytest.fixture
def only(tmp_path: Path) -> Path:
    """Step 25 of a run, moved out of it under another name."""
    run = LocalStore(tmp_path / "run")
    build(run, FSDP_TP, transformer(seed=24), step=24)
    build(run, FSDP_TP, transformer(seed=25), step=25, extras={"epoch": 3})
    return Path(shutil.move(tmp_path / "run/steps/0000000025", tmp_path / "only"))


def test_it_is_opened_and_read(only: Path) -> None:
    assert holdfast.steps(only) == [25]
    for step in (None, 25):
        with holdfast.open(only, step=step) as c:
            assert (c.step, c.format, c.extras) == (25, "holdfast", {"epoch": 3})
            assert np.array_equal(c.read(NAME), transformer(seed=25)[NAME].values)
    with pytest.raises(NotFound, match="no step 24"):
        holdfast.open(only, step=24)


def test_every_verb_that_reads_takes_it(only: Path, tmp_path: Path) -> None:
    code, found = call_json("ls", only)
    assert code == 0 and [s["step"] for s in found["steps"]] == [25]
    assert call("inspect", only)[1].startswith("step 25\n")
    code, found = call_json("verify", only)
    assert (code, found["step"], found["good"]) == (0, 25, True)
    assert call("diff", only, only)[0] == 0
    assert call("plan", only, "--mesh", "dp=2")[0] == 0
    assert call("log", only)[0] == 0
    assert call("verify", f"{only}@25")[0] == 0
    assert call("convert", only, tmp_path / "w.safetensors", "--to", "safetensors")[0] == 0
    assert call("copy", only, tmp_path / "back")[0] == 0
    assert call_json("verify", tmp_path / "back")[1]["step"] == 25


def test_damage_in_it_is_found(only: Path) -> None:
    (path,) = only.glob("*/r00001.safetensors")
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    code, out, _ = call("verify", only)
    assert code == 1 and "r00001.safetensors  bytes 0.." in out
    path.unlink()
    assert "r00001.safetensors is missing" in call("ls", only)[1]


def test_it_is_loaded(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    holdfast.save(tmp_path / "run", {"model": model}, step=7)
    fresh = torch.nn.Linear(3, 3)
    assert holdfast.load(tmp_path / "run/steps/0000000007", {"model": fresh}) == 7
    assert torch.equal(fresh.weight, model.weight)


def test_nothing_is_written_into_it(only: Path) -> None:
    before = sorted(only.rglob("*"))
    code, _, err = call("pin", only, 25, "best")
    assert code == 2 and "the folder of a single step" in err
    assert call_json("prune", only, "--keep-last", 1)[1]["gone"] == []
    with pytest.raises(UsageError, match="only reads it"):
        root_at(only).put("steps/0000000025/x", b"")
    assert sorted(only.rglob("*")) == before


def test_a_step_with_an_index_is_ours_too(only: Path, tmp_path: Path) -> None:
    """A consolidated step has the files of a Hugging Face checkpoint, and extras besides."""
    assert call("convert", only, tmp_path / "whole")[0] == 0
    (step,) = (tmp_path / "whole/steps").glob("0*")
    with holdfast.open(step) as c:
        assert (c.format, c.step, c.extras) == ("holdfast", 25, {"epoch": 3})
    with holdfast.open(f"huggingface:{step}") as c:
        assert c.format == "huggingface"


def test_in_a_bucket_the_folder_has_the_name_of_a_step() -> None:
    whole, alone = MemoryStore("lone/root"), MemoryStore("lone/steps/0000000025")
    build(whole, FSDP_TP, transformer(), step=25)
    for key in whole.list():
        alone.put(key.removeprefix("steps/0000000025/"), whole.get(key))
    assert isinstance(as_root(alone), LoneStep)
    with holdfast.open(alone.url) as c:
        assert (c.step, c.format) == (25, "holdfast")
        assert np.array_equal(c.read(NAME), transformer()[NAME].values)
    other = MemoryStore("lone/other")
    other.put("manifest.json", alone.get("manifest.json"))
    assert as_root(other) is other


def test_another_manifest_is_none_of_ours(tmp_path: Path) -> None:
    for text in ("", "{}", '{"version": 3}' * 20):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(NotRecoverable, match="no checkpoint in"):
            holdfast.open(tmp_path)
