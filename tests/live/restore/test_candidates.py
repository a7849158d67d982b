"""Which step is restored: every script in tests/live/restore/scenarios, with its whole trace.

A script says what there is, newest last, and what must happen:

    steps 10 20 30
    damaged 30 Corrupt
    expect
      try 30
      pass over 30: Corrupt
      try 20
      restored 20
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from holdfast import errors
from holdfast.core.checkpoint.listing import came_later
from holdfast.errors import HoldfastError, NotRecoverable
from holdfast.live.restore.candidates import Candidate, newest_first, newest_good

SCRIPTS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


def snapshot(run: int, step: int, attempt: str = "") -> Candidate:
    attempt = attempt or f"{run:04d}-{step:06d}"
    return Candidate(run, step, attempt, tier="memory", place="memory", nearness=1)


def told(candidate: Candidate) -> str:
    return ("memory " if candidate.in_memory else "") + str(candidate.step)


def play(script: str) -> tuple[list[str], list[str]]:
    """(trace, expected trace) of a script."""
    there: list[Candidate] = []
    damaged: dict[str, str] = {}
    head, expected = script.split("expect\n")
    for line in head.splitlines():
        match line.split():
            case ["steps", *numbers]:
                there += [Candidate(1, int(n)) for n in numbers]
            case ["memory", *numbers]:
                there += [snapshot(1, int(n)) for n in numbers]
            case ["run", run, "steps", *numbers]:
                there += [Candidate(int(run), int(n)) for n in numbers]
            case ["run", run, "memory", *numbers]:
                there += [snapshot(int(run), int(n), f"{run}-{n}") for n in numbers]
            case ["damaged", *what, kind]:
                damaged[" ".join(what)] = kind
            case [] | ["#", *_]:
                pass
            case _:
                raise AssertionError(f"unknown line {line!r}")
    trace: list[str] = []

    def attempt(candidate: Candidate) -> None:
        trace.append(f"try {told(candidate)}")
        if told(candidate) in damaged:
            raise getattr(errors, damaged[told(candidate)])(f"{candidate} is bad")

    def passed_over(candidate: Candidate, error: HoldfastError) -> None:
        trace.append(f"pass over {told(candidate)}: {type(error).__name__}")

    try:
        found = newest_good(newest_first(there), attempt, passed_over)
        trace.append(f"restored {told(found) if found else 0}")
    except NotRecoverable as error:
        trace.append(f"not recoverable: {' '.join(f'{s}' for s in error.reasons)}")
        trace += [f"because {reason}" for reason in error.reasons.values()]
    except HoldfastError as error:
        trace.append(f"raised {type(error).__name__}: {error}")
    return trace, [line.strip() for line in expected.splitlines() if line.strip()]


def test_there_are_scenarios() -> None:
    assert len(SCRIPTS) >= 16


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_scenario(path: Path) -> None:
    trace, expected = play(path.read_text())
    assert trace == expected


@pytest.mark.parametrize("memory", [False, True])
def test_what_to_do_where_nothing_can_be_restored(memory: bool) -> None:
    def attempt(candidate: Candidate) -> None:
        raise errors.Corrupt("it is bad")

    there = [Candidate(1, 10), snapshot(1, 20) if memory else Candidate(1, 20)]
    with pytest.raises(NotRecoverable) as caught:
        newest_good(there, attempt, lambda *_: None)
    assert "holdfast verify" in caught.value.hint
    assert ("holdfast agent clean" in caught.value.hint) is memory


def test_of_two_saves_of_a_step_the_later_one_comes_first() -> None:
    stored, before = Candidate(1, 20), replace(snapshot(1, 20), replaced=True)
    assert newest_first([before, stored]) == [stored, before]
    assert newest_first([stored, snapshot(1, 20)])[1] == stored


@pytest.mark.parametrize(
    ("attempt", "than", "later"),
    [
        ("0001-000020", "0001-000020", False),
        ("0001-000021", "0001-000020", True),
        ("0001-000019", "0001-000020", False),
        ("0001-1000000", "0001-999999", True),
        ("once-0-1-2-3", "0001-000020", True),
        ("0001-000020", "once-0-1-2-3", False),
    ],
)
def test_which_save_came_later(attempt: str, than: str, later: bool) -> None:
    assert came_later(attempt, than) is later
