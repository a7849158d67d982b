"""The files that an agent keeps in shared memory, so that the next agent finds them.

```
<home>/agent.json  agent.lock  agent.log  agent.sock
<home>/jobs/<job>/job.json                          root and run, and the version of all that lies here
<home>/jobs/<job>/peers.json                        the agents of all nodes, at the newest commit
<home>/jobs/<job>/share-00003-0                     an image, as it will be a file of a step
<home>/jobs/<job>/share-00003-0.json                its header: attempt, rank, step, digest of its table
<home>/jobs/<job>/manifest-0000000120-0001-000012   a committed snapshot's manifest
<home>/gone/<random>                                what was removed and is not deleted yet
```
A header is replaced in one piece.  It says `ready` only of an image that was filled and digested, and is
replaced before the image is filled again.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np

from holdfast.base.errors import Corrupt, UnsupportedVersion
from holdfast.base.wire import decode_json
from holdfast.core.codec.digest import digest_chunks, hexdigest, num_chunks
from holdfast.core.codec.table import DigestTable
from holdfast.tiers.memory.node.home import ANEW, make_home, replace_file
from holdfast.tiers.memory.node.jobs import Job
from holdfast.tiers.memory.node.messages import VERSION, Card, Slot

_MANIFEST = re.compile(r"manifest-(\d{10,})-([0-9A-Za-z-]+)")
_NAME = re.compile(r"[a-z]+-\d{5,}-\d+")


class JobNote(msgspec.Struct, frozen=True):
    """`job.json`: what the next agent must know of a job besides its slots."""

    root: str
    run: int
    trainers: dict[int, tuple[int, str]] = {}
    claim: bytes = b""
    flush_s: float = 0.0
    bytes_per_s: int = 0
    version: int = VERSION


def job_note(job: Job) -> JobNote:
    return JobNote(job.root, job.run, job.trainers, job.claim, job.flush_s, job.bytes_per_s)


class _Version(msgspec.Struct):
    version: int = VERSION


class Segments:
    """The files of all jobs below `root`.  Only this user can open them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.jobs = root / "jobs"
        self._gone = root / "gone"
        for folder in (root, self.jobs, self._gone):
            make_home(folder)
        self._deleting = threading.Lock()
        self._number = self.jobs.stat().st_ino

    def is_home(self) -> bool:
        """True if the directory is still the one that was found or made at the start."""
        try:
            return self.jobs.stat().st_ino == self._number
        except FileNotFoundError:
            return False

    def path(self, job: str, name: str) -> Path:
        return self.jobs / job / name

    def make(self, job: str, name: str, capacity: int) -> None:
        """Make a file with all its memory, so that no later write to it can fail; OSError.  Files
        that were removed are deleted first, to make room."""
        self.delete_removed()
        (self.jobs / job).mkdir(mode=0o700, exist_ok=True)
        fd = os.open(self.path(job, name), os.O_RDWR | ANEW, 0o600)
        try:
            os.posix_fallocate(fd, 0, capacity)
        finally:
            os.close(fd)

    def place(self, job: str, made: str, name: str) -> None:
        """Give a file that was made its name."""
        os.rename(self.path(job, made), self.path(job, name))

    def note(self, job: str, slot: Slot) -> None:
        """Write a slot's header."""
        self._put(job, f"{slot.name}.json", msgspec.json.encode(slot))

    def note_job(self, job: str, note: JobNote) -> None:
        self._put_if_changed(job, "job.json", msgspec.json.encode(note))

    def keep_manifest(self, job: str, attempt: str, step: int, manifest: bytes) -> None:
        """Keep the manifest of a commit, which is the newest from here on, even if the clock was set
        back."""
        times = [path.stat().st_mtime_ns for _, _, path in self.manifests(job)]
        at = max([time.time_ns(), *(1 + t for t in times)])
        self._put(job, f"manifest-{step:010d}-{attempt}", manifest, at)

    def keep_peers(self, job: str, cards: tuple[Card, ...]) -> None:
        self._put_if_changed(job, "peers.json", msgspec.json.encode(cards))

    def peers(self, job: str) -> tuple[Card, ...]:
        """The agents that held part of the newest commit."""
        try:
            data = self.path(job, "peers.json").read_bytes()
            return decode_json(data, tuple[Card, ...])
        except (OSError, msgspec.DecodeError):
            return ()

    def _put_if_changed(self, job: str, name: str, data: bytes) -> None:
        """Write a file that every rank reports, unless it has this content."""
        with suppress(OSError):
            if self.path(job, name).read_bytes() == data:
                return
        self._put(job, name, data)

    def _put(self, job: str, name: str, data: bytes, at: int | None = None) -> None:
        path = self.path(job, name)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        replace_file(path, data, at)

    def manifests(self, job: str) -> list[tuple[int, str, Path]]:
        """(step, attempt, file) of every committed snapshot, in the order of their commits."""
        found = []
        with suppress(FileNotFoundError):
            for entry in os.scandir(self.jobs / job):
                match = _MANIFEST.fullmatch(entry.name)
                if match and entry.is_file(follow_symlinks=False):
                    at = entry.stat().st_mtime_ns
                    found.append((at, int(match[1]), match[2], Path(entry.path)))
        return [(step, attempt, path) for _, step, attempt, path in sorted(found)]

    def remove(self, job: str, names: tuple[str, ...], attempts: tuple[str, ...]) -> None:
        for name in names:
            self._put_away(self.path(job, f"{name}.json"))
            self._put_away(self.path(job, name))
        for _, attempt, path in self.manifests(job):
            if attempt in attempts:
                path.unlink(missing_ok=True)

    def remove_job(self, job: str) -> None:
        self._put_away(self.jobs / job)

    def _put_away(self, path: Path) -> None:
        """Move a file or folder out of the way at once, to be deleted later: the kernel takes a second
        to free some gigabytes."""
        self._gone.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):
            path.rename(self._gone / secrets.token_hex(8))

    def delete_removed(self) -> None:
        """Delete what was removed.  Blocks; from any thread."""
        with self._deleting, suppress(FileNotFoundError):
            for path in list(self._gone.iterdir()):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    def digest(self, job: str, slot: Slot) -> str:
        """Digest what a slot holds chunk by chunk, write the table, and return the table's digest."""
        with mapped(self.path(job, slot.name), slot.bytes) as view:
            return put_table(view, slot.table)

    def is_sound(self, job: str, slot: Slot) -> bool:
        """True if a slot holds what was written."""
        try:
            with mapped(self.path(job, slot.name), slot.bytes) as view:
                return is_sound(view, slot.table, slot.digest)
        except (OSError, ValueError):
            return False

    def find(self) -> Iterator[Job]:
        """Yield the jobs that an earlier agent left.  Files that cannot be understood are removed.

        UnsupportedVersion if a newer one left it: then everything stays as it is.
        """
        found = sorted(self.jobs.iterdir())
        folders = [f for f in found if f.is_dir() and not f.is_symlink()]
        for folder in folders:
            self._check_version(folder)
        for path in {*found} - {*folders}:  # a link may lead anywhere
            self._put_away(path)
        for folder in folders:
            slots = {}
            for entry in [e for e in folder.iterdir() if not _is_file(e)]:
                self._put_away(entry)
            for entry in list(folder.iterdir()):
                if _NAME.fullmatch(entry.name):
                    slot = self._slot(folder.name, entry)
                    if slot is None:
                        self.remove(folder.name, (entry.name,), ())
                    else:
                        slots[slot.name] = slot
                elif entry.name.startswith("."):
                    entry.unlink(missing_ok=True)
            commits = tuple((a, step) for step, a, _ in self.manifests(folder.name))
            number = 1 + max((int(name.rpartition("-")[2]) for name in slots), default=-1)
            about = self._about(folder)
            yield Job(
                folder.name, about.root, about.run, slots, commits, about.trainers,
                claim=about.claim, flush_s=about.flush_s, bytes_per_s=about.bytes_per_s, number=number,
            )  # fmt: skip

    def _slot(self, job: str, path: Path) -> Slot | None:
        try:
            slot = decode_json(self.path(job, f"{path.name}.json").read_bytes(), Slot)
        except (OSError, msgspec.DecodeError):
            return None
        size = path.stat().st_size
        return slot if slot.name == path.name and slot.capacity == size else None

    def _check_version(self, folder: Path) -> None:
        version, note = VERSION, folder / "job.json"
        with suppress(OSError, msgspec.DecodeError):
            if _is_file(note):
                version = decode_json(note.read_bytes(), _Version).version
        if version > VERSION:
            raise UnsupportedVersion(
                f"{folder} was left by a newer holdfast (version {version}; this one has {VERSION})",
                hint="use that one, or delete the directory, and its snapshots with it",
            )

    def _about(self, folder: Path) -> JobNote:
        try:
            return decode_json((folder / "job.json").read_bytes(), JobNote)
        except (OSError, msgspec.DecodeError):
            return JobNote("?", 0)


