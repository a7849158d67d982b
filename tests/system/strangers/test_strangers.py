"""Objects that nobody here wrote come back bit for bit, or are refused with their names."""

import functools
import importlib.util

import pytest

from system.strangers.subjects import LACKING
from system.strangers.table import PACKAGES, PAGE, counted, tried, written
from system.strangers.trial import EQUAL, REFUSED
from system.strangers.unusual import SUBJECTS

OF_DEVELOPMENT = ("torch", "transformers")
"""Packages that are there without `make soak`, and quick."""

outcomes_of = functools.cache(tried)


def _marks(package: str) -> list[pytest.MarkDecorator]:
    module = {"pytorch-optimizer": "pytorch_optimizer", "DeepSpeed": "deepspeed"}
    missing = importlib.util.find_spec(module.get(package, package)) is None
    skip = pytest.mark.skipif(missing, reason=f"{package} is not installed: make soak")
    return [skip] if package in OF_DEVELOPMENT else [skip, pytest.mark.soak]


SECTIONS = [pytest.param(package, marks=_marks(package)) for package in PACKAGES]


@pytest.mark.parametrize("package", SECTIONS)
def test_strangers_are_equal_or_refused(package: str) -> None:
    outcomes = outcomes_of(package)
    assert outcomes.keys() == SUBJECTS[package].keys()
    bad = {n: o for n, o in outcomes.items() if o["verdict"] not in (EQUAL, REFUSED)}
    assert not bad, "\n".join(f"{n}: {o['verdict']}: {o['why'][-800:]}" for n, o in bad.items())


@pytest.mark.parametrize("package", SECTIONS)
def test_the_page_says_what_is_seen(package: str) -> None:
    for capability in LACKING.values():  # the page is of a torch that has all of it
        capability.require()
    outcomes = outcomes_of(package)
    page = PAGE.read_text()
    seen = written(package, outcomes).partition("\n")[2]  # but for the version
    assert seen.strip() in page, "write it again: python -m system.strangers.table"
    assert counted({package: outcomes}).splitlines()[2] in page
