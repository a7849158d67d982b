"""Tests of devices (`tests/system/gpu`) on a simulated one, each part in a process of its own.

pinned    host memory can be page-locked, as CUDA's can
strict    no copy waits that need not, from pageable memory, too: whoever relies on such a wait fails
slow      kernels and copies take long
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="late is built with g++"),
]
STATE = (
    "system/gpu/test_on_device.py",
    "system/gpu/test_memory_on_device.py",
    "system/gpu/test_beside.py",
)


def run(device: str, settings: str, files: tuple[str, ...], selected: str = "") -> None:
    environment = {**os.environ, "HOLDFAST_TEST_DEVICE": device, "HOLDFAST_LATE": settings}
    environment.pop("PYTEST_XDIST_WORKER", None)
    environment.pop("PYTEST_ADDOPTS", None)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", "-p", "no:xdist"]
        + ["-k", selected, *files],
        cwd=TESTS,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, f"{ran.stdout[-12000:]}{ran.stderr[-2000:]}"
    assert " passed" in ran.stdout.splitlines()[-1]


@pytest.mark.parametrize("files", STATE)
def test_tests_of_devices(files: str) -> None:
    run("late:1", "pinned,strict", (files,), "not cpu")


def test_every_tier_on_two_devices_and_side_streams() -> None:
    run("late:1", "pinned,strict", ("system/gpu/test_tiers.py",), "two-side-anew or one-side-stays")


@pytest.mark.soak
@pytest.mark.parametrize("settings", ["", "pinned", "pinned,strict", "strict", "pinned,slow"])
@pytest.mark.parametrize("device", ["late:0", "late:1"])
def test_every_tier(device: str, settings: str) -> None:
    run(device, settings, ("system/gpu/test_tiers.py", *STATE))
