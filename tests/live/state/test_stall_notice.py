"""The notice that a save has held training up for long."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import events
from holdfast.live.saving import stall_notice
from holdfast.live.saving.stall_notice import HeldLong


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def waits(step: int, seconds: float) -> None:
    """Have the training wait before its optimizer step."""
    events._deliver(events.Event("window.wait", 0.0, seconds, {"step": step}))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("holdfast.errors._silenced", set())
    return []


def test_training_that_waits_long_for_a_save_is_told_once(told: list[str]) -> None:
    clock = Clock()
    one = HeldLong(told, clock)
    with one.by("snapshot", 7):
        clock.now_s += 0.01
    with one.because(7, "for the snapshot before"):
        clock.now_s += 3
    waits(7, 2.96)
    assert told == [
        "training waited 3.0 s for the snapshot of step 7, which waited for the snapshot before: save less "
        'often, or leave such saves out with when_busy="skip" [held-long]'
    ]
    with one.by("save", 8):
        clock.now_s += 100
    assert len(told) == 1


def test_a_call_that_blocks_is_a_wait_too(told: list[str]) -> None:
    clock = Clock()
    one = HeldLong(told, clock)
    with one.by("save", 8):
        clock.now_s += 2
    assert told[0].startswith("training waited 2.0 s for the save of step 8: ")


def test_a_save_that_waits_while_training_computes_is_not_told(told: list[str]) -> None:
    clock = Clock()
    one = HeldLong(told, clock)
    for step in range(100):
        with one.by("save", step):
            clock.now_s += 0.5
        with one.because(step, "for the one before"):
            clock.now_s += 30
        waits(step, 0.9)
    assert not told


def test_waits_of_others_and_of_what_is_gone_are_not_told(told: list[str]) -> None:
    others = list(events._sinks)
    one = HeldLong(told)
    waits(3, 20.0)  # of a save that this run knows nothing of
    with one.by("save", 3):
        pass
    (its,) = (sink for sink in events._sinks if sink not in others)
    del one
    gc.collect()
    assert its not in events._sinks
    waits(3, 20.0)
    assert not told


def test_it_is_told_by_the_run_and_can_be_silenced(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall_notice, "LONG_S", -1.0)
    for silenced in (False, True):
        if silenced:
            holdfast.silence("held-long")
        model = torch.nn.Linear(4, 4)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with holdfast.Checkpointer(tmp_path / str(silenced), {"model": model}, every=1) as ckpt:
                ckpt.step(1)
                ckpt.wait()
        texts = [str(w.message) for w in seen]
        assert any("[held-long]" in text for text in texts) is not silenced
