"""Any damage to a checkpoint ends in what was saved, or in a HoldfastError: soon, and in little memory.

HOLDFAST_FUZZ=2000        damages of each kind of checkpoint in `make soak`
HOLDFAST_FUZZ_SEED=7      repeats those of a seed, which is else new each time, and printed
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

KINDS = (
    "own",
    "attached",
    "records",
    "own-lies",
    "records-lies",
    "torch",
    "dcp",
    "safetensors",
    "deepspeed",
)
TESTS = Path(__file__).parents[2]


def run(kind: str, folder: Path, number: int, seed: int) -> None:
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    call = [
        sys.executable,
        "-m",
        "system.fuzz.reading",
        kind,
        str(folder),
        "0",
        str(number),
        str(seed),
    ]
    print(f"HOLDFAST_FUZZ_SEED={seed}")
    done = subprocess.run(
        call, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    print(found["counts"])
    assert sum(found["counts"].values()) == number
    assert not found["bad"], "\n".join(found["bad"][:20])
    assert found["counts"].get("equal", 0) < number, "no damage was noticed"


@pytest.mark.parametrize("kind", KINDS)
def test_damages(kind: str, tmp_path: Path) -> None:
    """Always the same."""
    run(kind, tmp_path, 8 if "records" in kind else 20, 1)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_many_damages(kind: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("HOLDFAST_FUZZ_SEED") or random.SystemRandom().randrange(1 << 30))
    run(kind, tmp_path, int(os.environ.get("HOLDFAST_FUZZ", "2000")), seed)
