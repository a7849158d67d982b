"""The mark `soak_except` names cases that are there, and leaves the others to the soak."""

from __future__ import annotations

import pytest

from soaking import cases_of, leave_to_the_soak

CASES = ["a", "b", "c"]


@pytest.mark.soak_except("a", "b")
@pytest.mark.parametrize("case", CASES)
def test_the_others_are_soak(case: str, request: pytest.FixtureRequest) -> None:
    assert (request.node.get_closest_marker("soak") is None) == (case in ("a", "b"))


def test_cases_that_will_be_asked_for(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chosen, wanted in (("not soak", ["a", "b"]), ("", CASES)):
        monkeypatch.setattr(request.config.option, "markexpr", chosen)
        assert cases_of(request, "test_the_others_are_soak", CASES) == wanted


def test_a_name_that_is_of_no_case_ends_the_run(request: pytest.FixtureRequest) -> None:
    mine = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_the_others_are_soak"
    ]
    with pytest.raises(pytest.UsageError, match=r"test_soaking.py::test_the_others_are_soak: b"):
        leave_to_the_soak([item for item in mine if item.callspec.id != "b"], are_all=True)
    leave_to_the_soak([item for item in mine if item.callspec.id != "b"], are_all=False)
