"""The one border where what the operating system says becomes what a store says.

    with translated("put", key, path):
        os.link(temp, path)           # EEXIST -> Exists, ENOSPC -> OutOfSpace, EIO -> Unavailable

Every message carries the operation, the full path and the cause.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.errors import Exists, HoldfastError, NotFound, OutOfSpace, StoreError, Unavailable
from holdfast.store.obstacles import NESTED, obstacle

MOST_SHOWN = 400
_ON_THE_WAY = (
    errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.EACCES, errno.EBUSY,
)  # fmt: skip
REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Error numbers by which a file system says that it does not know a flag or a call."""

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
    errno.ENOTDIR: NESTED,
    errno.EISDIR: NESTED,
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
    """The one border where an `OSError` becomes a `StoreError`."""
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
    cause, hint = error.strerror or str(error), _HINTS.get(code) if kind is not NotFound else None
    found = obstacle(path, folder=op == "list") if code in _ON_THE_WAY else None
    if found is not None:
        cause, hint = found
    name = errno.errorcode.get(code, code)
    return kind(f"cannot {op} '{shortened(path)}': {cause} ({name})", key=key or None, hint=hint)


def shortened(path: str) -> str:
    """A path as a message can bear it."""
    return path if len(path) <= MOST_SHOWN else f"{path[:200]}...{path[-80:]}"
