"""Copying a step from one store into another, every byte proved on the way.

A copy is a save whose bytes come from a store: files first, the manifest last, by a put that one of several
writers wins.  So a copy that stops anywhere leaves no step, or the whole one:

    source                               target
    steps/0000000005/manifest.json
    .../0002-000007/r00000  -----------> .../0002-000007/r00000            part by part, each
    .../0002-000007/r00001  -----------> .../0002-000007/r00001            chunk by its digest
                                         steps/0000000005/manifest.json    from here on it exists

A part is read, compared with the digests that the manifest vouches for, and only then written: what is
damaged in the source never arrives.  A file appears whole or not at all, so a copy that is begun again
takes a file of the right length and digest table for done.

    transfer(open_store("/scratch/run"), open_store("s3://bucket/run"), 5)

How many parts are under way at once, and how large they are, is for the source to say (`Reads`): a bucket
takes long to begin to answer.  Memory: a part and two chunks for each thread, and what writers hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Literal

import msgspec

from holdfast.base.errors import (
    Corrupt,
    Exists,
    FormatError,
    HoldfastError,
    NotFound,
    StoreError,
    warn_user,
)
from holdfast.base.threads import ThreadPages, in_threads
from holdfast.base.wire import decode_json
from holdfast.core.checkpoint.files import Files
from holdfast.core.checkpoint.names import (
    attempt_in,
    check_step,
    manifest_key,
    read_manifest,
    step_prefix,
)
from holdfast.core.checkpoint.tidying import INDEX, discard
from holdfast.core.codec.table import DigestTable
from holdfast.core.format.manifest import FileEntry, Manifest, decode_manifest
from holdfast.core.store import Reader, Store
from holdfast.core.store.contract import part_bytes, reads_of

COPY_PART_BYTES = 8 << 20
"""Bytes of a part, unless the source asks for others, or the target takes only larger ones
(`Writer.block_bytes`)."""
_THREADS = 4
"""Parts, or files, that are under way at once, unless the source asks for more."""
_MOST_INDEX_BYTES = 64 << 20
_FILES = 4
"""Files of several parts that are under way at once."""

Progress = Callable[[int], object]
"""Called from any thread with the number of bytes just done; what it raises ends the copy."""


@dataclass(frozen=True, slots=True)
class Transferred:
    """The result of copying one step."""

    step: int
    num_files: int
    num_copied: int
    """Files that were not there yet."""
    bytes: int
    """Bytes of the copied files."""
    is_new: bool
    """False if the step was in the target already, with this manifest."""


def transfer(
    source: Store,
    target: Store,
    step: int,
    *,
    replace: bool = False,
    dry_run: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Transferred:
    """Make step `step` of one root exist in another, the same byte for byte.  Blocks.

    May be called again after any error: files that have arrived are not copied again.  If the target has
    another step of that number: Exists, or with `replace` that one gives way when all is there.  NotFound
    if the source has no such step, Corrupt if it is damaged: then the target's steps are as they were.
    `progress` is told of `Manifest.total_bytes` in all, the bytes of files that were there included.
    `dry_run`: nothing is written, and the result says what would be.  `threads`: parts that are read at
    once, rather than as the source states.
    """
    threads = threads or threads_of(source)
    key, tell = manifest_key(step), progress or (lambda _: None)
    manifest, data = _manifest(source, step)
    seen = _present(target, key)
    there = set(target.list(step_prefix(step)))
    if seen is not None and seen != data:
        _check_other(target, manifest, seen, replace)
    of_step = Files(source, step_prefix(step), manifest, verify=True)
    files = _FilesToCopy(of_step, target, there, proves=seen != data)
    missing = files.missing(threads, tell)
    if not dry_run:
        files.copy(missing, threads, tell)
        _copy_indexes(source, target, manifest)
        _check_arrived(target, manifest)
        if seen != data:
            _commit(target, step, data, seen)
    num_bytes = sum(f.bytes for f in missing)
    return Transferred(step, len(manifest.objects), len(missing), num_bytes, seen != data)


def _manifest(source: Store, step: int) -> tuple[Manifest, bytes]:
    """The manifest of a step, and its very bytes."""
    key = manifest_key(step)
    data = _present(source, key)
    if data is None:
        read_manifest(source, step)  # NotFound, with the steps that there are
        raise NotFound(f"step {step} of {source.url} came and went", step=step, key=key)
    try:
        manifest = decode_manifest(data, key)
    except FormatError as error:
        error.step = step
        raise
    check_step(manifest, step)
    return manifest, data


def _present(store: Store, key: str) -> bytes | None:
    try:
        return store.get(key)
    except NotFound:
        return None


def _attempt(data: bytes, step: int) -> str | None:
    """The attempt that a manifest names; None if it is damaged."""
    try:
        return attempt_in(data, step)
    except HoldfastError:
        return None


def _check_other(target: Store, manifest: Manifest, seen: bytes, replace: bool) -> None:
    """Exists if the target's step of that number, which is another, must stay."""
    step, key = manifest.step, manifest_key(manifest.step)
    if not replace:
        raise Exists(
            f"{target.url} has another step {step}",
            step=step,
            key=key,
            hint="nothing is overwritten: give another target, or delete that step",
        )
    if _attempt(seen, step) == manifest.attempt:
        raise Exists(
            f"{target.url} has another step {step}, of an attempt of the same name, {manifest.attempt}",
            step=step,
            key=key,
            hint="two roots went apart under one number of a run: give another target",
        )


