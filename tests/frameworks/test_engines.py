"""DeepSpeed's engines pass the suite that others are given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ports import free_port

SUITE = Path(__file__).with_name("deepspeed_suite.py")
DEADLINE_S = 500


@pytest.mark.distributed
def test_deepspeed_passes_the_suite(tmp_path: Path) -> None:
    """In a process of its own: DeepSpeed, once imported, changes what other tests do."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(SUITE)]
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'suite'}"],
        env=os.environ | {"SUITE_PORT": str(free_port())},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert "22 passed" in done.stdout
