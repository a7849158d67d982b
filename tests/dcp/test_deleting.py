"""Steps that a `Writer` does not keep are deleted behind the call, and before the next save begins."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
import holdfast.dcp.writer as module
from holdfast.dcp import Reader, Writer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_no_save_returns_late_for_a_deletion_and_none_meets_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, order = threading.Event(), list[str]()
    prune, begin_once = module.prune, module.begin_once

    def held_up(*args: Any, **kwargs: Any) -> list[int]:
        assert go.wait(60)
        gone = prune(*args, **kwargs)
        order.append(f"deleted {gone}")
        return gone

    def beginning(store: Any, step: int, **options: Any) -> tuple[int, str]:
        order.append(f"began {step}")
        return begin_once(store, step, **options)

    monkeypatch.setattr(module, "prune", held_up)
    monkeypatch.setattr(module, "begin_once", beginning)

    def save(step: int) -> Writer:
        writer = Writer(tmp_path, keep=holdfast.Keep(last=1))
        state = {"x": torch.full((3,), float(step))}
        dcp.save(state, storage_writer=writer, checkpoint_id=str(step), no_dist=True)
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
        dcp.save(state, storage_writer=writer, checkpoint_id=str(step), no_dist=True)
    writer.wait()
    assert holdfast.steps(tmp_path) == [10, 16, 20, 30]
    dcp.load(state, storage_reader=Reader(tmp_path), no_dist=True)
    assert state["x"].tolist() == [16.0] * 3
    dcp.load(state, storage_reader=Reader(tmp_path), checkpoint_id="30", no_dist=True)
    assert state["x"].tolist() == [30.0] * 3
