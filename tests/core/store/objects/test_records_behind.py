"""Records of two ranks, uploaded to SeaweedFS: the local disk is lost, or the bucket is away a while."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from core.store.objects.fixtures import fresh
from core.store.objects.proxy import Proxy
from core.store.objects.servers import SeaweedFS
from holdfast.core.checkpoint.recorded import parse_segment
from holdfast.store import open_store
from system.distributed.launch import Ran, launch
from system.distributed.records_behind import DURABLE

pytestmark = pytest.mark.distributed

RANKS = (0, 1)
EVERY_S = 0.5
NEARLY_S = 0.3


class Life(threading.Thread):
    """A training under way."""

    def __init__(self, out: Path, behind: str, num_steps: int, every_s: float = EVERY_S) -> None:
        super().__init__(daemon=True)
        self.out = out
        out.mkdir()
        self._args = (out, out.parent / "root", behind, num_steps, every_s)
        self.ran: Ran | None = None
        self.start()

    def run(self) -> None:
        self.ran = launch("records_behind", len(RANKS), *self._args)

    def until(self, is_so: Callable[[], bool], limit_s: float = 100.0) -> None:
        waited = threading.Event()
        ends = time.monotonic() + limit_s
        while not is_so():
            assert time.monotonic() < ends, "it never came"
            if self.ran is not None:
                self.ran.check()
                raise AssertionError("it has ended")
            waited.wait(0.05)

    def end(self, how: str) -> Ran:
        """Let it end (`end`), or die (`die`)."""
        (self.out / how).touch()
        self.join()
        assert self.ran is not None
        return self.ran

    def told(self, what: str) -> list[list[dict[str, Any]]]:
        """By rank, the lines that have this field."""
        found: list[list[dict[str, Any]]] = []
        for path in (self.out / f"told-{rank}.jsonl" for rank in RANKS):
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            told = [json.loads(line) for line in lines if line.endswith("\n")]
            found.append([line for line in told if what in line])
        return found

    def step(self) -> int:
        return min(lines[-1]["step"] if lines else 0 for lines in self.told("step"))


def recorded(url: str) -> int:
    """The last step of which all ranks' records lie there, by the names of files."""
    found = [parse_segment(key) for key in open_store(url).list("log/")]
    return min(
        max((one[2] for one in found if one and one[3] == rank), default=0) for rank in RANKS
    )


@pytest.mark.soak
def test_a_disk_that_is_lost(seaweed: SeaweedFS, tmp_path: Path) -> None:
    """The next life goes on from the bucket's full step and records, bit for bit.  What lay in the root
    when each rank began its last upload is not lost: a step counts when all ranks have uploaded it.  One
    upload follows the other."""
    behind = seaweed.url(fresh())
    life = Life(tmp_path / "one", behind, 100_000)
    life.until(lambda: recorded(behind) > 3 * DURABLE and life.step() % DURABLE > 5)
    done = [len(uploads) for uploads in life.told("upload")]
    life.until(lambda: all(len(u) > n + 2 for u, n in zip(life.told("upload"), done)))
    assert life.end("die").status != 0
    shutil.rmtree(tmp_path / "root")
    full = max(holdfast.steps(behind))
    again = Life(tmp_path / "two", behind, 10 * DURABLE**2)
    again.until(lambda: again.step() > 0)
    again.end("end").check()
    for before, (began,), after in zip(
        life.told("step"), again.told("restored"), again.told("step")
    ):
        restored = began["restored"]
        assert began["tier"] == "upload" and restored > 3 * DURABLE
        assert began["replayed"] == restored - full
        digests = {line["step"]: line["digest"] for line in before}
        assert began["digest"] == digests[restored]
        assert all(line["digest"] == digests.get(line["step"], line["digest"]) for line in after)
    lay = []
    for uploads, wrote in zip(life.told("upload"), life.told("wrote")):
        begins = [line["time"] - line["upload"] for line in uploads]
        lay.append([x["wrote"] for x in wrote if x["time"] < begins[-1] - NEARLY_S][-1])
    assert restored >= min(lay), lay


@pytest.mark.soak
def test_a_bucket_that_is_away(seaweed: SeaweedFS, proxy: Proxy, tmp_path: Path) -> None:
    """Training and records go on, one rank tells of it once and of its end, and uploads catch up."""
    prefix = fresh()
    behind, direct = seaweed.url(prefix, proxy.endpoint), seaweed.url(prefix)
    life = Life(tmp_path / "one", behind, 100_000, 0.2)
    life.until(lambda: recorded(direct) > 5)
    proxy.stop()
    life.until(lambda: all(life.told("failed")))
    begun = life.step()
    life.until(lambda: life.step() > begun + 2 * DURABLE)
    assert recorded(direct) < begun
    proxy.start()
    back = life.step()
    life.until(lambda: recorded(direct) > back)
    life.end("end").check()
    assert max([recorded(direct), *holdfast.steps(direct)]) == life.step()
    warned = [line["warned"] for lines in life.told("warned") for line in lines]
    assert len([text for text in warned if text.startswith("records were not uploaded")]) == 1, (
        warned
    )
    assert len([text for text in warned if text.startswith("records are uploaded")]) == 1, warned
    held_s = max(line["took"] for lines in life.told("step") for line in lines)
    print(warned, f"the longest step() took {held_s:.3f} s")
