"""Only regular files are read: a device, FIFO or socket in the place of a file is refused at once.

A root may come out of an archive, or several users may write to it.  It may then hold a FIFO, whose
opening waits for a writer for ever; a link to /dev/zero, which never ends; or a sparse file of 3 TB
without a block on the disk.  A link to a regular file is fine.

    file, is_direct, size = open_regular(path, key)   # never blocks; Corrupt for anything but a file
    data = read_whole(file, size)                     # at most `size` bytes, even if the file has grown

A launcher that recovers in place sends signals, which may interrupt the training thread right after a
file was opened.  So the descriptor belongs to an object before Python handles signals again
(`open_file`); the object closes it when it is collected.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from contextlib import suppress

from holdfast.base.errors import Corrupt
from holdfast.core.store.oserrors import REFUSED, shortened

O_DIRECT: int = getattr(os, "O_DIRECT", 0)  # missing on macOS
AT_ONCE = os.O_NONBLOCK | os.O_NOCTTY
"""Flags by which `open` does not block, and a terminal does not become the controlling one."""
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: str, flags: int) -> io.FileIO:
    """Open a file, not a directory; a new file gets the mode 0666 without the umask.

    One call into C, so that Python handles no signal in between.  `open(opener=)` is two calls, between
    which the descriptor would have no owner.
    """
    return next(map(io.FileIO, map(os.open, (path,), (flags,), (0o666,))))


def open_direct(path: str, flags: int) -> tuple[io.FileIO, bool]:
    """Return an open file, and whether it has O_DIRECT: False if the file system refuses it."""
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
    """Return a file opened for reading, whether it has O_DIRECT, and its length in bytes.

    Corrupt for a FIFO, a device or a socket; IsADirectoryError.
    """
    check_regular(os.stat(path), path, key)
    flags = os.O_RDONLY | AT_ONCE
    file, is_direct = open_direct(path, flags) if direct else (open_file(path, flags), False)
    return file, is_direct, check_regular(os.fstat(file.fileno()), path, key)


def check_regular(status: os.stat_result, path: str, key: str) -> int:
    """Return the length of a regular file.  Corrupt for anything else; IsADirectoryError."""
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
    """True if a file is sparse, so that its length may far exceed its space on the disk."""
    try:
        return os.lseek(file.fileno(), 0, os.SEEK_HOLE) < size
    except OSError:  # the file system cannot tell
        return False


def read_whole(file: io.FileIO, size: int) -> bytes:
    """Return the first `size` bytes of a file; fewer if it is shorter."""
    fd = file.fileno()
    data = os.pread(fd, size, 0)
    while data and len(data) < size and (more := os.pread(fd, size - len(data), len(data))):
        data += more
    return data
