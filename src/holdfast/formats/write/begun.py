"""Files that a conversion has begun, and goes on with when it is started again.

    files/model.safetensors.begun     the bytes, each block at its place
    files/model.safetensors.blocks    for each block that is written: start, length and digest

A block is recorded once it is written, so a process that is interrupted or killed leaves both files.  The
next try, whose mark proves that it is the same conversion since the same start of the host, reads recorded
blocks back instead of making them from the source.  A block without its digest is made anew.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from io import FileIO

from holdfast.base.storage_deadlines import patient
from holdfast.core.codec.digest import digest
from holdfast.core.store.contract import Bytes, Parts, byte_view
from holdfast.core.store.directories import make_directory
from holdfast.core.store.local import LocalStore, LocalWriter
from holdfast.core.store.oserrors import translated
from holdfast.core.store.regular import open_direct
from holdfast.core.store.tempfiles import TempFile

BEGUN, BLOCKS = ".begun", ".blocks"
_RECORD = struct.Struct("<QQQ")


class BegunFiles(LocalStore):
    """A directory in which unfinished objects stay, to be gone on with by `create` of the same key."""

    @patient
    def create(self, key: str, size: int) -> BegunWriter:
        """Begin a large object, or go on with it; `OutOfSpace` at once if the disk cannot hold it."""
        parts, path = Parts(key, size), self._path(key)
        with translated("create", key, path):
            make_directory(os.path.dirname(path), durable=False)
            temp = TempFile(path + BEGUN, *open_direct(path + BEGUN, os.O_WRONLY | os.O_CREAT))
            temp.durable = False
            try:
                temp.reserve(size)
                return BegunWriter(self, path, parts, temp)
            except BaseException:
                temp.close()
                raise

    def begun_bytes(self, key: str) -> int:
        """Bytes of the disk that an unfinished object has; 0 if it was not begun."""
        with suppress(FileNotFoundError):
            return os.stat(self._path(key) + BEGUN).st_blocks * 512
        return 0


class BegunWriter(LocalWriter):
    """A writer of an object that an earlier one may have begun."""

    def __init__(self, store: LocalStore, final: str, parts: Parts, temp: TempFile) -> None:
        super().__init__(store, final, parts, temp)
        self._log = FileIO(final + BLOCKS, "a+")
        self._log.seek(0)
        data = self._log.readall()
        whole = len(data) // _RECORD.size * _RECORD.size
        self._log.truncate(whole)  # a process died while it wrote the last one
        self._known = {start: rest for start, *rest in _RECORD.iter_unpack(data[:whole])}

    def read_back(self, offset: int, into: memoryview) -> bool:
        """Fill `into` with the part that an earlier writer wrote at `offset`; False if there is none of
        that length, or its bytes are others by now."""
        known = self._known.get(offset)
        if known is None or known[0] != len(into):
            return False
        with FileIO(self._temp.path) as file:
            if os.preadv(file.fileno(), [into], offset) != len(into) or digest(into) != known[1]:
                return False
        self._parts.add(offset, len(into))
        return True

    def write(self, offset: int, data: Bytes) -> None:
        """Write a part, and record it."""
        super().write(offset, data)
        view = byte_view(data)
        self._log.write(_RECORD.pack(offset, len(view), digest(view)))

    def finish(self) -> None:
        """Make the object appear with all its bytes."""
        super().finish()
        self._log.close()
        os.unlink(self._final + BLOCKS)

    def _discard(self) -> None:
        self._temp.close()
        self._log.close()
