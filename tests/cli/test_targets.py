"""`PATH@NUMBER`: a step, or a folder of that name, by what lies there."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import pytest

from builders import FSDP_TP, build, transformer
from cli.calling import call, call_json
from holdfast.core.checkpoint.notes import pin
from holdfast.formats.read.addresses import located
from holdfast.store import LocalStore, MemoryStore


def saved(root: Path, *steps: int) -> None:
    for step in steps:
        build(LocalStore(root), FSDP_TP, transformer(), step=step)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def verified(target: str) -> tuple[str, int]:
    """Which root and step `verify` takes."""
    code, found = call_json("verify", target)
    assert code == 0
    return Path(unquote(found["url"])).name, found["step"]


def test_a_step(here: Path) -> None:
    saved(here / "run", 5, 7)
    assert verified("run@5") == ("run", 5)
    assert verified("run/@5") == ("run", 5)
    assert verified("run") == ("run", 7)


def test_a_folder_of_that_name(here: Path) -> None:
    saved(here / "run@5", 2, 3)
    assert verified("run@5") == ("run@5", 3)
    assert verified("run@5@2") == ("run@5", 2)
    assert verified("run@5/") == ("run@5", 3)
    saved(here / "run", 4)  # which has no step 5
    assert verified("run@5") == ("run@5", 3)


def test_a_step_beside_a_folder_without_a_checkpoint(here: Path) -> None:
    saved(here / "run", 5)
    (here / "run@5").mkdir()
    assert verified("run@5") == ("run", 5)
    (here / "run@5" / "notes.txt").write_text("x")
    assert verified("run@5") == ("run", 5)


def test_both_are_refused_and_can_be_told_apart(here: Path) -> None:
    saved(here / "run", 5)
    saved(here / "run@5", 2)
    for verb in (("verify",), ("inspect",), ("plan", "--mesh", "dp=2")):
        code, _, errors = call(*verb, "run@5")
        assert code == 2
        assert "step 5 of 'run'" in errors and "the checkpoint 'run@5'" in errors
        assert "'run/@5'" in errors and "'run@5/'" in errors
    assert verified("run/@5") == ("run", 5)
    assert verified("run@5/") == ("run@5", 2)
    assert verified("run@5@2") == ("run@5", 2)


def test_neither(here: Path) -> None:
    (here / "run@5").mkdir()
    code, _, errors = call("verify", "run@5")
    assert code == 1 and "run%405" in errors
    code, _, errors = call("verify", "none@5")
    assert code == 1 and "no step 5" in errors


def test_urls_and_files(here: Path) -> None:
    saved(here / "a@1", 2)
    assert verified(f"file://{here}/a@1") == ("a@1", 2)
    assert located("memory://nobody@3") == ("memory://nobody", 3)
    store = MemoryStore("somebody@3")
    build(store, FSDP_TP, transformer(), step=8)
    assert located("memory://somebody@3") == ("memory://somebody@3", None)
    (here / "w@7").write_bytes(b"x")
    assert located("w@7") == ("w@7", None)


def test_a_label_is_an_address_for_every_verb(here: Path) -> None:
    saved(here / "run", 5, 7)
    pin(LocalStore(here / "run"), 5, "best")
    assert verified("run@best") == ("run", 5)
    assert verified("run@newest") == ("run", 7)
    assert call_json("inspect", "run@best")[1]["step"] == 5
    assert call_json("plan", "run@best", "--mesh", "dp=2")[1]["step"] == 5
    assert call_json("diff", "run@best", "run@5")[1]["identical"]
    assert call_json("convert", "run@best", "w.safetensors", "--to", "safetensors")[1]["step"] == 5
    assert [s["step"] for s in call_json("copy", "run@best", "other")[1]["steps"]] == [5]
    (here / "run/steps/0000000005").rename(here / "only")
    assert verified("only@5") == ("only", 5)
    code, _, err = call("verify", "run@bset")
    assert code == 1 and "has the label 'bset'" in err
