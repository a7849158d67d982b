"""This place: where process numbers mean the same processes, and whether one of them is gone.

What is left behind by dead processes is deleted by living ones, so everything here answers "cannot tell"
rather than guess: another user's processes may be hidden, and hosts can have the same name.
"""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path
from typing import Literal


@cache
def place() -> str | None:
    """Host, boot and pid namespace in one line; None if the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None
    return f"{socket.gethostname()} {boot} {processes}"


def started(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot: tells it from a later one of its number.

    None if there is no such process, or if it cannot be seen.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rsplit(")", 1)[1].split()
    return None if fields[0] in "ZX" else fields[19]


def fate(pid: int, since: str) -> Literal["runs", "gone", "unknown"]:
    """What became of the process that had number `pid`, in this place, and started at `since`."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        pass
    except (OSError, OverflowError):
        return "unknown"
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return "unknown"
    if fields[0] in "ZX" or fields[19] != since:
        return "gone"
    return "runs"
