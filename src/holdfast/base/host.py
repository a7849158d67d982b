"""Identity of this host and its pid namespace, and whether one of their processes is alive.

Living processes delete the files that dead processes left behind, so these functions return "unknown"
rather than guess: processes of other users may be hidden, and hosts can have the same name.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal


def boot_id() -> str:
    """Return the id of the host's current boot; empty if the system has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


@cache
def host_id() -> str | None:
    """Return host, boot and pid namespace in one line; None if one of them is unknown."""
    boot = boot_id()
    try:
        processes = os.stat("/proc/self/ns/pid").st_ino
        if not boot or os.readlink("/proc/self") != str(os.getpid()):
            return None  # /proc shows the processes of another namespace, or no boot
    except OSError:
        return None
    return f"{socket.gethostname()} {boot} {processes}"


def stat_fields(pid: int) -> list[bytes]:
    """Return the fields of /proc/<pid>/stat, from the process state on; empty if it cannot be read."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    return line.rpartition(b")")[2].split()


def _status(pid: int) -> tuple[bool, str] | None:
    """Return (is alive, start time in clock ticks since boot) of a process; None if it is not visible."""
    fields = stat_fields(pid)
    return (fields[0] not in b"ZX", fields[19].decode()) if len(fields) > 19 else None


def is_sibling(pid: int) -> bool:
    """True if a process has the same parent as this process."""
    return stat_fields(pid)[1:2] == [str(os.getppid()).encode()]


def start_time(pid: int) -> str | None:
    """Return the start time of a process, which distinguishes it from a later process with the same number.

    None if the process does not exist or is not visible.
    """
    seen = _status(pid)
    return seen[1] if seen is not None and seen[0] else None


def process_state(pid: int, since: str) -> Literal["runs", "gone", "unknown"]:
    """Return the state of the process with number `pid` on this host that started at `since`."""
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
