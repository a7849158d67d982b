"""The types that a user's editor sees: a checker of theirs accepts the examples."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PUBLIC = """
import holdfast
from holdfast import Delta, Every, Keep, Memory, errors, events, store

places: list[store.LocalStore] = []
every: holdfast.Every = Every(durable=10, memory=1)

def seen(event: events.Event) -> None:
    print(event.name)

with events.listen(seen):
    try:
        step: int = holdfast.load("runs/a", {}, step=3)
    except errors.NotRecoverable as error:
        print(error.hint, error.step)
with holdfast.Checkpointer("runs/a", {}, every=every, keep=Keep(last=2), delta=Delta()) as ckpt:
    found = ckpt.find()
    save = ckpt.save(1)
    save.wait()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project: the examples, and a file that names what is public."""
    for path in (ROOT / "examples").glob("*.py"):
        shutil.copy(path, tmp_path)
    (tmp_path / "public.py").write_text(PUBLIC)
    return tmp_path


@pytest.mark.soak
def test_mypy(project: Path) -> None:
    """As it is without a configuration, for torch's own types are not strict."""
    command = [sys.executable, "-m", "mypy", "--cache-dir=cache", "train.py", "public.py"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pyright(project: Path) -> None:
    """By basedpyright, which brings its own node, in pyright's usual mode."""
    pytest.importorskip("basedpyright")
    settings = {"typeCheckingMode": "standard", "extraPaths": [str(ROOT / "src")]}
    (project / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable]
    command += ["train.py", "public.py"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