def _commit(target: Store, step: int, data: bytes, seen: bytes | None) -> None:
    """Put the manifest, where the one that was seen, or none, still is."""
    key, old = manifest_key(step), None if seen is None else _attempt(seen, step)
    try:
        if seen is None:
            target.put(key, data, if_absent=True)
        else:
            target.put(key, data, replacing=seen)
    except (Exists, NotFound):
        if _present(target, key) != data:
            raise Exists(
                f"another process has saved or deleted step {step} of {target.url} during the copy",
                step=step,
                key=key,
                hint="copy again, or to another target",
            ) from None
    if old is not None:
        discard(target, step, old)


def _copy_indexes(source: Store, target: Store, manifest: Manifest) -> None:
    """Copy what lies beside a consolidated step's manifest for the loaders of others.  No digest proves it,
    and it may be a link to anything: it has to say what the manifest says, and no more."""
    prefix = step_prefix(manifest.step)
    for key in source.list(prefix):
        if key.endswith(INDEX) and "/" not in key.removeprefix(prefix):
            with suppress(NotFound):
                if source.size(key) <= _MOST_INDEX_BYTES and _is_index(
                    text := source.get(key), manifest
                ):
                    target.put(key, text)
                    continue
            warn_user(f"'{key}' is not copied: it is no index of the files of step {manifest.step}")


class _WeightIndex(msgspec.Struct, forbid_unknown_fields=True):
    metadata: dict[Literal["total_size"], int] = {}
    weight_map: dict[str, str] = {}


def _is_index(text: bytes, manifest: Manifest) -> bool:
    """True if all that an index says is which files have which tensors, as the manifest does."""
    try:
        index = decode_json(text, _WeightIndex)
    except msgspec.DecodeError:
        return False
    strips = {file.path: file.strip for file in manifest.files}
    return all(
        path in strips and strips[path] + name in manifest.by_name
        for name, path in index.weight_map.items()
    )


def _check_arrived(target: Store, manifest: Manifest) -> None:
    """StoreError if a file that has arrived is gone again: a run that holds the target may sweep it."""
    prefix = step_prefix(manifest.step)
    there = set(target.list(prefix))
    for file in manifest.objects:
        if prefix + file.path not in there:
            raise StoreError(
                f"a file of step {manifest.step} is gone again from {target.url}",
                key=prefix + file.path,
                step=manifest.step,
                hint="does a training save there?  Copy again when it does not",
            )


