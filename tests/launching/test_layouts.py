"""Recovery in place under every layout and engine: a rank is killed, one raises, and nothing differs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launching.test_run import Ran, end, environment

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.soak]

SCRIPT = Path(__file__).with_name("layouts.py")
STEPS = 9
FAULTS = ("kill:1:4", "raise:0:7")
OF_FOUR = ("hsdp", "fsdp_tp", "groups")
NEEDS = {
    "accelerate": "accelerate",
    "trainer": "accelerate",
    "fabric": "lightning_fabric",
    "zero1": "deepspeed",
    "zero2": "deepspeed",
    "zero3": "deepspeed",
}
LAYOUTS = (
    "ddp", "fsdp", "hsdp", "fsdp_tp", "gpipe", "one_f_one_b", "zero1", "zero2", "zero3", "accelerate",
    "trainer", "fabric", "compiled", "compiled_fsdp", "accumulated", "recomputed", "groups", "contexts",
    "catching", "cleaning", "threads",
)  # fmt: skip


def started(
    launcher: list[str],
    root: Path,
    layout: str,
    *faults: str,
    status: int = 0,
    tier: str = "durable",
) -> Ran:
    ranks = 4 if layout in OF_FOUR else 2
    command = [sys.executable, "-m", *launcher, f"--nproc-per-node={ranks}", str(SCRIPT)]
    paths = [str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")]
    running = subprocess.Popen(
        [*command, str(root), str(STEPS), layout, *faults],
        env=environment() | {"PYTHONPATH": os.pathsep.join(paths), "TIER": tier},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    ran = end(running, root)
    assert ran.status == status, ran.printed[-8000:]
    return ran


def whole(root: Path, layout: str) -> Ran:
    """The uninterrupted run, under torchrun."""
    return started(["torch.distributed.run", "--standalone"], root, layout)


def failing(root: Path, layout: str, **more: str) -> Ran:
    return started(["holdfast", "run"], root, layout, *FAULTS, **more)


def digests(ran: Ran) -> dict[int, str]:
    return {line["rank"]: line["digest"] for line in ran.told if "digest" in line}


def check_in_place(ran: Ran) -> None:
    """Only the killed rank has another process, and none has after the exception."""
    first, second, third = ran.begun[:3]
    assert len(ran.begun) == 3, ran.begun
    changed = {r for r in first if first[r]["pid"] != second[r]["pid"]}
    assert changed == {1}, ran.printed[-8000:]
    assert {r for r in second if second[r]["pid"] != third[r]["pid"]} == set()
    assert {line["begins"] for line in second.values()} == {3}
    assert {line["begins"] for line in third.values()} == {6}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout(layout: str, tmp_path: Path) -> None:
    if layout in NEEDS and importlib.util.find_spec(NEEDS[layout]) is None:
        pytest.skip(f"{NEEDS[layout]} is not installed")
    expected = whole(tmp_path / "whole", layout)
    ran = failing(tmp_path / "root", layout)
    assert digests(ran) == digests(expected) and len(digests(ran)) in (2, 4)
    check_in_place(ran)


@pytest.mark.parametrize(
    ("tier", "layout"),
    [
        *[("memory", layout) for layout in ("ddp", "hsdp", "fsdp_tp", "one_f_one_b", "zero3")],
        *[("records", layout) for layout in ("ddp", "hsdp", "fsdp_tp")],
    ],
)
def test_a_layout_from_memory_and_records(tier: str, layout: str, tmp_path: Path) -> None:
    """No step is lost but the one under way, and none is in storage."""
    if layout in NEEDS and importlib.util.find_spec(NEEDS[layout]) is None:
        pytest.skip(f"{NEEDS[layout]} is not installed")
    expected = whole(tmp_path / "whole", layout)
    ran = failing(tmp_path / "root", layout, tier=tier)
    assert digests(ran) == digests(expected) and len(digests(ran)) in (2, 4)
    check_in_place(ran)
    again = [line for attempt in ran.begun[1:] for line in attempt.values()]
    if tier == "memory":
        assert {line["tier"] for line in again} == {"memory"}
    else:
        assert all(line["replayed"] > 0 for line in again)


def test_processes_that_load_data_end_with_their_attempt(tmp_path: Path) -> None:
    """Those of the survivor, and those of the rank that was killed, whose parent is gone."""
    expected = whole(tmp_path / "whole", "loader")
    ran = failing(tmp_path / "root", "loader")
    assert digests(ran) == digests(expected)
    check_in_place(ran)
    loaders = {line["pid"] for line in ran.told if "loads" in line}
    assert len(loaders) >= 3 * 2 * 2
    seen = [line["alive"] for line in ran.told if "alive" in line]
    assert seen[0] == [] and len(seen) == 6
    assert all(alive == [] for alive in seen), seen


def test_settings_of_the_process_are_those_of_a_new_one(tmp_path: Path) -> None:
    expected = whole(tmp_path / "whole", "settings")
    ran = failing(tmp_path / "root", "settings")
    assert digests(ran) == digests(expected)
    check_in_place(ran)
    found = [line["settings"] for line in ran.told if "settings" in line]
    assert len(found) == 6
    (before,) = [line["settings"] for line in expected.told if "settings" in line][:1]
    assert all(one[:6] == before[:6] for one in found), found
    by_process: dict[int, list[Any]] = {}
    for line in ran.told:
        if "settings" in line:
            by_process.setdefault(line["pid"], []).append(line["settings"])
    assert sorted(map(len, by_process.values())) == [1, 2, 3]
    assert all(one == of[0] for of in by_process.values() for one in of), by_process


def test_a_global_that_holds_a_model_is_told_once(tmp_path: Path) -> None:
    ran = failing(tmp_path / "root", "global_model")
    check_in_place(ran)
    text = "the global `MODEL` of __main__ still holds a DistributedDataParallel"
    assert ran.printed.count(text) == 2, ran.printed  # by each process that left its function


def test_a_group_made_before_is_refused(tmp_path: Path) -> None:
    ran = started(["holdfast", "run"], tmp_path / "root", "early", status=1)
    assert "a process group was made before the recoverable function was called" in ran.printed
    assert "inside that function" in ran.printed
    assert not ran.told