def _is_file(path: Path) -> bool:
    """True for a regular file; False for a link, which may lead out of the home, a folder or a pipe."""
    with suppress(OSError):
        return stat.S_ISREG(path.lstat().st_mode)
    return False


def put_table(view: memoryview, table: int) -> str:
    """Digest bytes 0..table chunk by chunk, write the digests behind, and return the digest of these."""
    digests = np.empty(num_chunks(table), "<u8")
    digest_chunks(view[:table], digests)
    data = digests.tobytes()
    if len(data) > len(view) - table:
        raise ValueError(f"no room for a table of {len(data)} bytes")
    view[table : table + len(data)] = data
    return hexdigest(data)


def table_in(view: memoryview, table: int, digest: str) -> DigestTable:
    """Return the digest table of an image, which begins at byte `table` of it; Corrupt if it has another
    digest."""
    return DigestTable.of(bytes(view[table : table + 8 * num_chunks(table)]), digest, table)


def is_sound(view: memoryview, table: int, digest: str) -> bool:
    """True if the digest table has that digest, and bytes 0..table are what it says."""
    try:
        table_in(view, table, digest).check(0, view[:table])
    except Corrupt:
        return False
    return True


def with_table(size: int) -> int:
    """Return the bytes of an image or guard of `size` bytes with its digest table."""
    return size + 8 * num_chunks(size)


@contextmanager
def mapped(path: Path, size: int) -> Iterator[memoryview]:
    """Map the first `size` bytes of a file, to read and write."""
    fd = os.open(path, os.O_RDWR)
    try:
        memory = mmap.mmap(fd, size)
    finally:
        os.close(fd)
    view = memoryview(memory)
    try:
        yield view
    finally:
        view.release()
        with suppress(BufferError):
            memory.close()
