"""Processes from outside: how long one takes, what memory it and its children hold, what it writes."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Watched:
    """`peak_bytes`: proportional resident memory, summed over the process and all below it."""

    seconds: float
    peak_bytes: int
    disk_bytes: int
    output: str


def watch(
    command: list[str], folder: Path | None = None, env: dict[str, str] | None = None
) -> Watched:
    """Run a command; `folder` is where its files go.  SystemExit if it fails.

    Bytecode is kept, as that of an installed package is.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | (env or {}),
    )
    peak, disk, done = [0], [0], threading.Event()

    def look() -> None:
        while not done.wait(0.05):
            peak[0] = max(peak[0], sum(_pss(pid) for pid in _family(process.pid)))
            disk[0] = max(disk[0], used(folder) if folder else 0)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        output, errors = process.communicate()
        seconds = time.perf_counter() - began
    finally:
        done.set()
        watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {process.returncode}\n{errors[-3000:]}")
    return Watched(seconds, peak[0], max(disk[0], used(folder) if folder else 0), output)


def status(name: str) -> int:
    """A line of /proc/self/status in bytes: VmHWM, VmRSS, RssAnon, ..."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith(name + ":"))


def used(folder: Path) -> int:
    """Bytes of all files below a folder, and in its siblings that begin with its name."""
    total, todo = 0, [str(p) for p in folder.parent.glob(folder.name + "*")]
    for path in todo:  # files come and go meanwhile
        with suppress(OSError):
            if os.path.isdir(path):
                todo += [entry.path for entry in os.scandir(path)]
            else:
                total += os.path.getsize(path)
    return total


def _family(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        try:
            for task in os.listdir(f"/proc/{one}/task"):
                text = Path(f"/proc/{one}/task/{task}/children").read_text()
                found += [int(child) for child in text.split()]
        except OSError:
            continue
    return found


def _pss(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0
