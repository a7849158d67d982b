"""Runs of `Run` that are killed at random moments, and compared with one that is not."""

from __future__ import annotations

import random
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .forked import Ranks
from .options import Run

KILLS = 10
STEPS = 120
DEADLINE_S = 900


def killed(ranks: Ranks, run: Run, num: int, chance: random.Random) -> None:
    """Run until some losses are known, and a moment longer; then kill the ranks, one after the other.  Some
    must run still."""
    lines, more = len(lines_of(run)), chance.randrange(8)
    pids = ranks.start(asdict(run), num)
    until = time.monotonic() + DEADLINE_S
    while len(lines_of(run)) <= lines + more and None in (codes := ranks.codes(pids)):
        assert not any(codes), ranks.errors()
        assert time.monotonic() < until
        time.sleep(0.005)
    time.sleep(chance.random() / 20)
    ranks.kill(chance.sample(pids, len(pids)))
    assert -9 in ranks.codes(pids)


def lines_of(run: Run) -> list[str]:
    texts = [path.read_text() for path in Path(run.out).glob("losses-*")]
    return [line for text in texts for line in text.splitlines(keepends=True) if line[-1] == "\n"]


def losses_of(run: Run) -> dict[tuple[int, int], set[str]]:
    """By step and half of the batch, all values that the loss had, at the first try and at every other."""
    found: dict[tuple[int, int], set[str]] = {}
    for line in lines_of(run):
        step, half, loss = line.split()
        found.setdefault((int(step), int(half)), set()).add(loss)
    return found


def same(run: Run, alone: Run) -> None:
    expected = losses_of(alone)
    assert len(expected) == 2 * STEPS and all(len(values) == 1 for values in expected.values())
    assert losses_of(run) == expected
    assert Path(run.out, "final").read_text() == Path(alone.out, "final").read_text()


def run_of(folder: Path, **given: Any) -> Run:
    folder.mkdir()
    return Run(steps=STEPS, out=str(folder), **given)
