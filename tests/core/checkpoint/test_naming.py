"""Steps that are named by a word: a label, `best`, `newest`; and addresses, `PATH@STEP`, in Python."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from cli.calling import call, call_json
from holdfast.checkpoint import notes
from holdfast.checkpoint.naming import step_named
from holdfast.errors import HoldfastError, NotFound, NotRecoverable, UsageError
from holdfast.store import open_store


def state(value: float = -1.0) -> dict[str, Any]:
    return {"x": torch.full((3,), float(value))}


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Steps 10, 20 and 30, of which 20 has the lowest loss; 10 is labelled `first`."""
    url = str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}"
    with holdfast.Checkpointer(url, live := state(), keep=holdfast.Keep(best=("loss", 3))) as ckpt:
        for step, loss in ((10, 0.5), (20, 0.1), (30, 0.2)):
            live["x"].fill_(step)
            ckpt.save(step, metrics={"loss": loss}).wait(60)
        ckpt.pin(10, "first")
    return url


def loaded(url: str, step: Any = None) -> tuple[int, float]:
    """What `load` gives: the step's number, and the value that every element has."""
    into = state()
    number = holdfast.load(url, into, step=step)
    return number, float(into["x"].unique().item())


WORDS = {"first": 10, "best": 20, "newest": 30}


@pytest.mark.parametrize(("word", "step"), WORDS.items())
def test_a_word_names_a_step_in_every_call(root: str, word: str, step: int, tmp_path: Path) -> None:
    assert step_named(open_store(root), word) == step
    for address, named in ((root, word), (f"{root}@{word}", None), (f"{root}@{step}", None)):
        assert holdfast.open(address, step=named).step == step
        assert loaded(address, named) == (step, step)
    assert holdfast.Checkpoint.open(root, word).step == step
    assert holdfast.convert(f"{root}@{word}", tmp_path / "a", to="torch").step == step
    assert holdfast.convert(root, tmp_path / "b", to="torch", step=word).step == step
    with holdfast.Checkpointer(tmp_path / "other", into := state()) as ckpt:
        assert ckpt.restore(source=f"{root}@{word}") == step
        assert ckpt.restore(word, source=root) == step
        assert into["x"].tolist() == [step] * 3
    with holdfast.Checkpointer(root, into := state(), keep=holdfast.Keep(best=("loss", 3))) as ckpt:
        found = ckpt.find(word)
        assert found is not None and found.step == step
        assert ckpt.restore(word) == step
        assert into["x"].tolist() == [step] * 3
        ckpt.metrics(word, accuracy=0.5)
        ckpt.pin(word, "again")
    assert notes.read_notes(open_store(root)).live_labels == {"first": 10, "again": step}
    assert holdfast.open(root, step="again").metrics["accuracy"] == 0.5


def test_best_is_the_label_of_that_name_first(root: str) -> None:
    notes.pin(open_store(root), 30, "best")
    assert loaded(root, "best") == (30, 30)


def test_best_follows_the_rule_of_the_last_run(root: str) -> None:
    """It also counts metrics that were noted later."""
    assert loaded(root, "best") == (20, 20)
    with holdfast.Checkpointer(root, state(), keep=holdfast.Keep(best=("loss", 1, "max"))) as ckpt:
        assert ckpt.restore() == 30
        assert ckpt.restore("best") == 10
        ckpt.metrics(30, loss=0.9)
        assert holdfast.open(root, step="best").step == 30
    assert loaded(root, "best") == (30, 30)
    holdfast.Checkpointer(root, state(), anew=True).close()
    with pytest.raises(NotFound, match=r"'best', and its last run keeps none by Keep\(best="):
        loaded(root, "best")


