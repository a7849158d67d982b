"""Compare and swap of a file, across processes and hosts.

    with locked(path) as file:            # no other process replaces this file
        if read_whole(file, len(seen)) == seen:
            temp.publish(path, root, replace=True)

A file system has no call for this: rename replaces any file.  So a process locks the file before it
replaces it.  The replacement is another file of the same name; a process that waited for the lock of the
old file then locks the new one.  There is no lock file to leave behind; the kernel drops the lock of a
process that dies.

    A: lock old, equal, rename ......... unlock
    B: wait for the lock of old ............... is old still `path`? no: lock new, not equal, refuse

flock(2) also works between hosts on NFS (as a byte-range lock).  If a file system refuses locks, as
Lustre does when mounted without `flock`, the user is warned once, and compare and rename are two steps.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from holdfast.base.errors import Unavailable, warn_user
from holdfast.core.store.oserrors import REFUSED
from holdfast.core.store.regular import AT_ONCE, open_file

_DEADLINE_S = 60.0
"""A process holds the lock for one small write; after this time it counts as stuck."""

_POLL_S = 0.005
_BUSY = (errno.EAGAIN, errno.EACCES, errno.EINTR)
_NO_LOCKS = (*REFUSED, errno.ENOLCK)


@contextmanager
def locked(path: str, *, deadline_s: float = _DEADLINE_S) -> Iterator[io.FileIO]:
    """Yield the file at `path`, open and locked, so that no other process replaces it in this block.

    Blocks while another process holds the lock; Unavailable after `deadline_s`.  FileNotFoundError.
    """
    until = time.monotonic() + deadline_s
    while True:
        with _open(path) as file:
            if _lock(file.fileno(), path, until) and _is_at(file.fileno(), path):
                yield file
                return


def _open(path: str) -> io.FileIO:
    with suppress(PermissionError):
        return open_file(path, os.O_RDWR | AT_ONCE)  # NFS locks only files opened for writing
    return open_file(path, os.O_RDONLY | AT_ONCE)


def _lock(fd: int, path: str, until: float) -> bool:
    """Wait for the lock; False if the file was replaced meanwhile."""
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in _NO_LOCKS:
                _warn(path)
                return True
            if error.errno not in _BUSY:
                raise
        if not _is_at(fd, path):
            return False
        if time.monotonic() > until:
            raise Unavailable(
                f"'{path}' is being replaced by another process, which has not finished in time",
                hint="`fuser` names that process; is it stopped, or its storage stuck?",
            )
        time.sleep(_POLL_S)


def _is_at(fd: int, path: str) -> bool:
    """True if `path` still names the open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _warn(path: str) -> None:
    warn_user(
        f"the file system of '{os.path.dirname(path)}' has no locks: two processes that replace one object "
        "at the same moment may both succeed"
    )
