"""A job under torchrun is stopped by SIGTERM, as documented: the next start reads from memory."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import holdfast
from system.nodes import elastic_train
from system.nodes.story import Life, lives_in
from tiers.memory.agents import stop

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.soak]
RANKS = 2


class Starts:
    """A training that is started again and again; `folder` takes all that it leaves."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root, self.logs = folder, folder / "root", folder / "logs"
        self.logs.mkdir()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = elastic_train.Options(every={"memory": 1}, memory={}, sigterm_s=20)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={RANKS}", elastic_train.__file__, str(self.root)]
        command += [str(self.logs), json.dumps(dataclasses.asdict(options))]
        env = {"HOLDFAST_MEMORY_DIR": str(self.folder / "node"), "GLOO_SOCKET_IFNAME": "lo"}
        with (self.folder / "torchrun.log").open("ab") as out:
            self.process = subprocess.Popen(command, env=os.environ | env, stdout=out, stderr=out)

    def lives(self) -> list[list[Life]]:
        """Of each rank."""
        return [
            lives_in(self.logs / f"{socket.gethostname()}.{rank}.jsonl") for rank in range(RANKS)
        ]

    def are_on(self, number: int, snapshots: int = 0) -> bool:
        """Whether all ranks have restored in that life, and know of so many complete snapshots."""
        return all(
            len(of) == number and of[-1].begun and len(of[-1].of("snapshot.committed")) >= snapshots
            for of in self.lives()
        )

    def await_(self, condition: Callable[[], object]) -> None:
        until = time.monotonic() + 120
        while not condition():
            assert self.process is not None and self.process.poll() is None, self.printed()
            assert time.monotonic() < until, self.printed()
            time.sleep(0.05)

    def stop(self) -> list[Life]:
        """SIGTERM to torchrun, once the first life has some snapshots; that life of each rank."""
        self.await_(lambda: self.are_on(1, snapshots=4))
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(300) != 0
        return [of[-1] for of in self.lives()]

    def end(self) -> list[Life]:
        """Have it train on to its end; the last life of each rank."""
        (self.logs / "end").write_text(str(self.lives()[0][-1].last + 3))
        assert self.process is not None
        assert self.process.wait(300) == 0, self.printed()
        return [of[-1] for of in self.lives()]

    def printed(self) -> str:
        return (self.folder / "torchrun.log").read_text()[-4000:]


@pytest.fixture
def starts(tmp_path: Path) -> Iterator[Starts]:
    found = Starts(tmp_path)
    yield found
    if found.process is not None and found.process.poll() is None:
        found.process.kill()
    stop(tmp_path / "node")


def test_the_next_start_reads_from_memory(starts: Starts) -> None:
    """The step at which all ranks stopped, which is in storage, too."""
    starts.start()
    before = starts.stop()
    starts.start()
    starts.await_(lambda: starts.are_on(2))
    after = starts.end()
    (step,) = {life.start["restored"] for life in after}
    assert {life.last for life in before} == {step}
    assert holdfast.steps(str(starts.root)) == [step]
    for old, new in zip(before, after):
        assert new.start["digest"] == old.steps[step]["digest"]
        assert 0 < new.moved("all") <= new.moved("local")
        assert not new.of("memory.from_storage") and not new.of("restore.passed_over")
