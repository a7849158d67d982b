"""A rank that never calls, is stopped or dies: each call of the others ends, and says who and what."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from partners.ranks import BOUND_S, CALLS, DEADLINE_S, RANKS, WITH_CHECKPOINTER, Case

TESTS = Path(__file__).parents[1]
LONGEST_S = 2 * DEADLINE_S + 25
"""A rank gives rank 0 ten seconds more than the others to answer, and from its last sign of life anew."""
IN_THE_MIDDLE = ("save", "load", "construct", "restore", "convert")
"""Calls in which a rank may also be stopped or die when all have begun."""
FIRST = [
    "save-never-1",
    "save-never-0",
    "load-stops-1",
    "construct-stopped-0",
    "background-dies-1",
    "convert-killed-1",
    "steps+memory-stopped-1",
    "steps+delta-dies-0",
    "close+memory+delta-stopped-1",
]
"""What `make test` does; together they take hardly longer than one."""
REST = [
    f"{call}-{fate}-{victim}"
    for call in CALLS
    if call != "steps"  # of which none has to do with another rank then
    for fate in ("never", "stopped", "dies", "stops", "killed")
    for victim in (0, 1)
    if f"{call}-{fate}-{victim}" not in FIRST
    and (fate in ("never", "stopped", "dies") or call in IN_THE_MIDDLE)
]
REST += [
    f"{call}+memory+delta-{fate}-{victim}"
    for call in WITH_CHECKPOINTER
    for fate in ("never", "stopped", "dies")
    for victim in (0, 1)
    if f"{call}+memory+delta-{fate}-{victim}" not in FIRST
]
BATCH = 4


def lines_of(folder: Path, cases: list[str]) -> list[dict[str, object]]:
    """What each rank of the cases has seen."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "RES_OPTIONS": "timeout:1 attempts:1",  # torch looks up the names of whom it connects to
    }
    ran = subprocess.run(
        [sys.executable, "-m", "partners.ranks", str(folder), *cases],
        capture_output=True,
        text=True,
        env=environment,
        timeout=2 * (DEADLINE_S + BOUND_S) + 60,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [json.loads(line) for line in ran.stdout.splitlines()]


def check(text: str, lines: list[dict[str, object]]) -> None:
    """Every rank but the victim has ended in time, with an error that names the victim and the call."""
    case = Case.parse(text)
    assert len(lines) == RANKS
    for seen in lines:
        if seen["rank"] == case.victim:
            assert "error" not in seen, seen
            continue
        assert "error" in seen, f"{text}: rank {seen['rank']} hangs\n{str(seen['log'])[-3000:]}"
        error = str(seen["error"])
        assert float(str(seen["took_s"])) < LONGEST_S, seen
        awaited = CALLS[case.call][1]
        assert re.match(r"(Deadline|AgentError): ", error), (text, error)
        if not awaited:  # which error comes first is open: each says for whom it waited
            assert re.search(r"\branks? \d", error), (text, error)
        if awaited:
            assert re.search(rf"\branks? {case.victim}\b", error), (text, error)
            assert awaited in error or "step 2" in error, (text, error)


@pytest.mark.distributed
def test_the_others_end_and_say_who_and_what(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, FIRST)
    for case in FIRST:
        check(case, [line for line in lines if line["case"] == case])


@pytest.mark.distributed
@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, len(REST), BATCH))
def test_whatever_the_call(tmp_path: Path, first: int) -> None:
    cases = REST[first : first + BATCH]
    lines = lines_of(tmp_path, cases)
    for case in cases:
        check(case, [line for line in lines if line["case"] == case])
