"""`prove` names the cause of each script of the tables, and finds nothing in the same script mended."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from prove.cases import Case, proved
from prove.table_two import CASES, LEFT_OUT

SCRIPTS = Path(__file__).with_name("scenarios")
NAMES = [case.script.removesuffix(".py") for case in CASES]
QUICK = (
    "36_ema_updates",
    "55_second_resume_in_an_epoch",
    "58_epoch_set_at_the_end",
    "v04_one_cycle_made_anew",
    "v28_dcp_into_an_empty_optimizer",
    "v29_holdfast_with_all",
)


@pytest.mark.soak_except(*QUICK)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_cause_is_named(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shutil.copytree(SCRIPTS, tmp_path / "scripts"))
    cause, text = proved(case, Path(case.script), tmp_path)
    assert cause == case.answer, f"{case.why}; but prove says\n{text}"


@pytest.mark.soak_except("55_second_resume_in_an_epoch", "58_epoch_set_at_the_end")
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_what_was_mended_is_exact(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shutil.copytree(SCRIPTS, tmp_path / "scripts"))
    cause, text = proved(case, Path(case.script), tmp_path, "--right")
    assert cause == "exact", text


def test_each_report_has_a_script_or_a_reason() -> None:
    shown = {int(name[:2]) for name in NAMES if name[0].isdigit()}
    assert not shown & LEFT_OUT.keys()
    assert shown | LEFT_OUT.keys() == {*range(36, 71)}
    there = {path.stem for path in SCRIPTS.glob("*.py")}
    assert {n for n in there if n[0] == "v" or "36" <= n[:2] <= "70"} == {*NAMES}
