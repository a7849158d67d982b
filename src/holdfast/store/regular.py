"""Regular files alone are read: whatever else lies where a file should is refused at once.

A root may come out of an archive, or several users may write to it.  Then a FIFO may lie where a file
should be, whose opening waits for a writer for ever; a link to /dev/zero, which never ends; or a file of
3 TB that has not one block on the disk.  A link to a regular file is as good as the file.

    fd, is_direct, size = open_regular(path, key)     # never waits; Corrupt for what is no file
    data = whole(fd, size)                            # so many bytes, whatever the file says now
"""

from __future__ import annotations

import errno
import os
import stat

from holdfast.errors import Corrupt
from holdfast.store.oserrors import shortened
from holdfast.store.tempfiles import open_direct

AT_ONCE = os.O_NONBLOCK | os.O_NOCTTY
"""Flags by which an opening waits for nobody, and a terminal stays another's."""
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str, key: str, *, direct: bool = False) -> tuple[int, bool, int]:
    """The descriptor of a file to be read, whether it has O_DIRECT, and its length.

    Corrupt if a FIFO, a device or a socket lies there; IsADirectoryError.
    """
    flags = os.O_RDONLY | AT_ONCE
    try:
        fd, is_direct = open_direct(path, flags) if direct else (os.open(path, flags), False)
    except FileNotFoundError:
        raise
    except OSError:
        # a socket is never opened, a device not by everybody
        check_regular(os.stat(path), path, key)
        raise
    try:
        return fd, is_direct, check_regular(os.fstat(fd), path, key)
    except BaseException:
        os.close(fd)
        raise


def check_regular(status: os.stat_result, path: str, key: str) -> int:
    """The length of a file.  Corrupt if it is none; IsADirectoryError."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    kind = _KINDS.get(stat.S_IFMT(status.st_mode))
    if kind is not None:
        raise Corrupt(
            f"'{shortened(path)}' is {kind}, not a file",
            key=key,
            expected="a regular file",
            found=kind,
            hint="remove it, and put the file back from a copy",
        )
    return status.st_size


def whole(fd: int, size: int) -> bytes:
    """The first `size` bytes of a file, or all that it has."""
    data = os.pread(fd, size, 0)
    while data and len(data) < size and (more := os.pread(fd, size - len(data), len(data))):
        data += more
    return data
