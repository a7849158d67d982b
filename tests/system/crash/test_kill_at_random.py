"""SIGKILL at random moments of a real training: it goes on as if nothing had happened.

`HOLDFAST_KILLS` sets how often (default 30), `HOLDFAST_KILL_SEED` when.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import holdfast

WORLD = 4
KILLS = int(os.environ.get("HOLDFAST_KILLS", "30"))
SEED = int(os.environ.get("HOLDFAST_KILL_SEED", "0"))
TRAIN = Path(__file__).with_name("train_killed.py")
STRIDE = 6
"""Steps that a life may last."""
SILENCE_S = 120


class Training:
    """One elastic agent and what its ranks have written down."""

    def __init__(self, place: Path, total: int) -> None:
        self.root, self.logs = place / "root", place / "logs"
        self.logs.mkdir(parents=True)
        self.allow(0)
        self.output = (place / "output").open("wb")
        env = {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "PYTHONPATH": str(TRAIN.parent),  # the fork server imports the script by its name
        }
        self.process = subprocess.Popen(
            [sys.executable, *map(str, (TRAIN, self.root, self.logs, total, WORLD, KILLS + 10))],
            env=os.environ | env,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(300)
        self.output.close()

    def allow(self, step: int) -> None:
        """Let the ranks train up to a step, and no further."""
        new = self.logs / "limit.new"
        new.write_text(str(step))
        new.replace(self.logs / "limit")

    def records(self, rank: int) -> list[dict]:
        path = self.logs / f"r{rank}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def starts(self, rank: int) -> list[dict]:
        return [r for r in self.records(rank) if "pid" in r]

    def last_step(self, rank: int) -> int:
        return next((r.get("step", r.get("restored")) for r in reversed(self.records(rank))), 0)

    def await_(self, condition, what: str) -> None:
        until = time.monotonic() + SILENCE_S
        while not condition():
            assert self.process.poll() is None, f"ended before {what}\n{self.tail()}"
            assert time.monotonic() < until, f"{what} took too long\n{self.tail()}"
            time.sleep(0.005)

    def finish(self) -> None:
        assert self.process.wait(SILENCE_S) == 0, self.tail()

    def tail(self) -> str:
        self.output.flush()
        return Path(self.output.name).read_text(errors="replace")[-3000:]


def kill_at_random(training: Training, rng: random.Random) -> list[int]:
    """Kill one rank, again and again; the newest committed step just before each kill."""
    seen = []
    for n in range(KILLS):
        training.await_(
            lambda: all(len(training.starts(r)) == n + 1 for r in range(WORLD)), "start"
        )
        victim = rng.randrange(WORLD)
        restored = training.starts(victim)[-1]["restored"]
        training.allow(restored + STRIDE)
        goal = restored + rng.randint(0, STRIDE)
        training.await_(lambda: training.last_step(victim) >= goal, f"step {goal}")
        time.sleep(rng.uniform(0, 0.05))
        seen.append(max(holdfast.steps(training.root), default=0))
        os.kill(training.starts(victim)[-1]["pid"], signal.SIGKILL)
    return seen


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.distributed
def test_killed_training_stays_on_the_reference_trajectory(tmp_path: Path) -> None:
    total = KILLS * STRIDE + 4
    with Training(tmp_path / "reference", total) as reference:
        reference.allow(total)
        reference.finish()
    with Training(tmp_path / "killed", total) as killed:
        seen = kill_at_random(killed, random.Random(SEED))
        killed.allow(total)
        killed.finish()
    for rank in range(WORLD):
        expected = {r["step"]: r["digest"] for r in reference.records(rank) if "step" in r}
        assert len(expected) == total
        restored = [r["restored"] for r in killed.starts(rank)]
        assert len(restored) == KILLS + 1
        assert restored[0] == 0
        for newest, back in zip(seen, restored[1:]):
            assert back >= newest, f"step {newest} was committed, but the run went back to {back}"
        steps = [r for r in killed.records(rank) if "step" in r]
        assert {r["step"] for r in steps} == set(expected)
        for r in steps:
            assert r["digest"] == expected[r["step"]], f"rank {rank} differs at step {r['step']}"
    unfinished = [p.name for p in killed.root.rglob(".tmp-*")]
    assert unfinished == [], "what the killed were writing was not swept"
