"""DeepSpeed's engines and Megatron-Core's models pass the suite that others are given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ports import free_port

FOLDER = Path(__file__).parent
DEADLINE_S = 500
NUM_TESTS = 11
"""The tests of the suite."""


@pytest.mark.soak
@pytest.mark.distributed
@pytest.mark.parametrize(("name", "num_classes"), [("deepspeed", 2), ("megatron", 3)])
def test_an_engine_passes_the_suite(name: str, num_classes: int, tmp_path: Path) -> None:
    """In a process of its own: what each changes, once imported, is not for other tests."""
    suite = FOLDER / f"{name}_suite.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(suite)]
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'suite'}"],
        env=os.environ | {"SUITE_PORT": str(free_port())},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert f"{NUM_TESTS * num_classes} passed" in done.stdout
