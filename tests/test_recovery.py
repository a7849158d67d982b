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


def play(script: str) -> tuple[list[str], list[str]]:
    """(trace, expected trace) of a script."""
    steps: list[int] = []
    damaged: dict[int, str] = {}
    head, expected = script.split("expect\n")
    for line in head.splitlines():
        match line.split():
            case ["steps", *numbers]:
                steps = [int(n) for n in numbers]
            case ["damaged", step, kind]:
                damaged[int(step)] = kind
            case [] | ["#", *_]:
                pass
            case _:
                raise AssertionError(f"unknown line {line!r}")
    trace: list[str] = []

    def attempt(candidate: Candidate) -> None:
        step = candidate.step
        trace.append(f"try {step}")
        if step in damaged:
            raise getattr(errors, damaged[step])(f"step {step} is bad")

    def passed_over(candidate: Candidate, error: HoldfastError) -> None:
        trace.append(f"pass over {candidate.step}: {type(error).__name__}")

    try:
        found = newest_good(newest_first(Candidate(1, n) for n in steps), attempt, passed_over)
        trace.append(f"restored {found.step if found else 0}")
    except NotRecoverable as error:
        trace.append(f"not recoverable: {' '.join(f'{s}' for s in error.reasons)}")
        trace += [f"because {reason}" for reason in error.reasons.values()]
    except HoldfastError as error:
        trace.append(f"raised {type(error).__name__}: {error}")
    return trace, [line.strip() for line in expected.splitlines() if line.strip()]


def test_there_are_scenarios() -> None:
    assert len(SCRIPTS) >= 6


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_scenario(path: Path) -> None:
    trace, expected = play(path.read_text())
    assert trace == expected
