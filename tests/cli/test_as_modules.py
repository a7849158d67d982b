"""Whatever of the package can be run with `python -m` does its work, or says how it is called."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from builders import FSDP_TP, build, transformer
from holdfast.cli.verbs import VERBS
from holdfast.store import LocalStore

ROOT = Path(__file__).parent.parent.parent


def run_module(name: str, *args: str) -> int:
    """`python -m NAME ARGS` in this process; its exit status."""
    argv, sys.argv = sys.argv, [name, *args]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.argv = argv
    raise AssertionError(f"python -m {name} {args} did nothing")


@pytest.mark.parametrize("name", ["holdfast", "holdfast.cli", "holdfast.cli.main"])
def test_the_command_line_as_a_module(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_module(name, "--version") == 0
    assert capsys.readouterr().out.startswith("holdfast ")
    assert run_module(name, "ls", "/no/such/root") == 1
    assert "no steps in file:///no/such/root" in capsys.readouterr().out
    assert run_module(name) == 2


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_as_a_module(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_module(f"holdfast.cli.{verb}") == 2
    assert f"Usage: holdfast {verb} " in "".join(capsys.readouterr())


def test_a_process_that_is_started_so(tmp_path: Path) -> None:
    """Nothing of this process helps it: `convert` writes what was asked for, and exits 0."""
    build(LocalStore(tmp_path / "src"), FSDP_TP, transformer())
    command = [sys.executable, "-m", "holdfast", "convert", "src", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "converted" in done.stdout
    assert list(tmp_path.glob("out/steps/*/manifest.json"))


def test_every_main_function_is_called_when_its_file_is_run() -> None:
    folders = ("src", "bench", "examples", "docs")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    lacking = []
    for path in files:
        body = ast.parse(path.read_text()).body
        functions = [n for n in body if isinstance(n, ast.FunctionDef) and n.name == "main"]
        mains = [n for n in functions if len(n.args.args) == len(n.args.defaults)]
        guards = [ast.unparse(n.test) for n in body if isinstance(n, ast.If)]
        if mains and "__name__ == '__main__'" not in guards:
            lacking.append(str(path.relative_to(ROOT)))
    assert lacking == []
