"""`prove` names each cause of the table by a script that shows it, and finds nothing in it once mended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.prove.report import TO_DO
from prove.cases import Case, proved
from prove.table import CASES, LEFT_OUT

HERE = Path(__file__).parent
NAMES = [case.script.removesuffix(".py") for case in CASES]
CAUSES = [name for name in NAMES if name.startswith("causes/")]
QUICK = (
    *CAUSES,
    "scenarios/04_saved_while_evaluating",
    "scenarios/10_states_made_to_be_loaded",
    "scenarios/29_statistics_of_each_rank",
)
MENDED = ("causes/accumulation", "causes/scaler", "causes/replicas_differ")


@pytest.mark.soak_except(*QUICK)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_cause_is_named(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_home(tmp_path, monkeypatch)
    cause, text = proved(case, HERE / case.script, tmp_path)
    assert cause == case.answer, f"{case.why}; but prove says\n{text}"


@pytest.mark.soak_except(*MENDED)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_what_was_mended_is_exact(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_home(tmp_path, monkeypatch)
    cause, text = proved(case, HERE / case.script, tmp_path, "--right")
    assert cause == "exact", text


@pytest.mark.soak
@pytest.mark.parametrize(
    ("launcher", "cause"),
    [
        ([], "begun-anew"),
        (["-m", "torchrun", "--standalone", "--nproc-per-node", "2"], "replicas-differ"),
    ],
    ids=["python", "torchrun"],
)
def test_new_interpreters_are_observed_as_forked_ones(
    launcher: list[str], cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_home(tmp_path, monkeypatch)
    script = HERE / "causes" / f"{cause.replace('-', '_')}.py"
    prove = [sys.executable, "-m", "holdfast", "prove", "--steps", "12", "--json", "--"]
    command = [*prove, sys.executable, *launcher, str(script), "--root", "root"]
    env = os.environ | {"PYTHONPATH": str(HERE.parent)}  # torchrun there meets at a port of its own
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=500
    )
    said = json.loads(done.stdout)
    assert (done.returncode, said["exact"], said["cause"]) == (1, False, cause), done.stderr


def at_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder that is empty, and have another one for a home."""
    for name in ("home", "work"):
        (folder / name).mkdir()
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.chdir(folder / "work")


def test_each_cause_has_a_script_and_a_line_in_the_table_of_causes() -> None:
    page = (HERE.parents[1] / "docs" / "reference" / "causes.md").read_text()
    scripts = {case.answer: case.script for case in CASES if case.script.startswith("causes/")}
    assert TO_DO.keys() - {"elsewhere", "unexplained"} <= scripts.keys()
    for name, script in scripts.items():
        assert f"[`{name}`](../../tests/prove/{script})" in page
    files = {path.stem for path in (HERE / "causes").glob("*.py")} - {"parts"}
    assert files == {Path(script).stem for script in scripts.values()}


def test_each_report_has_a_script_or_a_reason() -> None:
    scripts = [Path(case.script).name for case in CASES if case.script.startswith("scenarios/")]
    assert {int(name[:2]) for name in scripts} | LEFT_OUT.keys() == {*range(1, 36)}
    there = {path.name for path in (HERE / "scenarios").glob("[0-9]*.py")}
    assert {name for name in there if name[:2] <= "35"} == {*scripts}
