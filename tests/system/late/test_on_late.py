"""Tests of devices (`tests/system/gpu`) on a simulated one, in processes of their own.

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
    pytest.mark.timeout(1800),  # of many tests, each of which has its own and says where it hangs
    pytest.mark.skipif(shutil.which("g++") is None, reason="late is built with g++"),
]
TIERS = "system/gpu/test_tiers.py"
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


def test_tests_of_devices_and_every_tier_on_two_devices_and_side_streams() -> None:
    """In one process, as they begin alike."""
    tiers = "two-side-anew or one-side-stays"
    run("late:1", "pinned,strict", (TIERS, *STATE), f"{tiers} or (not cpu and not test_tiers)")


@pytest.mark.soak
@pytest.mark.parametrize("settings", ["", "pinned", "pinned,strict", "strict", "pinned,slow"])
@pytest.mark.parametrize("device", ["late:0", "late:1"])
def test_every_tier(device: str, settings: str) -> None:
    run(device, settings, (TIERS, *STATE))
