"""Which step is restored: every script in tests/scenarios, with its whole trace.

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

from pathlib import Path

import pytest

from holdfast import errors
from holdfast.errors import HoldfastError, NotRecoverable
from holdfast.recovery import Candidate, newest_first, newest_good

SCRIPTS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


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
                there += [Candidate(1, int(n), f"0001-{int(n):06d}") for n in numbers]
            case ["run", run, "steps", *numbers]:
                there += [Candidate(int(run), int(n)) for n in numbers]
            case ["run", run, "memory", *numbers]:
                there += [Candidate(int(run), int(n), f"{run}-{n}") for n in numbers]
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
