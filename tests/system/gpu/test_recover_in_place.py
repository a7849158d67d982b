"""Recovery in place with CUDA and NCCL.

One device suffices for gloo with CUDA tensors on two ranks, and for NCCL on one rank: it refuses two on the
same device.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launching.test_run import Ran, end, environment

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

SCRIPT = Path(__file__).with_name("recovering.py")
STEPS = 9


def started(
    root: Path,
    ranks: int,
    backend: str,
    fault: str,
    *,
    torchrun: bool = False,
    options: tuple[str, ...] = (),
) -> Ran:
    launcher = (
        ["torch.distributed.run", "--standalone"] if torchrun else ["holdfast", "run", *options]
    )
    running = subprocess.Popen(
        [sys.executable, "-m", *launcher, f"--nproc-per-node={ranks}", str(SCRIPT)]
        + [str(root), str(STEPS), backend, fault],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    ran = end(running, root)
    assert ran.status == 0, ran.printed[-8000:]
    return ran


def digests(ran: Ran) -> dict[int, str]:
    return {line["rank"]: line["digest"] for line in ran.told if "digest" in line}


def check(folder: Path, ranks: int, backend: str, fault: str) -> tuple[Ran, set[int]]:
    """It ends with what the uninterrupted run has; return it, with the ranks whose process was replaced."""
    whole = started(folder / "whole", ranks, backend, "none", torchrun=True)
    ran = started(folder / "root", ranks, backend, fault)
    assert digests(ran) == digests(whole) and len(digests(ran)) == ranks
    first, last = ran.begun[0], ran.begun[-1]
    assert all(line["begins"] > 0 for line in last.values())
    return ran, {r for r in first if first[r]["pid"] != last[r]["pid"]}


@pytest.mark.parametrize("fault", ["kill", "raise"])
def test_gloo_with_tensors_on_a_device(fault: str, tmp_path: Path) -> None:
    ran, replaced = check(tmp_path, 2, "gloo", fault)
    assert replaced == ({1} if fault == "kill" else set()), ran.printed[-8000:]


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl", "-"])
def test_nccl_after_an_exception(backend: str, tmp_path: Path) -> None:
    ran, replaced = check(tmp_path, 1, backend, "raise")
    assert replaced == set(), ran.printed[-8000:]


def test_memory_of_the_device_does_not_grow(tmp_path: Path) -> None:
    ran, replaced = check(tmp_path, 1, "cpu:gloo,cuda:nccl", "repeat")
    assert replaced == set(), ran.printed[-8000:]
    held = [attempt[0]["held"] for attempt in ran.begun]
    assert len(held) == 7 and len(set(held)) == 1, held


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_process_whose_device_is_lost_is_replaced(ranks: int, tmp_path: Path) -> None:
    ran, replaced = check(tmp_path, ranks, "gloo", "assert")
    assert replaced == {ranks - 1}, ran.printed[-8000:]
    assert "its device is lost" in ran.printed and "device-side assert" in ran.printed


@two_devices
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl", "-"])
@pytest.mark.parametrize("fault", ["kill", "raise"])
def test_nccl_with_a_lost_peer(fault: str, backend: str, tmp_path: Path) -> None:
    """The survivor waits for the device, where a collective has no other end any more."""
    ran, replaced = check(tmp_path, 2, backend, fault)
    assert replaced == ({1} if fault == "kill" else set()), ran.printed[-8000:]


def test_a_module_that_begins_cuda_is_not_preloaded(tmp_path: Path) -> None:
    (tmp_path / "beginner.py").write_text(
        "import torch\ntorch.cuda.init()\ntorch.zeros(1).cuda()\n"
    )
    command = [sys.executable, "-m", "holdfast", "run", "--preload=beginner", str(SCRIPT)]
    ran = subprocess.run(
        [*command, str(tmp_path / "root"), "1", "gloo", "none"],
        env=environment() | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 1
    assert "has begun to use CUDA" in ran.stderr or "has begun threads" in ran.stderr
