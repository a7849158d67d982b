"""The device that tests of devices run on: CUDA, if there is any.

`HOLDFAST_TEST_DEVICE` names another one, as `late:1`, which is simulated (`late`), for the whole process.
"""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = os.environ.get("HOLDFAST_TEST_DEVICE", "cuda:0" if torch.cuda.is_available() else "")
if DEVICE.startswith("late"):
    from system.late import device

    device.follow_environment()

needs_device = pytest.mark.skipif(not DEVICE, reason="no CUDA device here")


def other_device() -> str:
    """Another device of that kind; skips the test if there is none."""
    kind, _, index = DEVICE.partition(":")
    if torch.get_device_module(kind).device_count() < 2:
        pytest.skip("needs two devices")
    return f"{kind}:{1 - int(index or 0)}"


def occupy(seconds: float) -> None:
    """Have the current stream do nothing else for a while."""
    if DEVICE.startswith("late"):
        with torch.accelerator.device_index(torch.device(DEVICE).index):
            device.core.sleep(seconds)
    else:
        torch.cuda._sleep(int(seconds * 1.5e9))  # of its cycles
