"""`holdfast copy`: what it prints, its JSON, its exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from builders import FSDP_TP, build, transformer
from cli.calling import call, call_json
from holdfast.core.checkpoint.names import committed
from holdfast.core.checkpoint.verifying import verify
from holdfast.store import LocalStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    for step in (10, 20, 30):
        build(LocalStore(path), FSDP_TP, transformer(seed=step), step=step)
    return path


def steps_in(path: Path) -> list[int]:
    return sorted(s.step for s in committed(LocalStore(path)))


def test_the_newest_step(root: Path, tmp_path: Path) -> None:
    code, out, _ = call("copy", root, tmp_path / "other")
    assert code == 0
    assert "copied  step 30: 4 of 4 files" in out
    assert "every chunk compared with its digest" in out
    assert steps_in(tmp_path / "other") == [30]
    assert verify(LocalStore(tmp_path / "other"), 30).good


def test_a_second_copy_says_that_all_is_there(root: Path, tmp_path: Path) -> None:
    call("copy", root, tmp_path / "other")
    code, out, _ = call("copy", root, tmp_path / "other")
    assert code == 0
    assert out.splitlines()[0] == "there already  step 30"
    assert out.splitlines()[-1] == f"file://{tmp_path}/other has everything"


def test_one_step_and_all_steps(root: Path, tmp_path: Path) -> None:
    assert call("copy", f"{root}@10", tmp_path / "other")[0] == 0
    assert steps_in(tmp_path / "other") == [10]
    code, made = call_json("copy", root, tmp_path / "other", "--all")
    assert code == 0
    assert [(s["step"], s["outcome"]) for s in made["steps"]] == [
        (30, "copied"), (20, "copied"), (10, "there already"),
    ]  # fmt: skip
    assert made["records"]["num_files"] == 0
    assert steps_in(tmp_path / "other") == [10, 20, 30]


def test_a_dry_run_writes_nothing(root: Path, tmp_path: Path) -> None:
    code, out, _ = call("copy", root, tmp_path / "other", "--all", "--dry-run")
    assert code == 0
    assert out.count("missing  step") == 3
    assert "would be copied" in out
    assert not (tmp_path / "other").exists()


def test_a_damaged_step_stays_and_the_others_are_copied(root: Path, tmp_path: Path) -> None:
    (path,) = (root / "steps/0000000020").glob("*/r00001.safetensors")
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    code, _, err = call("copy", f"{root}@20", tmp_path / "other")
    assert code == 1 and "r00001.safetensors" in err
    code, out, _ = call("copy", root, tmp_path / "other", "--all")
    assert code == 1
    assert "failed  step 20: " in out
    assert steps_in(tmp_path / "other") == [10, 30]


def test_another_step_is_in_the_way(root: Path, tmp_path: Path) -> None:
    build(LocalStore(tmp_path / "other"), FSDP_TP, transformer(), step=30)
    code, _, err = call("copy", root, tmp_path / "other")
    assert code == 1
    assert "has another step 30" in err and "nothing is overwritten" in err


def test_records_are_copied_when_asked(root: Path, tmp_path: Path) -> None:
    from tiers.records.test_log_transfer import put_segment

    put_segment(LocalStore(root), 31, 32, 0)
    code, out, _ = call("copy", root, tmp_path / "other")
    assert code == 0
    assert "1 file of records lead on from it: --log copies them" in out
    code, out, _ = call("copy", root, tmp_path / "other", "--log")
    assert code == 0
    assert "copied  records: 1 of 1 file" in out
    assert LocalStore(tmp_path / "other").list("log/") == LocalStore(root).list("log/")


def test_wrong_usage(root: Path, tmp_path: Path) -> None:
    assert call("copy", root)[0] == 2
    code, _, err = call("copy", root, root)
    assert code == 2 and "is where the steps are already" in err
    code, _, err = call("copy", f"{root}@10", tmp_path / "other", "--all")
    assert code == 2 and "--all means every step" in err
    code, _, err = call("copy", root, f"dcp:{tmp_path}/other")
    assert code == 2 and "names a dcp checkpoint" in err and "convert --to dcp" in err
    code, _, err = call("copy", root, f"megatron:{tmp_path}/other")
    assert code == 2 and "names a megatron checkpoint" in err and "convert" not in err
    code, _, err = call("copy", tmp_path / "runn", tmp_path / "other")
    assert code == 1 and "did you mean 'run'" in err
    (tmp_path / "weights.pt").write_bytes(b"PK")
    code, _, err = call("copy", tmp_path / "weights.pt", tmp_path / "other")
    assert code == 2 and "convert" in err
