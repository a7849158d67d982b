"""The border where errors of the operating system become `StoreError`s.

    with translated("put", key, path):
        os.link(temp, path)           # EEXIST -> Exists, ENOSPC -> OutOfSpace, EIO -> Unavailable

Every message states the operation, the full path and the cause.  ENOTDIR, ELOOP and ENOENT do not say
which part of the path is wrong: for a link to a volume that is not mounted, the error is that a file deep
below is missing.  So the path is checked from the top down, and the message names the obstacle:

    obstacle("/scratch/run/steps")    # "'/scratch/run' is a file, not a folder"
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.base.errors import (
    Exists,
    HoldfastError,
    NotFound,
    OutOfSpace,
    StoreError,
    Unavailable,
)

# -- obstacles on the way to a path ------------------------------------------------------------------


_MAX_NAME_BYTES = 255
_SHOWN = 40
_NESTED = "a key cannot also be the directory of other keys"


def obstacle(path: str, *, folder: bool = False) -> tuple[str, str] | None:
    """Return the first obstacle on an absolute path and a hint, in words; None if there is none.

    `folder`: the path itself must be a folder.  A missing part is no obstacle.
    """
    parts = path.split(os.sep)
    for name in parts:
        length = len(os.fsencode(name))
        if length > _MAX_NAME_BYTES:
            hint = "file systems allow 255 bytes for a name"
            return f"the name '{name[:_SHOWN]}...' has {length} bytes", hint
    for i in range(1, len(parts)):
        here = os.sep.join(parts[: i + 1])
        try:
            status = os.stat(here)
        except PermissionError:
            above = os.path.dirname(here)
            return (
                f"this user may not look into '{above}'",
                "ask for the right to (x of the folder)",
            )
        except OSError as error:
            return _of_link(here, error.errno)
        if not stat.S_ISDIR(status.st_mode) and (folder or i < len(parts) - 1):
            return f"'{here}' is a file, not a folder", f"give a folder for checkpoints; {_NESTED}"
    return None


def _of_link(path: str, code: int | None) -> tuple[str, str] | None:
    """Return why a link has no target, and a hint; None if there is no link."""
    if not os.path.islink(path):
        return None
    target = os.readlink(path)
    if code == errno.ELOOP:
        return f"'{path}' is a link to '{target}', which leads back to it", "remove the link"
    return (
        f"'{path}' is a link to '{target}', which is not there",
        "mount or make what it leads to, or remove the link",
    )


# -- errors ------------------------------------------------------------------------------------------


_MOST_SHOWN = 400
_ON_THE_WAY = (
    errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.EACCES, errno.EBUSY,
)  # fmt: skip
REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Error numbers for a flag or call that the file system does not support."""

_PASSING = (
    "EIO ESTALE ETIMEDOUT EAGAIN EINTR EBUSY ENOLCK ENOMEM EMFILE ENFILE EREMOTEIO ECONNRESET "
    "ECONNREFUSED ENETDOWN ENETUNREACH EHOSTDOWN EHOSTUNREACH ENOTCONN ESHUTDOWN"
)
_FORBIDDEN = "may this user write there, is the mount read-only, does it know hard links?"
_HINTS = {
    errno.ENOSPC: "free space, or prune old steps",
    errno.EDQUOT: "raise the quota, or prune old steps",
    errno.EROFS: _FORBIDDEN,
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.ENOTSUP: _FORBIDDEN,
    errno.ENOTDIR: _NESTED,
    errno.EISDIR: _NESTED,
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENAMETOOLONG: "file systems allow 255 bytes between two slashes",
}


def _error_kinds() -> dict[int, type[StoreError]]:
    passing = [getattr(errno, name) for name in _PASSING.split() if hasattr(errno, name)]
    kinds: dict[int, type[StoreError]] = dict.fromkeys(passing, Unavailable)
    kinds |= {errno.ENOSPC: OutOfSpace, errno.EDQUOT: OutOfSpace}
    return kinds | {errno.ENOENT: NotFound, errno.EEXIST: Exists}


_KINDS = _error_kinds()


@contextmanager
def translated(op: str, key: str, path: str) -> Iterator[None]:
    """Raise an `OSError` of this block as a `StoreError` of operation `op` on `key`."""
    try:
        yield
    except HoldfastError:  # a Deadline is an OSError, too
        raise
    except OSError as error:
        raise _store_error(op, key, path, error) from error


def _store_error(op: str, key: str, path: str, error: OSError) -> StoreError:
    code = error.errno or 0
    kind = _KINDS.get(code, StoreError)
    if op in ("get", "read", "size") and code in (errno.ENOTDIR, errno.EISDIR, errno.ELOOP):
        kind = NotFound
    if code == errno.ENAMETOOLONG and os.path.islink(path):  # its target cannot exist
        kind = NotFound
    cause, hint = error.strerror or str(error), _HINTS.get(code) if kind is not NotFound else None
    found = obstacle(path, folder=op == "list") if code in _ON_THE_WAY else None
    if found is not None:
        cause, hint = found
    name = errno.errorcode.get(code, code)
    return kind(f"cannot {op} '{shortened(path)}': {cause} ({name})", key=key or None, hint=hint)


def shortened(path: str) -> str:
    """A path for a message: a long one without its middle."""
    return path if len(path) <= _MOST_SHOWN else f"{path[:200]}...{path[-80:]}"
