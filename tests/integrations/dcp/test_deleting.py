"""Steps that a `Writer` does not keep are deleted behind the call, and before the next save begins."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
import holdfast.session.attempts as attempts
import holdfast.session.planned_saves as module
from capabilities import ALONE
from holdfast.dcp import Reader, Writer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_no_save_returns_late_for_a_deletion_and_none_meets_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, order = threading.Event(), list[str]()
    prune, begin_once = module.prune, attempts.begin_once

    def held_up(*args: Any, **kwargs: Any) -> list[int]:
        assert go.wait(300)
        gone = prune(*args, **kwargs)
        order.append(f"deleted {gone}")
        return gone

    def beginning(store: Any, step: int, **options: Any) -> tuple[int, str]:
        order.append(f"began {step}")
        return begin_once(store, step, **options)

    monkeypatch.setattr(module, "prune", held_up)
    monkeypatch.setattr(attempts, "begin_once", beginning)

    def save(step: int) -> Writer:
        writer = Writer(tmp_path, keep=holdfast.Keep(last=1))
        state = {"x": torch.full((3,), float(step))}
        dcp.save(state, storage_writer=writer, checkpoint_id=str(step), **ALONE)
        return writer

    go.set()
    save(1).wait()
    go.clear()
    save(2)
    assert holdfast.steps(tmp_path) == [1, 2]  # it has returned, and nothing is deleted yet
    threading.Timer(0.2, go.set).start()
    save(1)  # the step that is being deleted, by another Writer
    assert order == ["began 1", "deleted []", "began 2", "deleted [1]", "began 1"]
    save(3).wait()
    assert holdfast.steps(tmp_path) == [3]


def test_a_training_that_went_back_is_the_newest(tmp_path: Path) -> None:
    """What it has saved just now is kept, and loaded without an id."""
    writer, state = Writer(tmp_path, keep=holdfast.Keep(last=1, every=10)), {"x": torch.zeros(3)}
    for step in (10, 20, 30, 15, 16):
        state["x"].fill_(step)
        dcp.save(state, storage_writer=writer, checkpoint_id=str(step), **ALONE)
    writer.wait()
    assert holdfast.steps(tmp_path) == [10, 16, 20, 30]
    dcp.load(state, storage_reader=Reader(tmp_path), **ALONE)
    assert state["x"].tolist() == [16.0] * 3
    dcp.load(state, storage_reader=Reader(tmp_path), checkpoint_id="30", **ALONE)
    assert state["x"].tolist() == [30.0] * 3


def test_a_reader_and_a_writer_that_are_used_again(tmp_path: Path) -> None:
    """Without an id: the newest, and the step after the highest; the id of a call before counts no more."""
    writer, reader, state = Writer(tmp_path), Reader(tmp_path), {"x": torch.zeros(3)}

    def save(value: float, **options: Any) -> None:
        state["x"].fill_(value)
        dcp.save(state, storage_writer=writer, **ALONE, **options)

    def load(**options: Any) -> float:
        state["x"].fill_(-1)
        dcp.load(state, storage_reader=reader, **ALONE, **options)
        return float(state["x"][0])

    save(1, checkpoint_id="1")
    assert load() == 1
    save(2, checkpoint_id="2")
    assert load() == 2
    assert load(checkpoint_id="1") == 1
    assert load() == 2
    save(3)
    assert holdfast.steps(tmp_path) == [1, 2, 3]
    assert (load(), load(checkpoint_id="2")) == (3, 2)
    for asked in ("1", "9"):  # of a load that fails, too
        with pytest.raises(BaseException, match=r"Missing key|there is no step 9|metadata"):
            dcp.load({"y": 1}, storage_reader=reader, checkpoint_id=asked, **ALONE)
        assert load() == 3


def test_a_training_that_went_back_in_a_root_that_a_checkpointer_has_left(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with holdfast.Checkpointer(tmp_path, {"model": model}) as ckpt:
        ckpt.save(100)
    writer, state = Writer(tmp_path, keep=holdfast.Keep(last=1)), {"model": model.state_dict()}
    for step in (50, 60):
        with torch.no_grad():
            model.bias.fill_(step)
        dcp.save(state, storage_writer=writer, checkpoint_id=str(step), **ALONE)
    writer.wait()
    assert holdfast.steps(tmp_path) == [60, 100]  # which it did not go on from
    with holdfast.Checkpointer(tmp_path, {"model": torch.nn.Linear(2, 2)}) as ckpt:
        assert ckpt.restore() == 60
        ckpt.save(70).wait()
    assert holdfast.open(tmp_path).manifest.run == 3


def test_what_a_failed_save_has_left_goes_with_the_next_one_of_any_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of `async_save` is given another `Writer` each time, and lives as long as training."""

    def save() -> None:
        dcp.save({"x": torch.ones(9)}, storage_writer=Writer(tmp_path), **ALONE)

    def images() -> list[Path]:
        return sorted(tmp_path.rglob("*.safetensors"))

    with monkeypatch.context() as patch:
        patch.setattr(module, "commit", lambda *_: 1 / 0)
        with pytest.raises(CheckpointException, match="division by zero"):
            save()
    left = images()
    save()
    assert len(left) == len(images()) == 1 and left != images()


def test_a_save_takes_away_what_it_handed_to_others_and_a_failed_one_leaves_it_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: dict[str, bytes] = {}
    monkeypatch.setattr(module, "hand", handed.__setitem__)
    monkeypatch.setattr(module, "take_away", handed.pop)
    saves = module.PlannedSaves(str(tmp_path))

    def save(step: int | None, fails: bool = False) -> None:
        attempt = saves.begin(step)
        written = saves.prepare(attempt, 0, [module.Part("x", torch.ones(3))]).write()
        if not fails:
            saves.commit([written])

    for step in (None, 7) * 3:
        save(step, fails=True)
    assert len(saves._keys) == len(handed) == 2
    late = saves.prepare(saves.begin(), 0, [module.Part("x", torch.ones(3))]).write()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(saves.begin).result(60)
        saves.commit([late])
    assert len(saves._keys) == len(handed) == 2, "the second save's, which others have not read"
    save(7)
    save(None)
    assert not saves._keys and not handed


def test_two_saves_at_once_without_an_id_are_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, commit = threading.Barrier(2), module.commit

    def together(*args: Any) -> Any:
        both.wait(300)
        return commit(*args)

    monkeypatch.setattr(module, "commit", together)
    saves = [
        dcp.async_save({"x": torch.full((3,), value)}, storage_writer=Writer(tmp_path), **ALONE)
        for value in (1.0, 2.0)
    ]
    for one in saves:
        one.result(300)
    found = []
    for step in holdfast.steps(tmp_path):
        state = {"x": torch.zeros(3)}
        dcp.load(state, storage_reader=Reader(tmp_path), checkpoint_id=str(step), **ALONE)
        found.append(float(state["x"][0]))
    assert sorted(found) == [1.0, 2.0]
