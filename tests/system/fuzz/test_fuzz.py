"""Any damage to a checkpoint ends in what was saved, or in a HoldfastError: soon, and in little memory.

HOLDFAST_FUZZ=2000        damages of each kind of checkpoint in `make soak`
HOLDFAST_FUZZ_SEED=7      repeats those of a seed, which is else new each time, and printed
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

import zygote

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


def run(kind: str, folder: Path, number: int, seed: int) -> None:
    print(f"HOLDFAST_FUZZ_SEED={seed}")
    done = zygote.run(["-m", "system.fuzz.reading", kind, folder, 0, number, seed])
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    print(found["counts"])
    assert sum(found["counts"].values()) == number
    assert not found["bad"], "\n".join(found["bad"][:20])
    assert found["counts"].get("equal", 0) < number, "no damage was noticed"


@pytest.mark.parametrize("kind", KINDS)
def test_damages(kind: str, tmp_path: Path) -> None:
    """Always the same."""
    run(kind, tmp_path, 6 if "records" in kind else 12, 1)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_many_damages(kind: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("HOLDFAST_FUZZ_SEED") or random.SystemRandom().randrange(1 << 30))
    run(kind, tmp_path, int(os.environ.get("HOLDFAST_FUZZ", "2000")), seed)
