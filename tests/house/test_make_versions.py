"""`make versions`: what a report of pytest becomes, how failed tests are run again, and the page of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
REPORT = """<testsuites><testsuite>
<testcase classname="tests.base.test_text" name="test_one[a.b]" />
<testcase classname="tests.core.store.test_local.TestLocalStore" name="test_two"><failure message="" />
</testcase>
<testcase classname="" name="tests.live.test_three"><error message="collection failure" /></testcase>
<testcase classname="tests.base.test_text" name="test_four"><error message="at its end" /></testcase>
<testcase classname="tests.base.test_text" name="test_five">
  <skipped type="pytest.skip" message="this torch has no Muon" /></testcase>
<testcase classname="tests.base.test_text" name="test_six">
  <skipped type="pytest.skip" message="this torch has no Muon" /></testcase>
</testsuite></testsuites>"""
FAILED = [
    "::tests.live.test_three",
    "tests.base.test_text::test_four",
    "tests.core.store.test_local.TestLocalStore::test_two",
]


@pytest.fixture(scope="module")
def versions() -> Iterator[ModuleType]:
    sys.path[:0] = [str(ROOT / ".ci"), str(ROOT / "docs")]
    try:
        yield import_module("versions")
    finally:
        del sys.path[:2]


def test_a_report_is_counted_with_the_reasons_of_what_was_skipped(
    versions: ModuleType, tmp_path: Path
) -> None:
    report = tmp_path / "report.xml"
    assert versions.results(report) == {"passed": 0, "failed": [], "skipped": {}}
    report.write_text(REPORT)
    expected = {"passed": 1, "failed": FAILED, "skipped": {"this torch has no Muon": 2}}
    assert versions.results(report) == expected


def test_what_failed_is_run_again_and_added_to_the_record(
    versions: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def run(row: Any, place: Path, tests: list[str], workers: int) -> dict[str, Any]:
        asked.extend(tests)
        now = {"commit": "new", "date": "2026-12-02", "hung": False, "passed": 2}
        return {**now, "failed": FAILED[:1], "skipped": {"this torch has no Muon": 1}}

    monkeypatch.setattr(versions, "run", run)
    record = {
        "commit": "old", "hung": True, "passed": 9, "failed": FAILED,
        "skipped": {"no CUDA device": 1, "this torch has no Muon": 2},
    }  # fmt: skip
    row = versions.Row("torch", "2.6.0", ("-m", "not soak", "tests/base"))
    assert versions.again(record, row, Path(), 1) == {
        "commit": "old", "hung": False, "passed": 11, "failed": FAILED[:1],
        "skipped": {"this torch has no Muon": 3, "no CUDA device": 1},
        "again": [{"commit": "new", "date": "2026-12-02", "tests": FAILED}],
    }  # fmt: skip
    assert asked == [
        "-m",
        "not soak",
        "tests/live/test_three.py",
        "tests/base/test_text.py::test_four",
        "tests/core/store/test_local.py::TestLocalStore::test_two",
    ]


def test_rows_are_asked_for_by_package_or_version(versions: ModuleType) -> None:
    assert versions.rows_of([]) == versions.ROWS
    oldest, newest = versions.rows_of(["lightning"])
    assert newest.version == versions.NEWEST and oldest.tests == newest.tests
    assert versions.rows_of(["lightning==2.5.0"]) == [
        versions.Row("lightning", "2.5.0", oldest.tests)
    ]
    with pytest.raises(SystemExit, match="no rows of numpy; there are: torch, transformers"):
        versions.rows_of(["torch", "numpy"])


def test_the_oldest_row_is_the_floor(versions: ModuleType) -> None:
    from holdfast.base.torch_version import OLDEST

    first = versions.rows_of(["torch"])[0].version
    assert tuple(map(int, first.split(".")))[:2] == OLDEST


def test_the_page_says_what_a_version_lacks(versions: ModuleType) -> None:
    page = import_module("make_versions")
    record = {
        "package": "torch",
        "version": "2.6.0",
        "date": "2026-12-01",
        "passed": 7,
        "failed": [],
    }
    skipped = {"no CUDA device here": 3, "this torch has no Muon": 2, "this torch has no float4": 1}
    assert page._row({**record, "skipped": skipped}) == (
        "| torch | 2.6.0 | 2026-12-01 | 7 | 6 | Muon (2), float4 (1) | none |"
    )
