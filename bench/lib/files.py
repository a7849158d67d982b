"""Files and the page cache: make them warm, or cold, and check it."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path


def files_below(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.is_file())


def warm(paths: list[Path]) -> None:
    """Read files once, so that they are in the page cache."""
    buffer = bytearray(8 << 20)
    for path in paths:
        with open(path, "rb", buffering=0) as f:
            while f.readinto(buffer):
                pass


def evict(paths: list[Path]) -> float:
    """Take files out of the page cache; returns the part of their pages that is still there.

    Cold means cold for this kernel: a hypervisor's own cache, if there is one, is out of reach.
    """
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    pages = [resident(path) for path in paths]
    return sum(a for a, _ in pages) / max(1, sum(b for _, b in pages))


def resident(path: Path) -> tuple[int, int]:
    """(pages in the page cache, pages) of a file, by mincore(2)."""
    size = path.stat().st_size
    if not size:
        return 0, 0
    with open(path, "rb") as f, mmap.mmap(f.fileno(), size, mmap.MAP_PRIVATE) as area:
        pages = -(-size // mmap.PAGESIZE)
        seen = (ctypes.c_ubyte * pages)()
        start = ctypes.c_char.from_buffer(area)
        ctypes.CDLL(None).mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), seen
        )
        del start
        return sum(b & 1 for b in bytes(seen)), pages
