"""A step is saved again and a rank dies in mid-write: what is read back is all old, never mixed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]


def experiment(kind: str, root: Path) -> list[dict]:
    run = subprocess.run(
        [sys.executable, "-m", "system.crash.two_ranks", kind, str(root)],
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


@pytest.mark.soak
@pytest.mark.distributed
def test_holdfast_keeps_the_old_step(tmp_path: Path) -> None:
    lines = experiment("holdfast", tmp_path / "root")
    outcomes = [line for line in lines if "moment" in line]
    assert [o["moment"] for o in outcomes] == ["create", "write", "finish"]
    for outcome in outcomes:
        assert outcome["exits"] == [[0, 0], [0, 9], [0, 0]]
        assert outcome["values"] == [0.0], outcome
        assert outcome["after"] == [2.0], outcome
    said = r"Deadline: rank 1 has not written its part of the save of step 7 within \d+ s"
    for before, line in zip(lines, lines[1:]):
        if "moment" in line:
            assert re.match(said, before["error"]), before


@pytest.mark.soak
@pytest.mark.distributed
@pytest.mark.slow
def test_the_same_experiment_tells_a_mixture_from_a_whole(tmp_path: Path) -> None:
    """torch's own checkpoint in its place: so this experiment can fail, and is worth making."""
    (outcome,) = experiment("dcp", tmp_path / "root")
    assert outcome["exits"][1][1] == 9
    assert outcome["values"] == [0.0, 1.0]
