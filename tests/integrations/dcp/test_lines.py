"""A `Writer` deletes no steps of a history that its training did not go on from."""

from __future__ import annotations

from pathlib import Path

import holdfast
import zygote

RUN = """
import sys, torch, torch.distributed.checkpoint as dcp, holdfast
from holdfast.dcp import Reader, Writer
root, loads, *steps = sys.argv[1:]
state = {"x": torch.zeros(3)}
if loads:
    dcp.load(state, storage_reader=Reader(root), checkpoint_id=None if loads == "load" else loads)
writer = Writer(root, keep=holdfast.Keep(last=2))
for step in steps:
    dcp.save(state, storage_writer=writer, checkpoint_id=step)
writer.wait()
"""


def run(root: Path, *arguments: str) -> list[int]:
    """Train in a process of its own; return the steps that are there then."""
    done = zygote.run(["-c", RUN, root, *arguments])
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


def test_a_run_that_went_on_from_another_history(tmp_path: Path) -> None:
    assert run(tmp_path, "", "900", "1000") == [900, 1000]
    assert run(tmp_path, "", "3", "4") == [3, 4, 900, 1000]
    assert run(tmp_path, "1000", "1100") == [3, 4, 1000, 1100]  # not the newest run's 3 and 4


FAILS = """
import sys, torch, torch.distributed.checkpoint as dcp, holdfast
from holdfast.dcp import Writer
state, writer = {"x": torch.zeros(3)}, Writer(sys.argv[1], keep=holdfast.Keep(last=1))
try:
    dcp.save({**state, "y": lambda: 1}, storage_writer=writer, checkpoint_id="5")
except BaseException as error:
    print("failed")
for step in "67":
    dcp.save(state, storage_writer=writer, checkpoint_id=step)
writer.wait()
"""


def test_a_run_whose_first_save_fails(tmp_path: Path) -> None:
    assert run(tmp_path, "", "3", "4") == [3, 4]
    done = zygote.run(["-c", FAILS, tmp_path])
    assert (done.returncode, done.stdout) == (0, "failed\n"), done.stderr
    assert holdfast.steps(tmp_path) == [3, 4, 7]
