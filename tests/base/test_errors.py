"""The exception tree: as drawn, picklable, and saying where."""

from __future__ import annotations

import inspect
import pickle

import pytest

from holdfast import errors

KINDS = [
    k for _, k in inspect.getmembers(errors, inspect.isclass) if issubclass(k, errors.HoldfastError)
]
EXTRA = {errors.RankErrors: ({3: "disk full"},)}


def make(kind: type[errors.HoldfastError]) -> errors.HoldfastError:
    where = {"step": 7, "key": "steps/x", "rank": 3, "hint": "do this"}
    return kind("it failed", *EXTRA.get(kind, ()), **where)


@pytest.mark.parametrize("kind", KINDS)
def test_survives_pickling_with_all_it_knows(kind) -> None:
    error = make(kind)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert str(back) == str(error)
    assert back.__dict__ == error.__dict__


@pytest.mark.parametrize("kind", KINDS)
def test_says_where_and_what_to_do(kind) -> None:
    text = str(make(kind))
    assert "it failed" in text
    assert "step 7" in text
    assert "steps/x" in text
    assert text.endswith("hint: do this")


def test_the_tree_is_the_one_in_the_docstring() -> None:
    drawn = set(errors.__doc__.split("```")[1].replace("(", " ").split()) & {
        k.__name__ for k in KINDS
    }
    assert drawn == {k.__name__ for k in KINDS}
    assert all(issubclass(k, errors.HoldfastError) for k in KINDS)
    assert issubclass(errors.UsageError, ValueError)


def test_what_may_be_tried_again() -> None:
    retryable = {k for k in KINDS if getattr(k, "retryable", False)}
    assert retryable == {errors.Unavailable}


def test_where_is_not_said_twice() -> None:
    assert str(errors.NotFound("no step 5 here", step=5)).count("5") == 1


def test_a_number_that_the_message_has_for_something_else_is_no_place() -> None:
    assert "step 20" in str(errors.Corrupt("digest 18edba20", step=20))
    assert "rank 3" in str(errors.StoreError("3 bytes are missing", rank=3))
    assert str(errors.StoreError("rank 3 failed", rank=3)) == "rank 3 failed"


def test_corrupt_keeps_its_range() -> None:
    error = errors.Corrupt("bad", start=3, stop=9, expected="aa", found="bb")
    back = pickle.loads(pickle.dumps(error))
    assert (back.start, back.stop, back.expected, back.found) == (3, 9, "aa", "bb")


def test_rank_errors_name_every_rank() -> None:
    error = errors.RankErrors("save", {5: "full", 2: "gone"})
    assert str(error) == "save failed on 2 rank(s)\n  rank 2: gone\n  rank 5: full"
    assert error.errors == {5: "full", 2: "gone"}