def test_a_rule_whose_metric_no_step_has_names_none(tmp_path: Path) -> None:
    holdfast.save(tmp_path, state(), step=1)
    keep = holdfast.Keep(best=("acc", 1, "max"))
    with (
        holdfast.Checkpointer(tmp_path, state(), keep=keep) as ckpt,
        pytest.raises(NotFound, match="and none has the metric 'acc'"),
    ):
        ckpt.find("best")


CALLS: dict[str, Callable[[str, Path], object]] = {
    "open": lambda root, _: holdfast.open(root, step="frist"),
    "open@": lambda root, _: holdfast.open(f"{root}@frist"),
    "Checkpoint.open": lambda root, _: holdfast.Checkpoint.open(root, "frist"),
    "load": lambda root, _: holdfast.load(root, state(), step="frist"),
    "load@": lambda root, _: holdfast.load(f"{root}@frist", state()),
    "convert": lambda root, out: holdfast.convert(root, out / "x", to="torch", step="frist"),
    "source": lambda root, out: holdfast.Checkpointer(out / "o", state()).restore(
        "frist", source=root
    ),
    "restore": lambda root, _: holdfast.Checkpointer(root, state()).restore("frist"),
    "find": lambda root, _: holdfast.Checkpointer(root, state()).find("frist"),
    "pin": lambda root, _: holdfast.Checkpointer(root, state()).pin("frist", "x"),
    "metrics": lambda root, _: holdfast.Checkpointer(root, state()).metrics("frist", loss=0.1),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_word_is_refused_with_the_labels_that_exist(
    root: str, name: str, tmp_path: Path
) -> None:
    with pytest.raises(NotFound, match="has the label 'frist'") as caught:
        CALLS[name](root, tmp_path)
    assert caught.value.hint == "labels there: 'first' (step 10); steps there: 10, 20, 30"


def test_a_step_is_named_once(root: str) -> None:
    with pytest.raises(UsageError, match="the path names step 10, and step=20 is given"):
        holdfast.open(f"{root}@10", step=20)


def test_a_root_without_steps_has_no_newest(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, state()) as ckpt:
        assert not ckpt.restore("newest").found
        with pytest.raises(NotFound, match="labels there: none; steps there: none"):
            ckpt.restore("best")
    with pytest.raises(NotRecoverable):
        holdfast.open(tmp_path, step="newest")


def test_newest_is_no_label(root: str) -> None:
    with (
        holdfast.Checkpointer(root, state()) as ckpt,
        pytest.raises(UsageError, match="always names"),
    ):
        ckpt.pin(10, "newest")


def test_digits_are_a_number(tmp_path: Path) -> None:
    holdfast.save(tmp_path, state(), step=7)
    with pytest.raises(UsageError, match="or a label") as caught:
        holdfast.open(tmp_path, step="7")
    assert caught.value.hint == "step=7"
    for word in ("-7", "7.5", "²", "", " "):
        with pytest.raises(UsageError, match="or a label"):
            holdfast.open(tmp_path, step=word)
        with pytest.raises(UsageError, match="is not the number of a step, and no label"):
            holdfast.open(f"{tmp_path}@{word}")


def test_labels_of_the_home_behind_are_known_when_the_root_is_lost(tmp_path: Path) -> None:
    behind = str(tmp_path / "behind")
    with holdfast.Checkpointer(tmp_path / "a", live := state(), upload=behind) as ckpt:
        for step in (1, 2):
            live["x"].fill_(step)
            ckpt.save(step).wait(60)
            if step == 1:
                ckpt.pin(1, "good")
                ckpt._tiers.get("upload")._worker.settle(60)
    with holdfast.Checkpointer(tmp_path / "b", into := state(), upload=behind) as ckpt:
        assert ckpt.restore("good") == 1
    assert into["x"].tolist() == [1.0] * 3


# -- addresses ------------------------------------------------------------------------------------


def test_a_folder_with_an_at_is_a_folder(tmp_path: Path) -> None:
    for name, step in (("gpt", 1), ("gpt@2", 3), ("gpt@good", 4)):
        holdfast.save(tmp_path / name, state(step), step=step)
    assert loaded(f"{tmp_path}/gpt@2") == (3, 3)
    assert loaded(f"{tmp_path}/gpt@good") == (4, 4)
    assert loaded(f"{tmp_path}/gpt@2@3") == (3, 3)
    assert holdfast.open(f"{tmp_path}/gpt@1").step == 1
    notes.pin(open_store(f"{tmp_path}/gpt"), 1, "good")
    with pytest.raises(UsageError, match="can mean two things"):
        loaded(f"{tmp_path}/gpt@good")
    assert loaded(f"{tmp_path}/gpt/@good") == (1, 1)
    assert loaded(f"{tmp_path}/gpt@good/") == (4, 4)


def test_a_path_with_an_at_that_does_not_exist_is_a_path(tmp_path: Path) -> None:
    with pytest.raises(NotRecoverable, match=r"no checkpoint in .*/me%40home"):
        holdfast.open(tmp_path / "me@home")


def test_foreign_checkpoints_have_numbers_alone(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "step": 5}, tmp_path / "a.pt")
    assert holdfast.open(f"{tmp_path}/a.pt", step="newest").step == 5
    assert holdfast.open(f"torch:{tmp_path}/a.pt@5").step == 5
    with pytest.raises(UsageError, match="is a torch checkpoint, whose steps have no labels"):
        holdfast.open(f"{tmp_path}/a.pt", step="best")