def transfer_files(
    files: Files,
    target: Store,
    wanted: Sequence[FileEntry],
    *,
    look: bool,
    threads: int,
    progress: Progress | None = None,
) -> int:
    """Copy some files of a step, without its manifest: what one rank does of `transfer`.  Blocks.

    Returns the bytes copied.  `look`: whether some may have arrived before, which costs a listing and a
    look at each of them.  NotFound if the source has one no more, Corrupt if it is damaged there.
    """
    there = set(target.list(files.prefix)) if look else set[str]()
    work = _FilesToCopy(files, target, there, proves=True)
    tell = progress or (lambda _: None)
    missing = [file for file in wanted if not work.is_there(file, tell)]
    work.copy(missing, threads, tell)
    return sum(file.bytes for file in missing)


@dataclass(frozen=True)
class _FilesToCopy:
    """A step's files on their way from one store into another."""

    files: Files
    target: Store
    there: set[str]
    """Keys that the target had at the beginning."""
    proves: bool
    """True if the bytes of what is there are proved as well: a manifest is to vouch for them."""

    def missing(self, threads: int, tell: Progress) -> list[FileEntry]:
        """The files that have to be copied."""
        all_files, missing = self.files.manifest.objects, set[str]()

        def look(file: FileEntry) -> None:
            if not self.is_there(file, tell):
                missing.add(file.path)

        in_threads(look, list(all_files), threads if self.there else 1)
        return [f for f in all_files if f.path in missing]

    def is_there(self, file: FileEntry, tell: Progress) -> bool:
        """True if a file has arrived before: its length and digest table are those of the manifest, and its
        bytes, if they are to be proved."""
        key = self.files.key(file)
        if key not in self.there:
            return False
        arrived = Files(self.target, self.files.prefix, self.files.manifest, verify=True)
        try:
            arrived.table(file)
            if self.proves:
                _prove(arrived, file)
        except (Corrupt, NotFound):
            return False
        tell(file.bytes)
        return True

    def copy(self, files: Sequence[FileEntry], threads: int, tell: Progress) -> None:
        """Copy files side by side, or the parts of one after the other where there are few."""
        side_by_side, in_each = shares([file.bytes for file in files], threads)

        def one(file: FileEntry) -> None:
            key = self.files.key(file)
            if key in self.there:  # and is not what it ought to be
                self.target.delete(key)
            try:
                copy_object(self.provable(file), self.files.store, self.target, in_each, tell)
            except Exists:  # another copy of the same step has come first
                if not self._came_first(file):
                    raise
            except HoldfastError as error:
                error.step = self.files.manifest.step
                raise

        in_threads(one, sorted(files, key=lambda f: -f.bytes), side_by_side)

    def provable(self, file: FileEntry) -> Provable:
        """A file, by the digest table that the manifest vouches for."""
        table = self.files.table(file)
        known = ((file.table, table.digests.tobytes()),)
        return Provable(self.files.key(file), file.bytes, ((0, table),), known)

    def _came_first(self, file: FileEntry) -> bool:
        again = _FilesToCopy(self.files, self.target, {self.files.key(file)}, self.proves)
        return again.is_there(file, lambda _: None)


