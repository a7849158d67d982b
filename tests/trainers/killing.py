"""Runs a training script, kills it at random moments, and collects what it printed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
WAIT_S = 300.0


@contextmanager
def started(script: str, settings: str, ranks: int) -> Iterator[subprocess.Popen[str]]:
    """The script's processes, in a group of their own, which is killed at the end."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    command = [sys.executable]
    if ranks > 1:
        command += [str(HERE.parent / "torchrun.py"), f"--nproc-per-node={ranks}"]
    process = subprocess.Popen(
        [*command, str(HERE / script), settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with_it = _below(process.pid)
        for pid in with_it:
            _kill(pid)
        process.wait(WAIT_S)
        process.stdout.close()


def _below(pid: int) -> list[int]:
    """A process and all that it has started: torchrun gives each rank a session of its own."""
    found = [pid]
    for parent in found:
        try:
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        except OSError:
            continue
        found += [int(child) for child in children.split()]
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def lines(script: str, settings: str, ranks: int = 1) -> list[str]:
    """What the script prints if it is left alone."""
    with started(script, settings, ranks) as process:
        out, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, out[-6000:]
    return out.splitlines()


def killed(script: str, settings: str, ranks: int, losses: int, draw: random.Random) -> list[str]:
    """What the script printed until it was killed, a moment after so many losses; or until its end."""
    found: list[str] = []
    with started(script, settings, ranks) as process:
        for line in process.stdout:
            found.append(line.rstrip())
            losses -= line.startswith("L ")
            if not losses:
                time.sleep(draw.random() * 0.03)
                break
        else:
            assert process.wait(WAIT_S) == 0, "\n".join(found)[-6000:]
    return found


def losses(found: list[str]) -> dict[str, str]:
    """The losses that were printed, by what they are of: step and number of the batch."""
    parts = [line.split() for line in found if line.startswith("L ")]
    return {" ".join(key): value for _, *key, value in parts}


def value(found: list[str], mark: str) -> str:
    """The last line that begins so."""
    return [line for line in found if line.startswith(f"{mark} ")][-1]
