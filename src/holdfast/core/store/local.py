"""A store in a directory: local disks, NFS and parallel file systems.

A key is a path below the root.  Every object appears whole, and is durable when the call that made it
returns (`holdfast.core.store.tempfiles` explains how).  Large objects are written with O_DIRECT if the
file system has it: a checkpoint is seldom read again soon, and must not push training data out of the
page cache.

    store = LocalStore("/scratch/run")
    writer = store.create("steps/0000000010/rank0.seg", size=1 << 30)
    writer.write(0, memory)
    writer.finish()
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING
from urllib.parse import quote

from holdfast.base.arguments import flag_of, path_of
from holdfast.base.errors import Corrupt, NotFound, warn_user
from holdfast.base.storage_deadlines import Patience, patient, patient_or
from holdfast.base.threads import in_threads
from holdfast.core.store.contract import (
    BLOCK_BYTES,
    SMALL_FILE_BYTES,
    WHOLE_BYTES,
    Bytes,
    Entry,
    Parts,
    byte_view,
    check_key,
    check_length,
    check_prefix,
    is_key,
    not_found,
    not_the_seen,
    seen_view,
)
from holdfast.core.store.directories import (
    LinkedFolder,
    fsync_directories,
    fsync_file,
    fsync_open,
    opened_below,
    remove_empty_directories,
    remove_if_empty,
    walk,
)
from holdfast.core.store.oserrors import obstacle, translated
from holdfast.core.store.regular import has_hole, open_regular, read_whole
from holdfast.core.store.replacing import locked
from holdfast.core.store.tempfiles import TempFile, open_temp, sweep_temp_files

if TYPE_CHECKING:
    from holdfast.core.store.file_readers import LocalReader

_SYNC_THREADS = 16

__all__ = ["LocalStore", "LocalWriter", "sweep_temp_files"]


class LocalStore:
    """Objects as files below `root`, which is made with the first object.

    With `durable=False`, objects appear whole and outlive the process, but may not outlive a power cut
    before `sync`.  An operation that the file system does not answer within `patience.limit_s` raises
    Deadline.
    """

    def __init__(self, root: str | os.PathLike[str], *, durable: bool = True) -> None:
        self.root = os.path.abspath(path_of(root, "LocalStore", "root"))
        self.patience = Patience()
        self.durable = flag_of(durable, "LocalStore", "durable")
        self.url = "file://" + quote(os.fsencode(self.root))
        self.direct = True
        """Whether to ask for O_DIRECT; False once the file system has refused it."""
        self._links: set[str] = set()
        """Paths of the links that the user was warned of."""

    def __repr__(self) -> str:
        return f"LocalStore({self.root!r})"

    @patient
    def put(
        self, key: str, data: Bytes, *, if_absent: bool = False, replacing: Bytes | None = None
    ) -> None:
        """Write a small object, as `Store.put`.  With `replacing`, waits up to a minute while another
        process replaces the same object, then raises `Unavailable`."""
        path, view = self._path(key), byte_view(data)
        flag_of(if_absent, "Store.put", "if_absent")
        seen = seen_view(key, if_absent, replacing)
        if seen is None:
            with translated("put", key, path):
                self._put(path, view, replace=not if_absent)
        else:
            self._replace(key, path, view, seen)

    def _put(self, path: str, view: memoryview, *, replace: bool) -> None:
        temp = open_temp(os.path.dirname(path), durable=self.durable)
        try:
            temp.write(0, view)
            temp.publish(path, self.root, replace=replace)
        finally:
            temp.discard()

    def _replace(self, key: str, path: str, view: memoryview, seen: memoryview) -> None:
        with translated("put", key, path):
            try:
                with locked(path) as file:
                    size = os.fstat(file.fileno()).st_size
                    if size != len(seen) or read_whole(file, size) != seen:
                        raise not_the_seen(key, self.url)
                    self._put(path, view, replace=True)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                raise not_found(key, self.url) from None

    @patient_or(lambda writer: writer.abort())
    def create(self, key: str, size: int) -> LocalWriter:
        """Begin a large object; `OutOfSpace` at once if the disk cannot hold it."""
        parts, path = Parts(key, size), self._path(key)
        with translated("create", key, path):
            directory = os.path.dirname(path)
            temp = open_temp(directory, direct=self.direct, durable=self.durable)
            try:
                temp.reserve(size)
            except BaseException:
                temp.discard()
                raise
        return LocalWriter(self, path, parts, temp)

    @patient
    def get(self, key: str) -> bytes:
        """Return all bytes of an object, as `Store.get`."""
        return self._whole(key, WHOLE_BYTES)

    @patient
    def get_small(self, key: str) -> bytes:
        """Return all bytes of a small object, as `Bounded.get_small`."""
        return self._whole(key, SMALL_FILE_BYTES)

    def _whole(self, key: str, most_bytes: int) -> bytes:
        path = self._path(key)
        with translated("get", key, path):
            file, _, size = open_regular(path, key)
            with file:
                check_length(key, self.url, size, most_bytes)
                if size > SMALL_FILE_BYTES and key.endswith(".json") and has_hole(file, size):
                    raise Corrupt(
                        f"'{key}' in {self.url} has parts that were never written", key=key
                    )
                return read_whole(file, size)

    def read(self, key: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on; `Corrupt` if the object is shorter."""
        with closing(self.open(key)) as reader:
            reader.read(offset, into)

    @patient_or(lambda reader: reader.close())
    def open(self, key: str) -> LocalReader:
        """Open an object for many reads.  It stays readable, its space in use, until `close`."""
        return self._reader(key)

    @patient_or(lambda reader: reader.close())
    def open_once(self, key: str) -> LocalReader:
        """Open an object to be read only once, past the page cache."""
        return self._reader(key, direct=True)

    def _reader(self, key: str, *, direct: bool = False) -> LocalReader:
        from holdfast.core.store.file_readers import LocalReader

        path = self._path(key)
        with translated("read", key, path):
            return LocalReader(key, path, self.patience, direct=direct)

    @patient
    def size(self, key: str) -> int:
        """Length of an object in bytes."""
        path = self._path(key)
        with translated("size", key, path):
            status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise not_found(key, self.url)
        return status.st_size

    @patient
    def entries(self, prefix: str = "") -> list[Entry]:
        """All objects whose keys begin with `prefix`, sorted, with their lengths.  Unlike `list`, without
        links that have no target."""
        found = []
        for key in self.list(prefix):
            with suppress(NotFound):
                found.append(Entry(key, self.size(key)))
        return found

    @patient
    def list(self, prefix: str = "") -> list[str]:
        """All keys that begin with `prefix`, sorted; files whose names are no keys are left out.

        A prefix with a `/` follows links to folders, and lists links without a target: reading one is
        `NotFound`.  `StoreError` if the root, or a folder above it, is a file or a link without a target.
        """
        check_prefix(prefix)
        top = os.path.join(self.root, "")
        directory = os.path.join(top, os.path.dirname(prefix))
        with translated("list", prefix, directory):
            keys = [path[len(top) :] for path in walk(directory, links="/" in prefix)]
            if not keys and not os.path.isdir(self.root) and obstacle(self.root, folder=True):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self.root)
        return sorted(key for key in keys if key.startswith(prefix) and is_key(key))

    @patient
    def delete(self, key: str) -> None:
        """Delete an object, and the directories that this leaves empty.  An object behind a link below the
        root is kept, with a warning; of an object that is a link, only the link is deleted."""
        path = self._path(key)
        directory = os.path.dirname(path)
        with translated("delete", key, path):
            try:
                with opened_below(directory, self.root) as way:
                    with suppress(FileNotFoundError, IsADirectoryError):
                        os.unlink(os.path.basename(path), dir_fd=way[-1])
                    fsync_open(way[-1])
                    remove_if_empty(directory, self.root, way)
            except LinkedFolder as error:
                self._tell_of(error.filename)
            except (FileNotFoundError, NotADirectoryError):
                pass

    @patient
    def is_behind_link(self, key: str) -> bool:
        """True if a folder of the key is a link, so that it is not deleted; the user is warned once."""
        try:
            with opened_below(os.path.dirname(self._path(key)), self.root):
                return False
        except LinkedFolder as error:
            self._tell_of(error.filename)
            return True
        except OSError:
            return False

    def _tell_of(self, link: str) -> None:
        if link not in self._links:
            self._links.add(link)
            warn_user(
                f"'{link}' is a link: what it leads to is read, and never deleted",
                hint="delete there by hand what is not needed; the root itself may be a link",
            )

    @patient
    def sync(self, keys: Iterable[str]) -> None:
        """Make objects and their names durable, in parallel, so that they share the disk's flushes."""
        paths = {self._path(key): key for key in keys}

        def flush(path: str) -> None:
            with translated("sync", paths.get(path, ""), path):
                fsync_file(path) if path in paths else fsync_directories(path, self.root)

        in_threads(flush, list(paths), _SYNC_THREADS)
        in_threads(flush, sorted({os.path.dirname(path) for path in paths}), _SYNC_THREADS)

    @patient
    def free_bytes(self) -> int | None:
        """Bytes of the disk that this user may still write; None if unknown."""
        try:
            room = os.statvfs(self.root)
        except OSError:
            return None
        return room.f_bavail * room.f_frsize

    def place_of(self, key: str) -> str:
        """The path of a key."""
        return os.path.join(self.root, key)

    def _path(self, key: str) -> str:
        check_key(key)
        return os.path.join(self.root, key)


