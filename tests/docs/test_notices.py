"""The page of notices has a row for each of them, and each row names a test that there is."""

from __future__ import annotations

import re
import warnings

import pytest

from docs.test_docs import DOCS, ROOT
from holdfast.errors import NOTICES, HoldfastWarning, UsageError, silence, warn_user

PAGE = (DOCS / "reference" / "notices.md").read_text()
TESTS = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


def test_each_notice_has_a_row() -> None:
    section = PAGE.split("## Notices")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", section, re.MULTILINE)) == set(NOTICES)


def test_each_row_has_a_test_that_there_is() -> None:
    rows = [
        line
        for section in ("Notices", "Refused")
        for line in PAGE.split(f"## {section}\n")[1].split("\n## ")[0].splitlines()
        if line.startswith("|") and not line.startswith(("| name |", "| what was seen |", "|---"))
    ]
    for row in rows:
        assert re.search(r"`tests/[\w/]+\.py::\w+`", row), row
    for path, name in TESTS:
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_a_notice_is_silenced_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NOTICES, "a-test", "of this test")
    monkeypatch.setattr("holdfast.errors._silenced", set())
    with pytest.warns(HoldfastWarning, match=r"seen \[a-test\]$"):
        warn_user("seen", notice="a-test")
    silence("a-test")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_user("seen", notice="a-test")
    with pytest.raises(UsageError, match="there is no notice 'a-tset'"):
        silence("a-tset")