def test_the_shell_takes_the_same_addresses(root: str) -> None:
    if root.startswith("memory://"):
        return
    for word, step in WORDS.items():
        assert call_json("verify", f"{root}@{word}")[1]["step"] == step
        code, found = call_json("diff", f"{root}@{word}", f"{root}@{step}")
        assert code == 0, found
    code, _, errors = call("inspect", f"{root}@frist")
    assert code == 1 and "labels there: 'first' (step 10)" in errors


# -- the newest -----------------------------------------------------------------------------------


def test_steps_tells_the_newest_after_a_run_went_back(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, state(), every=1) as ckpt:
        for step in (50, 80):
            ckpt.save(step).wait(60)
    assert holdfast.steps(tmp_path).newest == 80
    with holdfast.Checkpointer(tmp_path, state(), every=1) as ckpt:
        ckpt.restore(50)
        ckpt.save(60).wait(60)
    found = holdfast.steps(tmp_path)
    assert found == [50, 60, 80] and found.newest == 60
    with holdfast.Checkpointer(tmp_path, state()) as ckpt:
        assert ckpt.restore() == 60


def test_the_newest_is_one_whose_manifest_can_be_read(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        holdfast.save(tmp_path, state(), step=step)
    manifest = tmp_path / "steps/0000000003/manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-40])
    with pytest.warns(holdfast.HoldfastWarning, match="step 3: "):
        found = holdfast.steps(tmp_path)
    assert found == [1, 2, 3] and found.newest == 2


def test_steps_of_nothing(tmp_path: Path) -> None:
    assert holdfast.steps(tmp_path) == [] and holdfast.steps(tmp_path).newest is None
    with pytest.raises(NotFound, match=r"no root at .*/tpyo"):
        holdfast.steps(tmp_path / "tpyo")
    (tmp_path / "typo").mkdir()
    with pytest.raises(NotFound, match="did you mean 'typo'"):
        holdfast.steps(tmp_path / "tpyo")
    assert holdfast.steps(f"memory://{uuid.uuid4().hex}") == []


def test_steps_of_a_foreign_checkpoint_has_its_newest(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "step": 5}, tmp_path / "a.pt")
    found = holdfast.steps(tmp_path / "a.pt")
    assert found == [5] and found.newest == 5


def test_an_error_of_a_word_is_an_error_of_the_library(root: str) -> None:
    with pytest.raises(HoldfastError):
        holdfast.open(f"{root}@")