class LocalWriter:
    """One large object being written to a temporary file next to its final name.

    After a failed `finish` only `abort` is possible: after a failed fsync the kernel may have dropped the
    bytes, and would report the next fsync as a success.
    """

    block_bytes = BLOCK_BYTES

    def __init__(self, store: LocalStore, final: str, parts: Parts, temp: TempFile) -> None:
        self.patience = store.patience
        self._store = store
        self._final = final
        self._parts = parts
        self._temp = temp
        self._state = "open"
        self._num_users = 0
        """Number of calls that are using the file."""
        self._changed = threading.Condition()

    def place_of(self, key: str = "") -> str:
        """The final path."""
        return self._final

    @patient
    def write(self, offset: int, data: Bytes) -> None:
        """Write a part; fastest from memory that starts at a multiple of 4096."""
        view = byte_view(data)
        self._parts.check(offset, len(view))
        with self._writing(), translated("write", self._parts.key, self._final):
            self._temp.write(offset, view)
        self._parts.add(offset, len(view))

    @patient
    def finish(self) -> None:
        """Make the object appear with all its bytes, durable; `Exists` if the key is taken."""
        self._parts.check_open(self._state)
        self._parts.check_complete()
        with self._changed:
            self._state = "failed"
            self._changed.wait_for(lambda: not self._num_users)
            self._num_users += 1
        try:
            with translated("finish", self._parts.key, self._final):
                self._store.direct &= self._temp.direct
                self._temp.truncate(self._parts.size)
                self._temp.publish(self._final, self._store.root, replace=False)
            with self._changed:
                self._state = "finished" if self._state == "failed" else self._state
        finally:
            self._let_go()

    def abort(self) -> None:
        """Discard everything written, after the writes under way in other threads.  If storage does not
        answer, returns at once; the file is discarded when it does."""
        with self._changed:
            if self._state == "finished":
                return
            self._state = "aborted"
        self.patience.tidy(self._forget, "abort", self._final)

    def _forget(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._num_users)
        self._discard()

    def _discard(self) -> None:
        self._temp.discard()
        if self._temp.is_at(self._final):  # `finish` failed or timed out after the name was made
            with suppress(OSError):
                os.unlink(self._final)
        remove_empty_directories(os.path.dirname(self._final), self._store.root)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Keep the file open: the number of a closed descriptor may be given to another file."""
        with self._changed:
            self._parts.check_open(self._state)
            self._num_users += 1
        try:
            yield
        finally:
            self._let_go()

    def _let_go(self) -> None:
        with self._changed:
            self._num_users -= 1
            self._changed.notify_all()
