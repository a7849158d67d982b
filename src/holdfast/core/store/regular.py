"""Regular files alone are read: whatever else lies where a file should is refused at once.

A root may come out of an archive, or several users may write to it.  Then a FIFO may lie where a file
should be, whose opening waits for a writer for ever; a link to /dev/zero, which never ends; or a file of
3 TB that has not one block on the disk.  A link to a regular file is as good as the file.

    file, is_direct, size = open_regular(path, key)   # never waits; Corrupt for what is no file
    data = whole(file, size)                          # so many bytes, whatever the file says now

A signal may interrupt a training thread at any call, even at the one that has just opened a file: a
launcher that recovers in place sends them.  So a descriptor has an owner before Python looks for signals
again (`open_file`), which closes it when nobody knows it any more.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from contextlib import suppress

from holdfast.base.errors import Corrupt
from holdfast.core.store.oserrors import REFUSED, shortened

O_DIRECT: int = getattr(os, "O_DIRECT", 0)  # no such thing on macOS
AT_ONCE = os.O_NONBLOCK | os.O_NOCTTY
"""Flags by which an opening waits for nobody, and a terminal stays another's."""
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: str, flags: int) -> io.FileIO:
    """Open a file, but no directory; new ones have the mode 0666 without the umask.

    All of it is one call into C, behind which Python looks for signals.  `open(opener=)` has one more, in
    which the descriptor would be nobody's.
    """
    return next(map(io.FileIO, map(os.open, (path,), (flags,), (0o666,))))


def open_direct(path: str, flags: int) -> tuple[io.FileIO, bool]:
    """An open file, and whether it has O_DIRECT: not where the file system refuses it."""
    if O_DIRECT:
        try:
            return open_file(path, flags | O_DIRECT), True
        except OSError as error:
            if error.errno not in REFUSED:
                raise
        if flags & os.O_EXCL:
            with suppress(FileNotFoundError):  # Linux may make the file before it refuses the flag
                os.unlink(path)
    return open_file(path, flags), False


def open_regular(path: str, key: str, *, direct: bool = False) -> tuple[io.FileIO, bool, int]:
    """A file open to be read, whether it has O_DIRECT, and its length.

    Corrupt if a FIFO, a device or a socket lies there; IsADirectoryError.
    """
    check_regular(os.stat(path), path, key)
    flags = os.O_RDONLY | AT_ONCE
    file, is_direct = open_direct(path, flags) if direct else (open_file(path, flags), False)
    return file, is_direct, check_regular(os.fstat(file.fileno()), path, key)


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


def has_hole(file: io.FileIO, size: int) -> bool:
    """True if parts of a file were never written: it may be far longer than what it takes of a disk."""
    try:
        return os.lseek(file.fileno(), 0, os.SEEK_HOLE) < size
    except OSError:  # the file system cannot tell
        return False


def read_whole(file: io.FileIO, size: int) -> bytes:
    """The first `size` bytes of a file, or all that it has."""
    fd = file.fileno()
    data = os.pread(fd, size, 0)
    while data and len(data) < size and (more := os.pread(fd, size - len(data), len(data))):
        data += more
    return data
