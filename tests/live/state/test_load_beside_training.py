"""Loads of a root in which a training saves, and deletes, meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.checkpoint import names, opened, transfer, unproved, verifying
from holdfast.cli.main import run
from holdfast.errors import Corrupt, NotFound
from holdfast.formats import converting
from holdfast.live import restore_into_state, step_loading
from holdfast.store import open_store


def net(value: float) -> nn.Linear:
    made = nn.Linear(300, 300)
    with torch.no_grad():
        for p in made.parameters():
            p.fill_(value)
    return made


def save(root: Path, step: int) -> None:
    """Save a step of which every value is its number."""
    model = net(step)
    optim = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model(torch.ones(1, 300)).sum().backward()
    optim.step()
    holdfast.save(root, {"model": model, "optim": optim}, step=step)


def delete(root: Path, step: int) -> None:
    """Delete a step as a run does: the manifest first."""
    folder = root / f"steps/{step:010d}"
    (folder / "manifest.json").unlink()
    shutil.rmtree(folder)


def values(model: nn.Module) -> set[float]:
    return {x for p in model.parameters() for x in p.unique().tolist()}


def meanwhile(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, act: Callable[[], object]
) -> None:
    """Let `act` happen each time that a function has returned."""
    real = getattr(where, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        act()
        return found

    monkeypatch.setattr(where, name, both)


class Training:
    """Another process, which saves step after step and keeps one."""

    def __init__(self, root: Path, *, num_steps: int) -> None:
        self.root = root
        self.step = 1
        self.last = num_steps
        self._is_saving = False
        save(root, 1)

    def go_on(self) -> None:
        if self.step < self.last and not self._is_saving:
            self._is_saving = True
            save(self.root, self.step + 1)
            delete(self.root, self.step)
            self.step += 1
            self._is_saving = False


@pytest.mark.parametrize("where", ["shared_manifest", "saved_steps"])
def test_the_newest_that_is_deleted_gives_way_to_a_newer(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted after the root was listed, and after its manifest was read."""
    training = Training(tmp_path, num_steps=4)
    meanwhile(monkeypatch, step_loading, where, training.go_on)
    model = net(-1)
    assert holdfast.load(tmp_path, {"model": model}) == 4
    assert values(model) == {4.0}


def test_restore_of_another_root_likewise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path / "theirs", num_steps=3)
    meanwhile(monkeypatch, step_loading, "shared_manifest", training.go_on)
    model = net(-1)
    optim = torch.optim.AdamW(model.parameters())
    with holdfast.Checkpointer(tmp_path / "mine", {"model": model, "optim": optim}) as ckpt:
        restored = ckpt.restore(source=tmp_path / "theirs")
    assert restored == 3
    assert values(model) == {3.0}
    assert len(optim.state) == 2


def test_a_step_that_is_deleted_while_it_is_read_is_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, num_steps=2)
    meanwhile(monkeypatch, restore_into_state, "plan_together", training.go_on)
    model = net(-1)
    assert holdfast.load(tmp_path, {"model": model}) == 1
    assert values(model) == {1.0}


def test_a_training_that_is_always_faster_leaves_the_live_state_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, num_steps=1000)
    meanwhile(monkeypatch, step_loading, "shared_manifest", training.go_on)
    model = net(-1)
    optim = torch.optim.AdamW(model.parameters())
    with pytest.raises(NotFound, match="deleted while it was read") as caught:
        holdfast.load(tmp_path, {"model": model, "optim": optim})
    assert "Keep(last=" in str(caught.value)
    assert values(model) == {-1.0}
    assert not optim.state


def test_a_step_that_was_asked_for_and_is_gone_leaves_the_live_state_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, num_steps=2)
    meanwhile(monkeypatch, step_loading, "shared_manifest", training.go_on)
    model = net(-1)
    with pytest.raises(NotFound, match="no step 1 "):
        holdfast.load(tmp_path, {"model": model}, step=1)
    assert values(model) == {-1.0}


@pytest.mark.parametrize("how", ["gone", "cut short", "table"])
def test_a_file_that_is_not_whole_leaves_the_live_state_alone(how: str, tmp_path: Path) -> None:
    save(tmp_path, 1)
    (file,) = tmp_path.glob("steps/*/*/r00000.safetensors")
    data = bytearray(file.read_bytes())
    if how == "gone":
        file.unlink()
    elif how == "cut short":
        file.write_bytes(data[:-100])
    else:
        data[-1] ^= 1
        file.write_bytes(data)
    model = net(-1)
    optim = torch.optim.AdamW(model.parameters())
    with pytest.raises((NotFound, Corrupt)):
        holdfast.load(tmp_path, {"model": model, "optim": optim})
    assert values(model) == {-1.0}
    assert not optim.state


def test_memory_that_was_made_for_a_load_that_fails_holds_nan(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (file,) = tmp_path.glob("steps/*/*/r00000.safetensors")
    file.unlink()
    with torch.device("meta"):
        model = nn.Linear(300, 300)
    with pytest.raises(NotFound):
        holdfast.load(tmp_path, {"model": model})
    assert all(p.isnan().all() for p in model.parameters())


def test_steps_that_are_all_deleted_while_they_are_listed_are_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, num_steps=3)
    meanwhile(monkeypatch, names, "keys_below", training.go_on)
    model = net(-1)
    assert holdfast.load(tmp_path, {"model": model}) == 3
    assert values(model) == {3.0}


def test_open_takes_the_newest_likewise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path, num_steps=3)
    meanwhile(monkeypatch, unproved, "newest", training.go_on)
    with holdfast.open(tmp_path) as step:
        assert step.step == 3
        assert set(step.read("model.weight").reshape(-1).tolist()) == {3.0}


def test_what_is_opened_and_then_deleted_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, num_steps=2)
    step = holdfast.open(tmp_path)
    training.go_on()
    with pytest.raises(NotFound):
        step.read("model.weight")
    step = holdfast.open(tmp_path)
    meanwhile(monkeypatch, opened, "read_alone", lambda: delete(tmp_path, 2))
    assert set(step.read("model.weight").reshape(-1).tolist()) == {2.0}


def test_copy_and_convert_of_a_step_that_is_deleted_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    for step in (1, 2):
        save(root, step)
    monkeypatch.setattr(transfer, "COPY_PART_BYTES", 256 << 10)
    meanwhile(monkeypatch, transfer, "manifest_with_bytes", lambda: delete(root, 1))
    with pytest.raises(NotFound):
        transfer.transfer(open_store(str(root)), open_store(str(other)), 1)
    assert not [p for p in other.rglob("*") if p.is_file()]
    meanwhile(monkeypatch, converting, "open_checkpoint", lambda: delete(root, 2))
    with pytest.raises(NotFound):
        holdfast.convert(root, tmp_path / "files", to="torch", step=2)
    assert not [p for p in (tmp_path / "files").rglob("*") if p.is_file()]


def test_verify_of_a_step_that_is_deleted_does_not_call_it_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    meanwhile(monkeypatch, verifying, "read_manifest", lambda: delete(tmp_path, 1))
    assert run(["verify", f"{tmp_path}@1"]) == 1
    shown = capsys.readouterr()
    assert "damaged" not in shown.out + shown.err
    assert "no step 1 " in shown.err
