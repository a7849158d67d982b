"""A trainer that is written by the door alone: killed and resumed, it ends as if nothing had happened."""

from __future__ import annotations

import ast
import signal
import subprocess
from pathlib import Path

import torch

import holdfast
import zygote
from holdfast import extend

TESTS = Path(__file__).parents[2]
STEPS_OF_EPOCH, STEPS = 7, 21


def trained(root: Path, out: Path, *at: int) -> subprocess.CompletedProcess[str]:
    return zygote.run(["-m", "integrations.trainers.train_toy", root, out, *at], timeout=300)


def test_killed_twice_it_equals_the_run_that_was_not(tmp_path: Path) -> None:
    alone = trained(tmp_path / "alone", tmp_path / "alone.pt")
    assert alone.stdout == "0\n", alone.stderr
    for at in (10, 17):  # in the second epoch, and in the third
        done = trained(tmp_path / "root", tmp_path / "out.pt", at)
        assert done.returncode == -signal.SIGKILL, done.stderr
    done = trained(tmp_path / "root", tmp_path / "out.pt")
    assert done.returncode == 0 and int(done.stdout) >= 2 * STEPS_OF_EPOCH, done.stderr
    found, expected = (torch.load(tmp_path / name) for name in ("out.pt", "alone.pt"))
    assert len(expected[2]["losses"]) == STEPS
    assert str(found) == str(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert holdfast.open(tmp_path / "root").extras["place"]["epoch"] == 3
    assert extend.labels_of(str(tmp_path / "root")) == {"epoch": STEPS}


def test_it_is_short_and_knows_no_insides() -> None:
    text = (TESTS / "integrations" / "trainers" / "toy_trainer.py").read_text()
    assert len(text.splitlines()) <= 80
    modules = {n.module for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)}
    assert {m for m in modules if m and m.startswith("holdfast")} == {"holdfast", "holdfast.extend"}


def test_a_run_that_saves_by_hand_is_not_warned(tmp_path: Path, recwarn) -> None:
    every = holdfast.Every.by_hand(memory=2)
    assert every == holdfast.Every(every.durable, memory=2)
    with holdfast.Checkpointer(
        tmp_path, {"n": torch.zeros(1)}, every=holdfast.Every.by_hand()
    ) as ckpt:
        for step in (1, 2, 3):
            ckpt.step(step)
        ckpt.save(3)
    assert holdfast.steps(tmp_path) == [3]
    assert not [w for w in recwarn if issubclass(w.category, holdfast.HoldfastWarning)]
