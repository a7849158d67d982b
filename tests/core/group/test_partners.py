"""A rank that never calls, is stopped, dies or has no space: each call of each rank ends, and says who and
what, by an error of holdfast's own."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

import holdfast
import zygote
from base.test_arguments import public_calls
from core.group.ranks import ALONE, BOUND_S, CALLS, DEADLINE_S, LITTLE_BYTES, RANKS, Case

TESTS = Path(__file__).parents[2]
LONGEST_S = 2 * DEADLINE_S + 25
"""A rank gives rank 0 ten seconds more than the others to answer, and from its last sign of life anew."""

# -- a rank lets the others down ------------------------------------------------------------------

BEFORE = ("never", "stopped", "dies")
AFTER = ("stops", "killed")
IN_THE_MIDDLE = ("save", "load", "construct", "restore", "find", "convert")
"""Calls in which a rank may also be stopped or die when all have begun."""
WITH_TIERS = ("restore", "find", "background", "step", "steps", "wait", "close")
NEED_TIERS = ("steps", "tenth", "snapshot")
"""Calls in which ranks have nothing to do with each other if there is storage alone."""
FIRST = [
    "save-never-1",
    "load-stops-1",
    "construct-stopped-0",
    "convert-killed-1",
    "steps+delta-dies-0",
    "close+memory+delta-stopped-1",
]
"""What `make test` does; together they take hardly longer than one."""


def let_down(calls: Iterable[str], fates: Iterable[str]) -> list[str]:
    return [f"{call}-{fate}-{victim}" for call in calls for fate in fates for victim in (0, 1)]


LET_DOWN = [
    *let_down((call for call in CALLS if call not in NEED_TIERS), BEFORE),
    *let_down(IN_THE_MIDDLE, AFTER),
    *let_down(("snapshot+memory", "tenth+auto"), BEFORE),
    *let_down((f"{call}+memory+delta" for call in WITH_TIERS), BEFORE),
]

# -- a rank has no space --------------------------------------------------------------------------

SAVING = ("save", "background", "step", "wait", "close", "called", "dcp_save")
"""Calls that have saved step 2 when they end without an error."""
NO_SPACE = r"StoreError: .*\bEFBIG\b"
ON_THE_VICTIM = r"RankErrors: .*\brank {victim}: "
EXPECTED: tuple[tuple[str, str, tuple[int, ...], str], ...] = (
    ("save background step wait close called", "full", (0, 1), ON_THE_VICTIM + NO_SPACE),
    ("dcp_save", "full", (0, 1), r"CheckpointException: .*\(RANK {victim}\).*" + NO_SPACE),
    ("load restore find unpin dcp_load", "full", (0, 1), ""),  # nothing is written
    ("construct pin metrics convert", "full", (0,), NO_SPACE),  # by rank 0, for all
    ("construct pin metrics", "full", (1,), ""),
    (
        "snapshot+memory",
        "short",
        (0, 1),
        rf"{ON_THE_VICTIM}OutOfSpace: .*\bbudget is {LITTLE_BYTES} bytes",
    ),
    ("background+memory step+memory wait+memory close+memory", "short", (0, 1), ""),  # to storage
    ("construct+memory restore+memory find+memory", "short", (1,), ""),
)
"""Calls, how the victim is full, which rank it is, and what every rank says; empty: the call succeeds."""
FULL = {
    f"{call}-{fate}-{victim}": said.format(victim=victim)
    for calls, fate, victims, said in EXPECTED
    for call in calls.split()
    for victim in victims
}
MORE = [
    "find-stopped-1",
    "dcp_save-dies-1",
    "save-full-1",
    "step-full-0",
    "restore-full-1",
    "dcp_save-full-1",
    "snapshot+memory-short-1",
]
"""What `make test` does as well; where a rank is full, none has to wait."""
REST = [case for case in (*LET_DOWN, *FULL) if case not in (*FIRST, *MORE)]
BATCH = 16


def lines_of(folder: Path, cases: list[str]) -> list[dict[str, object]]:
    """What each rank of the cases has seen."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "RES_OPTIONS": "timeout:1 attempts:1",  # torch looks up the names of whom it connects to
    }
    ran = zygote.run(
        ["-m", "core.group.ranks", folder, *cases],
        env=environment,
        timeout=2 * (DEADLINE_S + BOUND_S) + 60,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [json.loads(line) for line in ran.stdout.splitlines()]


def error_of(text: str, seen: dict[str, object]) -> str:
    """The error by which a rank's call has ended, in time; empty if it has succeeded."""
    assert "error" in seen, f"{text}: rank {seen['rank']} hangs\n{str(seen['log'])[-3000:]}"
    assert float(str(seen["took_s"])) < LONGEST_S, seen
    return str(seen["error"])


def check_let_down(case: Case, lines: list[dict[str, object]]) -> None:
    """Every rank but the victim has ended with an error that names the victim and the call."""
    call, text = CALLS[case.call], str(case)
    kinds = r"RuntimeError|Dist\w*Error" if call.is_torchs else "Deadline|AgentError"
    for seen in lines:
        if seen["rank"] == case.victim:
            assert "error" not in seen, seen
            continue
        error = error_of(text, seen)
        if not error and call.is_told and case.victim != 0:
            continue
        assert re.match(rf"({kinds}): ", error), (text, error)
        assert re.search(call.who.format(victim=case.victim), error), (text, error)
        assert call.awaited in error or "step 2" in error, (text, error)


def check_full(case: Case, lines: list[dict[str, object]], folder: Path) -> None:
    """Every rank has ended in the same way, the victim too, and there is no step that was not saved."""
    text, said = str(case), FULL[str(case)]
    for seen in lines:
        error = error_of(text, seen)
        assert re.match(said, error, re.DOTALL) if said else not error, (text, error)
    is_saved = case.call in SAVING and not said
    assert holdfast.steps(folder / text) == ([1, 2] if is_saved else [1]), text


def run_and_check(folder: Path, cases: list[str]) -> None:
    """Errors that are not of holdfast's own are nowhere, and each case is as it should be."""
    lines = lines_of(folder, cases)
    for text in cases:
        case, of_case = Case.parse(text), [line for line in lines if line["case"] == text]
        assert len(of_case) == RANKS
        for seen in of_case:
            assert "raised" not in seen, f"{text}: rank {seen['rank']}\n{seen['raised']}"
        if case.is_full:
            check_full(case, of_case, folder)
        else:
            check_let_down(case, of_case)


@pytest.mark.distributed
@pytest.mark.parametrize("cases", [FIRST, MORE], ids=["let down", "full"])
def test_every_rank_ends_and_says_who_and_what(tmp_path: Path, cases: list[str]) -> None:
    run_and_check(tmp_path, cases)


@pytest.mark.distributed
@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, len(REST), BATCH))
def test_whatever_the_call(tmp_path: Path, first: int) -> None:
    run_and_check(tmp_path, REST[first : first + BATCH])


def test_every_public_call_is_driven_or_has_to_do_with_no_other_rank() -> None:
    """A new function or method comes into one of the two tables."""
    calls = public_calls()
    driven = {name for call in CALLS.values() for name in call.names}
    functions = {name for name, call in calls.items() if not inspect.isclass(call)}
    assert not sorted(functions - driven - set(ALONE)), "in neither table"
    assert not sorted(driven & set(ALONE)), "in both"
    assert not sorted((driven | set(ALONE)) - set(calls)), "not there"
