"""A standby node that was not needed: it ends when the run does, and well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ports import free_port

from .test_run import environment, until

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.soak]

SCRIPT = """
import sys, time
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
while True:
    done = [Path(sys.argv[1]).exists()]
    dist.broadcast_object_list(done)  # all of them see it at once
    if done[0]:
        break
    time.sleep(0.05)
dist.destroy_process_group()
"""


def test_a_standby_ends_with_the_run(tmp_path: Path) -> None:
    script, stop = tmp_path / "script.py", tmp_path / "stop"
    script.write_text(SCRIPT)
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=one"]
    command = [sys.executable, "-m", "holdfast", "run", "--nnodes=2:2", *where]
    command += ["--local-addr=127.0.0.1", str(script), str(stop)]
    logs, launchers = [tmp_path / f"log{n}" for n in range(3)], []
    for log in logs:
        with log.open("w") as file:
            launchers.append(subprocess.Popen(command, env=environment(), stdout=file, stderr=file))
    try:
        until(lambda: any("this node waits" in log.read_text() for log in logs))
        stop.touch()
        assert [launcher.wait(120) for launcher in launchers] == [0, 0, 0], [
            log.read_text() for log in logs
        ]
    finally:
        for launcher in launchers:
            launcher.kill()
