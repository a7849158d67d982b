"""Records behind the root: when the root is lost, what lies behind is replayed, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Delta, Every
from holdfast.checkpoint.recorded import parse_segment
from holdfast.errors import NotFound
from holdfast.store import LocalStore, MemoryStore
from holdfast.store.views import JoinedStore
from homes import until

TESTS = Path(__file__).parents[1]


def told(place: Path) -> list[dict[str, Any]]:
    path = place / "told.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def recorded_behind(place: Path) -> list[int]:
    """The steps whose records lie behind the root, by the names of files."""
    found = map(parse_segment, LocalStore(place / "behind").list("log/"))
    return sorted({s for one in found if one for s in range(one[1], one[2] + 1)})


def begin(place: Path, *args: object) -> subprocess.Popen[bytes]:
    place.mkdir(exist_ok=True)
    env = os.environ | {"PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "homes.train_recorded", str(place), *map(str, args)]
    return subprocess.Popen(command, env=env)


def lose_the_node(place: Path, training: subprocess.Popen[bytes]) -> None:
    """Kill the training, and the process that writes its records, and take the root away."""
    training.send_signal(signal.SIGKILL)
    training.wait()
    for mark in (place / "root").glob("log/*/*.writing"):
        with suppress(ProcessLookupError):
            os.kill(int(mark.stem.partition("-")[2]), signal.SIGKILL)
    (place / "root").rename(place / "lost")


@pytest.mark.parametrize("held", [False, True], ids=["steps-are-uploaded", "steps-are-held-up"])
def test_a_root_that_is_lost_is_replayed_from_behind(tmp_path: Path, held: bool) -> None:
    """The steps recorded behind are reached, whether the full step before them is there yet or not."""
    place = tmp_path / "run"
    training = begin(place, 100_000, 10, 0.05, *["hold"] * held)
    until(lambda: (recorded_behind(place) or [0])[-1] > 35)
    lose_the_node(place, training)
    steps, full = recorded_behind(place), holdfast.steps(place / "behind")
    last = max(full)
    while last + 1 in steps:
        last += 1
    assert last > 35
    assert not held or max(full) == 10
    digests = {line["step"]: line["digest"] for line in told(place) if "step" in line}
    assert begin(place, last + 3, 10, 0.05).wait() == 0
    restored = next(line for line in reversed(told(place)) if "restored" in line)
    assert restored["restored"] == last
    assert restored["tier"] == "upload"
    assert restored["replayed"] == last - max(full)
    assert restored["digest"] == digests[last]
    after = [line["step"] for line in told(place)[-3:]]
    assert after == [last + 1, last + 2, last + 3]


def test_close_uploads_the_last_records(tmp_path: Path) -> None:
    """However seldom they are uploaded: the end of a run loses nothing."""
    place = tmp_path / "run"
    assert begin(place, 27, 10, 3600).wait() == 0
    assert recorded_behind(place)[-1] == 27
    (place / "root").rename(place / "lost")
    assert begin(place, 28, 10, 3600).wait() == 0
    restored = next(line for line in reversed(told(place)) if "restored" in line)
    assert (restored["restored"], restored["tier"]) == (27, "upload")
    assert restored["digest"] == told(place)[27]["digest"]


def test_how_often_is_checked() -> None:
    assert Delta(upload_every_s=5).upload_every_s == 5.0
    assert Every(delta=1).delta == 1


def test_joined_stores() -> None:
    one, other = MemoryStore("joined-one"), MemoryStore("joined-other")
    one.put("a", b"1")
    one.put("b", b"2")
    other.put("b", b"3")
    other.put("c", b"4")
    both = JoinedStore(one, other)
    assert both.list() == ["a", "b", "c"]
    assert [both.get(key) for key in both.list()] == [b"1", b"2", b"4"]
    reader = both.open("b")
    one.delete("b")
    into = bytearray(1)
    reader.read(0, memoryview(into))
    assert into in (b"2", b"3")
    with pytest.raises(NotFound):
        both.get("d")
