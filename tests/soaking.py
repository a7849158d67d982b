"""The mark `soak_except`: `make test` runs those cases of a test that it names, `make soak` the others.

@pytest.mark.soak_except("adamw", "sgd")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_is_replayed(optimizer): ...

A name is the whole of what stands in the brackets of a test's name.  One that is of no case ends the run.

Some files prepare many cases in one launch of ranks.  `cases_of` gives the names of those that will be
asked for, so that what is left to the soak is not prepared in vain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest


def leave_to_the_soak(items: Iterable[pytest.Function], *, are_all: bool) -> None:
    """Mark with `soak` what `soak_except` does not name.  UsageError if it names what is not there, unless
    these are not all tests of their files."""
    unmatched: dict[str, set[str]] = {}
    for item in items:
        for mark in item.iter_markers("soak_except"):
            test = item.nodeid.partition("[")[0]
            unmatched.setdefault(test, set(mark.args)).discard(item.callspec.id)
            if item.callspec.id not in mark.args:
                item.add_marker("soak")
    wrong = [f"{test}: {name}" for test, names in unmatched.items() for name in sorted(names)]
    if are_all and wrong:
        raise pytest.UsageError("soak_except names cases that are not there: " + ", ".join(wrong))


def cases_of(request: pytest.FixtureRequest, test: str, names: Sequence[str]) -> list[str]:
    """Of the cases that a test of this file is parametrized with, those that will be asked for."""
    if "not soak" not in request.config.option.markexpr:
        return list(names)
    marks = {mark.name: mark for mark in getattr(request.module, test).pytestmark}
    if "soak" in marks:
        return []
    kept = marks["soak_except"].args if "soak_except" in marks else names
    return [name for name in names if name in kept]
