"""The metrics that `Checkpointer.step` is given, and what becomes of them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
import zygote


def state() -> dict[str, Any]:
    return {"x": torch.ones(3)}


def metrics_of(root: Path) -> dict[int, dict[str, float]]:
    return {step: holdfast.open(root, step=step).metrics for step in holdfast.steps(root)}


def test_a_step_that_is_saved_has_the_metrics_of_its_call_alone(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, state(), every=2) as ckpt:
        for step in range(1, 5):
            ckpt.step(step, metrics={"loss": step / 10})
        ckpt.step(5)
        ckpt.step(6)
    assert metrics_of(tmp_path) == {2: {"loss": 0.2}, 4: {"loss": 0.4}, 6: {}}


def test_a_save_that_follows_has_them_too_and_adds_its_own(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, state(), every=100) as ckpt:
        ckpt.step(1, metrics={"loss": 0.1, "seen": 8})
        ckpt.save(1).wait(60)
        ckpt.step(2, metrics={"loss": 0.2, "seen": 16})
        ckpt.save(2, metrics={"loss": 0.25, "accuracy": 0.5}).wait(60)
        ckpt.step(3, metrics={"loss": 0.3})
        ckpt.step(4)
        ckpt.save(5).wait(60)
    assert metrics_of(tmp_path) == {
        1: {"loss": 0.1, "seen": 8.0},
        2: {"loss": 0.25, "seen": 16.0, "accuracy": 0.5},
        5: {},
    }


def test_those_of_a_step_before_a_restore_are_gone(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, state(), every=100) as ckpt:
        ckpt.save(1).wait(60)
        ckpt.step(2, metrics={"loss": 0.2})
        ckpt.restore()
        ckpt.save(2).wait(60)
    assert metrics_of(tmp_path) == {1: {}, 2: {}}


def test_keep_goes_by_them(tmp_path: Path) -> None:
    keep = holdfast.Keep(last=1, best=("loss", 1))
    with holdfast.Checkpointer(tmp_path, state(), every=1, keep=keep) as ckpt:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.4), (4, 0.3)):
            ckpt.step(step, metrics={"loss": loss})
            ckpt.wait()
        assert ckpt.restore("best") == 2


STOPS = """
import os, signal, sys, torch, holdfast
ckpt = holdfast.Checkpointer(sys.argv[1], {"x": torch.ones(3)}, every=100, sigterm_s=60)
ckpt.step(1, metrics={"loss": 0.1})
os.kill(os.getpid(), signal.SIGTERM)
ckpt.step(2, metrics={"loss": 0.2})
"""


def test_the_last_save_at_sigterm_has_them(tmp_path: Path) -> None:
    done = zygote.run(["-c", STOPS, str(tmp_path)])
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert metrics_of(tmp_path) == {2: {"loss": 0.2}}


THROUGH_MEMORY = """
import sys, torch, holdfast
every = holdfast.Every(durable=2, memory=1)
with holdfast.Checkpointer(
    sys.argv[1], {"x": torch.ones(3)}, every=every, memory=holdfast.Memory(), when_busy="queue"
) as ckpt:
    for step in (1, 2, 3):
        ckpt.step(step, metrics={"loss": step / 10})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="agents need Linux")
def test_a_durable_save_through_memory_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", os.fspath(tmp_path / "node"))
    root = tmp_path / "root"
    done = zygote.run(["-c", THROUGH_MEMORY, str(root)])
    assert done.returncode == 0, done.stderr
    assert metrics_of(root) == {2: {"loss": 0.2}}
