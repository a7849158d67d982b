"""The amount of memory that this process may use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of the host's memory, or the limit of a control group if that is lower."""
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
