"""Files that appear whole and durable.

An object is written under a temporary name in the directory it will live in, made durable, and
only then given its own name:

    temp = open_temp(directory)            # .tmp-<place>-<pid>-<random>
    temp.write(0, view)
    temp.publish(final, root, replace=False)
    temp.discard()                         # always; does nothing after publish

The order must hold (else data loss): bytes reach the disk, the name appears, the name reaches the disk.
A name that must be new is made by link(2), which is atomic on NFS too and fails if the name is taken.  A
network file system may lose the reply and repeat the call; so after an error of link or rename, the call
counts as successful if the name is our file's.

A process that dies leaves its temporary files.  They are never listed; `sweep_temp_files` removes them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import io
import mmap
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress

from holdfast.base.host import host_id
from holdfast.base.memory_address import memory_address
from holdfast.core.store.contract import BLOCK_BYTES
from holdfast.core.store.directories import (
    fsync_directories,
    make_directory,
    remove_empty_directories,
    unlink_below,
    walk,
)
from holdfast.core.store.oserrors import REFUSED, obstacle, translated
from holdfast.core.store.regular import O_DIRECT, open_direct, open_file

_BOUNCE_BYTES = 1 << 20

_TEMP_NAME = re.compile(r"\.tmp-(?P<place>.+)-(?P<pid>\d{1,9})-[0-9a-f]{16}")


def owner() -> str:
    """Return a name of this boot of this host, for file names; `unknown` if it cannot be told."""
    where = host_id()
    return "unknown" if where is None else hashlib.sha256(where.encode()).hexdigest()[:16]


def temp_name() -> str:
    """Return a unique file name that states this host and process."""
    return f".tmp-{owner()}-{os.getpid()}-{secrets.token_hex(8)}"


def sweep_temp_files(
    root: str | os.PathLike[str], is_over: Callable[[str], bool] = lambda _: False
) -> list[str]:
    """Remove temporary files below `root` whose process is dead, and the directories that this
    empties; return the files' paths.

    Only files of this boot of this host can be judged; others are removed only from directories for which
    `is_over(path below root)` says that their writers have finished.  Safe next to writers.  Files that may
    not be read or removed are left.
    """
    top, removed = os.path.abspath(root), []
    with translated("sweep", "", top):
        paths = list(walk(top, forbidden=False))
    for path in paths:
        directory, name = os.path.split(path)
        match = _TEMP_NAME.fullmatch(name)
        if match and (_is_stale(match) or is_over(os.path.relpath(directory, top))):
            with suppress(OSError):
                unlink_below(path, top)
                removed.append(path)
            remove_empty_directories(directory, top)
    return removed


def _is_stale(match: re.Match[str]) -> bool:
    if host_id() is None or match["place"] != owner():
        return False
    try:
        os.kill(int(match["pid"]), 0)
    except ProcessLookupError:
        return True
    except OSError:  # no permission to signal it, so it is alive
        pass
    return False


def open_temp(directory: str, *, direct: bool = False, durable: bool = True) -> TempFile:
    """Begin a file in `directory`, which is made if missing.

    `direct` asks for O_DIRECT; `TempFile.direct` states whether the file system granted it.  Without
    `durable`, `publish` syncs nothing.  If another process deletes the last object of the directory, and
    with it the directory, between mkdir and open, both are tried again.
    """
    for _ in range(100):
        path = os.path.join(directory, temp_name())
        with suppress(FileNotFoundError):
            make_directory(directory, durable=durable)
            temp = _open_new(path, direct=direct and bool(O_DIRECT))
            temp.durable = durable
            return temp
        if obstacle(directory, folder=True):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory)
    missing = _first_missing(directory)
    raise OSError(errno.EBUSY, f"'{missing}' cannot be made, or vanishes each time", directory)


def _first_missing(directory: str) -> str:
    above = os.path.dirname(directory)
    return directory if os.path.isdir(above) or above == directory else _first_missing(above)


def _open_new(path: str, *, direct: bool) -> TempFile:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    if direct:
        return TempFile(path, *open_direct(path, flags))
    return TempFile(path, open_file(path, flags), False)


class TempFile:
    """A file under a temporary name; owned by one caller, who must `discard` it in the end.

    With `direct`, every byte goes past the page cache, so that no page has cached and direct writes:
    unaligned memory is copied through an aligned buffer, and the last block is padded (`truncate` cuts it).
    If the file system refuses a direct write, the file is written through the cache from then on.  Only
    `write` may be called from several threads.
    """

    def __init__(self, path: str, file: io.FileIO, direct: bool) -> None:
        self.path = path
        self.direct = direct
        self.durable = True
        self._file = file
        self._fd = file.fileno()
        self._identity: os.stat_result | None = None
        self._spare: list[memoryview] = []  # kept: a fresh page costs more than its copy

    def reserve(self, size: int) -> None:
        """Allocate `size` bytes if the file system can, so that a full disk fails now."""
        if size:
            _fallocate(self._fd, _whole_blocks(size))

    def write(self, offset: int, view: memoryview) -> None:
        """Write all of `view` at `offset`, a multiple of 4096; may pad up to the next multiple."""
        aligned = len(view)
        if self.direct:
            aligned = len(view) // BLOCK_BYTES * BLOCK_BYTES if is_aligned(view) else 0
        self._write_all(offset, view[:aligned])
        if aligned < len(view):
            self._write_copied(offset + aligned, view[aligned:])

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes, without padding and unused reserved space."""
        os.ftruncate(self._fd, size)

    def publish(self, final: str, root: str, *, replace: bool) -> None:
        """Make the bytes durable, then make the name `final` appear, then make the name durable.

        Without `replace`, a taken name is a FileExistsError, raised once that name is durable.  If the file
        is not `durable`, the name only appears.
        """
        if self.durable:
            os.fsync(self._fd)
        self._identity = os.fstat(self._fd)
        self.close()  # NFS renames a file that is unlinked while open
        directory = os.path.dirname(final)
        try:
            self._rename(final, replace=replace)
        except FileExistsError:
            if self.durable:
                fsync_directories(directory, root)
            raise
        if not replace:
            os.unlink(self.path)
        if self.durable:
            fsync_directories(directory, root)

    def is_at(self, path: str) -> bool:
        """True if `path` names this file."""
        with suppress(OSError):
            return self._identity is not None and os.path.samestat(self._identity, os.stat(path))
        return False

    def discard(self) -> None:
        """Close the file and remove its temporary name, if they are still there; never raises."""
        with suppress(OSError):
            self.close()
        with suppress(OSError):
            os.unlink(self.path)

    def _rename(self, final: str, *, replace: bool) -> None:
        try:
            (os.replace if replace else os.link)(self.path, final)
        except OSError:
            if not self.is_at(final):
                raise

    def close(self) -> None:
        """Close the file, under whatever name it has."""
        self._fd = -1
        self._file.close()

    def _write_all(self, offset: int, view: memoryview) -> None:
        while view:
            done = self._write_some(offset, view)
            offset += done
            view = view[done:]

    def _write_copied(self, offset: int, view: memoryview) -> None:
        try:
            buffer = self._spare.pop()
        except IndexError:
            buffer = memoryview(mmap.mmap(-1, _BOUNCE_BYTES))  # starts at a page
        for start in range(0, len(view), _BOUNCE_BYTES):
            part = view[start : start + _BOUNCE_BYTES]
            buffer[: len(part)] = part
            self._write_all(offset + start, buffer[: _whole_blocks(len(part))])
        self._spare.append(buffer)

    def _write_some(self, offset: int, view: memoryview) -> int:
        direct = self.direct
        try:
            done = os.pwrite(self._fd, view, offset)
        except OSError as error:
            if not (direct and error.errno in REFUSED):
                raise
            self._leave_direct()
            return 0
        if not done:
            raise OSError(errno.EIO, "the file system wrote nothing and gave no reason")
        return done

    def _leave_direct(self) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~O_DIRECT)
        self.direct = False  # after F_SETFL: a thread that reads False writes without the flag


def is_aligned(view: memoryview) -> bool:
    """True if memory starts at a multiple of `BLOCK_BYTES`."""
    return memory_address(view) % BLOCK_BYTES == 0


def _whole_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


_libc = ctypes.CDLL(None, use_errno=True)


def _fallocate(fd: int, size: int) -> None:
    """Call fallocate(2), not posix_fallocate(3), which writes into every block where the former is not
    supported (NFS 3)."""
    call = getattr(_libc, "fallocate", None)
    if call is None:
        return
    code = errno.EINTR
    while code == errno.EINTR:
        failed = call(ctypes.c_int(fd), ctypes.c_int(0), ctypes.c_int64(0), ctypes.c_int64(size))
        code = ctypes.get_errno() if failed else 0
    if code and code not in REFUSED:
        raise OSError(code, os.strerror(code))
