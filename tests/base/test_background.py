"""Processes in the background: where they run, what they know, and how their end is told."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.base.background import ending, spawn

SAY = """
import json, os, sys
import holdfast

def main():
    said = {
        "cwd": os.getcwd(), "arguments": sys.argv[1:], "holdfast": holdfast.__file__, "path": sys.path,
        "leads": os.getsid(0) == os.getpid(), "stdin": os.readlink("/proc/self/fd/0"),
        "variables": dict(os.environ),
    }
    print(json.dumps(said), flush=True)
    return 3
"""


def test_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the working directory has a package of the same name, and a path is relative to it."""
    (tmp_path / "holdfast").mkdir()
    (tmp_path / "holdfast" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "says_so.py").write_text(SAY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "lib")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("NCCL_DEBUG", "x")
    with (tmp_path / "log").open("wb") as log:
        process = spawn("says_so", ["--a", "b"], variables={"MORE": "1"}, log=log)
        assert process.wait(300) == 3
    said = json.loads((tmp_path / "log").read_text())
    assert (said["cwd"], said["stdin"], said["leads"]) == ("/", "/dev/null", True)
    assert said["arguments"] == ["--a", "b"]
    assert said["holdfast"] == holdfast.__file__
    assert said["variables"]["MORE"] == "1"
    assert not [v for v in said["variables"] if v.startswith(("TORCHELASTIC", "NCCL_"))]
    assert "" not in said["path"] and str(tmp_path) not in said["path"]


def test_the_ways_to_end() -> None:
    assert ending(1) == "ended with 1"
    assert ending(-signal.SIGKILL) == "was killed by SIGKILL"
    assert ending(-250) == "was killed by signal 250"
    process = subprocess.Popen([sys.executable, "-c", "import os; os.abort()"])
    process.wait(300)
    assert ending(process.returncode) == "was killed by SIGABRT"
