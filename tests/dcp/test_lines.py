"""A `Writer` deletes no steps of a history that its training did not go on from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import holdfast

RUN = """
import sys, torch, torch.distributed.checkpoint as dcp, holdfast
from holdfast.dcp import Reader, Writer
root, loads, *steps = sys.argv[1:]
state = {"x": torch.zeros(3)}
if loads == "load":
    dcp.load(state, storage_reader=Reader(root))
writer = Writer(root, keep=holdfast.Keep(last=2))
for step in steps:
    dcp.save(state, storage_writer=writer, checkpoint_id=step)
writer.wait()
"""


def run(root: Path, *arguments: str) -> list[int]:
    """Train in a process of its own; return the steps that are there then."""
    command = [sys.executable, "-W", "ignore", "-c", RUN, str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return holdfast.steps(root)


def test_a_run_that_loaded_nothing_deletes_its_own_steps_alone(tmp_path: Path) -> None:
    assert run(tmp_path, "", "800", "900", "1000") == [900, 1000]
    assert run(tmp_path, "", "2", "3", "4") == [3, 4, 900, 1000]
    assert run(tmp_path, "", "1100", "1200", "1300") == [3, 4, 900, 1000, 1200, 1300]


def test_a_run_deletes_what_it_went_on_from(tmp_path: Path) -> None:
    assert run(tmp_path, "", "1", "2", "3") == [2, 3]
    assert run(tmp_path, "load", "4") == [3, 4]
    assert run(tmp_path, "load", "5") == [4, 5]  # step 3 is of the run before the one before