def _prove(files: Files, file: FileEntry) -> None:
    """Read all chunks of a file.  Corrupt, NotFound."""
    chunk_bytes = files.manifest.chunk_bytes
    num_chunks, step = -(-file.table // chunk_bytes), max(COPY_PART_BYTES // chunk_bytes, 1)
    into = memoryview(bytearray(min(step * chunk_bytes, file.table)))
    with files.readers.kept():
        for first in range(0, num_chunks, step):
            files.chunks(file, first, min(first + step, num_chunks), into)


# -- one object -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Provable:
    """An object whose bytes can be proved: by digest tables, or because they are known already."""

    key: str
    num_bytes: int
    tables: tuple[tuple[int, DigestTable], ...]
    """Digest tables, each with the byte of the object at which its first chunk begins."""
    known: tuple[tuple[int, bytes], ...] = ()
    """Bytes that were read and proved before, each with its place: they are not taken from the source."""

    @property
    def most_chunk_bytes(self) -> int:
        """Bytes of the largest chunk of its tables."""
        return max((table.chunk_bytes for _, table in self.tables), default=0)

    def read(self, reader: Reader, start: int, scratch: memoryview, stop: int) -> memoryview:
        """The bytes start..stop, proved, in `scratch`, which has two chunks to spare.  Corrupt."""
        first, end = self._whole_chunks(start, stop)
        view = scratch[: end - first]
        reader.read(first, view)
        for at, table in self.tables:
            self._check(table, at, first, view)
        for at, data in self.known:
            a, b = max(at, first), min(at + len(data), end)
            if a < b:
                view[a - first : b - first] = data[a - at : b - at]
        return view[start - first : stop - first]

    def _whole_chunks(self, start: int, stop: int) -> tuple[int, int]:
        """The least range that holds start..stop and every chunk that it touches."""
        first, end = start, stop
        for at, table in self.tables:
            a, b = max(start - at, 0), min(stop - at, table.end)
            if a < b:
                size = table.chunk_bytes
                first = min(first, at + a // size * size)
                end = max(end, at + min(-(-b // size) * size, table.end))
        return first, end

    def _check(self, table: DigestTable, at: int, first: int, view: memoryview) -> None:
        """Check those whole chunks of a table that lie in `view`, the bytes from `first` on."""
        size, end = table.chunk_bytes, first + len(view)
        a = -(-max(first - at, 0) // size)
        b = table.end if at + table.end <= end else (end - at) // size * size
        if a * size >= b:
            return
        try:
            table.check(a, view[at + a * size - first : at + b - first])
        except Corrupt as error:
            error.key, error.start, error.stop = (
                self.key,
                _moved(error.start, at),
                _moved(error.stop, at),
            )
            raise


def _moved(place: int | None, by: int) -> int | None:
    return None if place is None else place + by


def threads_of(source: Store) -> int:
    """Parts to read at once: the more, the longer a store takes to begin to answer."""
    return reads_of(source).threads or _THREADS


def shares(sizes: Sequence[int], threads: int) -> tuple[int, int]:
    """Number of objects to copy side by side, and of threads for each, `threads` at most in all: of objects
    of one part as many as there are threads, of larger ones, whose writers hold more, at most `_FILES`."""
    most = threads if max(sizes, default=0) <= COPY_PART_BYTES else min(threads, _FILES)
    most = max(min(most, len(sizes)), 1)
    numbers = {threads // most, -(-threads // most)}
    found = [(min(threads // in_each, most), in_each) for in_each in numbers]
    return max(found, key=lambda one: (one[0] * one[1], one[0]))


def copy_object(this: Provable, source: Store, target: Store, threads: int, tell: Progress) -> None:
    """Copy one object, part by part.  Exists if the target has it; the error of either store, or Corrupt:
    then it does not appear."""
    writer = target.create(this.key, this.num_bytes)
    try:
        wanted = reads_of(source).num_bytes if threads > 1 else 0
        part = part_bytes(writer, wanted or COPY_PART_BYTES)
        buffers, size = ThreadPages(), min(part, this.num_bytes) + 2 * this.most_chunk_bytes

        def one(start: int) -> None:
            stop = min(start + part, this.num_bytes)
            writer.write(start, this.read(reader, start, buffers.get(size), stop))
            tell(stop - start)

        once = getattr(source, "open_once", source.open)
        with closing(once(this.key)) as reader:
            in_threads(one, list(range(0, this.num_bytes, part)), threads)
        writer.finish()
    except BaseException:
        writer.abort()
        raise
