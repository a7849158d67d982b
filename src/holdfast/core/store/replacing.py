"""Replacing a file only while it is the one that was seen, against other processes that do the same.

    with held(path) as file:              # nobody else holds this file to replace it
        if whole(file, len(seen)) == seen:
            temp.publish(path, root, replace=True)

A file system has no call for this: rename replaces whatever is there.  So whoever means to replace a file
locks that very file first.  A replacement is another file of the same name, so a lock that was waited for
may be of a file that has no name any more: then the new one is taken.  There is no lock file, so nothing
stays behind; the kernel drops the lock of a process that dies.

    A: lock old, equal, rename ......... unlock
    B: wait for the lock of old ............... is old still `path`? no: lock new, not equal, refuse

flock(2) holds between hosts on NFS, too (the client makes a lock of byte ranges of it).  Where a file
system refuses locks, such as Lustre mounted without `flock`, a warning says so once, and the look and the
rename are two steps.
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
"""Others hold a lock for one small write; who holds it longer is stuck."""

_POLL_S = 0.005
_BUSY = (errno.EAGAIN, errno.EACCES, errno.EINTR)
_NO_LOCKS = (*REFUSED, errno.ENOLCK)


@contextmanager
def locked(path: str, *, deadline_s: float = _DEADLINE_S) -> Iterator[io.FileIO]:
    """The file at `path`, open and locked; nobody else replaces it meanwhile.

    Blocks while another process holds it; Unavailable after `deadline_s`.  FileNotFoundError if there is
    none.
    """
    until = time.monotonic() + deadline_s
    while True:
        with _open(path) as file:
            if _lock(file.fileno(), path, until) and _is_at(file.fileno(), path):
                yield file
                return


def _open(path: str) -> io.FileIO:
    with suppress(PermissionError):
        return open_file(path, os.O_RDWR | AT_ONCE)  # NFS locks only what may be written
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
                f"'{path}' is being replaced by another process, which does not end",
                hint="is that process stopped, or its storage stuck?  `fuser` names it",
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
