"""This place: where process numbers mean the same processes, whether one of them is gone, and the address
by which other hosts reach it.

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


def memory_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may have: the host's, or less where a control group limits it."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    lines: list[str] = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if kinds else "")
        name = "memory.limit_in_bytes" if kinds else "memory.max"
        folder = Path(path.lstrip("/"))
        for each in (folder, *folder.parents):
            with suppress(OSError, ValueError):  # "max"
                limits.append(int((mount / each / name).read_text()))
    return min(limits)


def _stat(pid: int) -> list[bytes]:
    """What the kernel says of a process, from its state on; nothing if it is unseen."""
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


def own_address() -> str:
    """An address of this host that the other ranks can reach.

    First the one they rendezvous at, if it is ours; a host's own name often means loopback, which is
    of no use to other hosts; then the address that outward packets would carry.
    """
    master = os.environ.get("MASTER_ADDR", "")
    if master and _is_ours(master):
        return master
    with suppress(OSError):
        found = socket.gethostbyname(socket.gethostname())
        if not found.startswith("127.") and _is_ours(found):
            return found
    for outside in (master, "192.0.2.1"):  # a connected UDP socket sends nothing
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect((outside, 9))
            return str(s.getsockname()[0])
    return "127.0.0.1"


def _is_ours(name: str) -> bool:
    """True if a name is of an address that can be bound on this host."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as s:
                s.bind(address)
                return True
    return False
