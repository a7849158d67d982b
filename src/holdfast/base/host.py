"""This place: where process numbers mean the same processes, and whether one of them is gone.

What is left behind by dead processes is deleted by living ones, so everything here answers "cannot tell"
rather than guess: another user's processes may be hidden, and hosts can have the same name.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal


def boot_id() -> str:
    """The id of this boot of the host; empty if the system does not say."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


@cache
def host_id() -> str | None:
    """Host, boot and pid namespace in one line; None if the system does not say."""
    boot = boot_id()
    try:
        processes = os.stat("/proc/self/ns/pid").st_ino
        if not boot or os.readlink("/proc/self") != str(os.getpid()):
            return None  # /proc shows the processes of another namespace, or no boot
    except OSError:
        return None
    return f"{socket.gethostname()} {boot} {processes}"


def _stat(pid: int) -> list[bytes]:
    """Return what the kernel says of a process, from its state on; nothing if it is unseen."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    return line.rpartition(b")")[2].split()


def _status(pid: int) -> tuple[bool, str] | None:
    """Return (is alive, start time in clock ticks since boot) of a process; None if unseen."""
    fields = _stat(pid)
    return (fields[0] not in b"ZX", fields[19].decode()) if len(fields) > 19 else None


def is_sibling(pid: int) -> bool:
    """True if a process has the parent that this one has."""
    return _stat(pid)[1:2] == [str(os.getppid()).encode()]


def start_time(pid: int) -> str | None:
    """Start time of a process: tells it from a later one of its number.

    None if there is no such process, or if it cannot be seen.
    """
    seen = _status(pid)
    return seen[1] if seen is not None and seen[0] else None


def process_state(pid: int, since: str) -> Literal["runs", "gone", "unknown"]:
    """Tell what became of the process that had number `pid` in this place, started at `since`."""
    if pid <= 0 or not since.isdigit() or int(since) == 0:
        return "unknown"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        pass
    except (OSError, OverflowError):
        return "unknown"
    seen = _status(pid)
    if seen is None:
        return "unknown"
    return "runs" if seen == (True, since) else "gone"
