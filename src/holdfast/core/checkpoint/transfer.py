"""Copying a step from one store to another, with every byte verified.

A copy is a save whose bytes come from a store: files first, the manifest last, by a conditional put.  So
a copy that stops anywhere leaves no step, or the whole step:

    source                               target
    steps/0000000005/manifest.json
    .../0002-000007/r00000  -----------> .../0002-000007/r00000            part by part, each
    .../0002-000007/r00001  -----------> .../0002-000007/r00001            chunk by its digest
                                         steps/0000000005/manifest.json    from here on it exists

Each part is read, verified by the digests in the manifest, and then written: damaged bytes are never
copied.  A file appears whole or not at all, so a copy that is started again skips files of the right
length and digest table.

    transfer(open_store("/scratch/run"), open_store("s3://bucket/run"), 5)

The source states how many parts to read at once and their size (`Reads`), as buckets have a high latency.
Memory: a part and two chunks per thread, and the writers' buffers.
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
    HoldfastError,
    NotFound,
    StoreError,
    warn_user,
)
from holdfast.base.threads import ThreadPages, in_threads
from holdfast.base.wire import decode_json
from holdfast.core.checkpoint.committing import bytes_at
from holdfast.core.checkpoint.files import Files
from holdfast.core.checkpoint.names import (
    attempt_in,
    manifest_key,
    manifest_with_bytes,
    step_prefix,
)
from holdfast.core.checkpoint.tidying import INDEX, discard
from holdfast.core.codec.table import DigestTable
from holdfast.core.format.manifest import FileEntry, Manifest
from holdfast.core.store import Reader, Store, put_over
from holdfast.core.store.contract import part_bytes, reads_of

COPY_PART_BYTES = 8 << 20
"""Bytes of a part, unless the source or the target (`Writer.block_bytes`) asks for others."""
_THREADS = 4
"""Parts, or files, copied at once, unless the source asks for more."""
_MOST_INDEX_BYTES = 64 << 20
_FILES = 4
"""Files of several parts copied at once."""

Progress = Callable[[int], object]
"""Called from any thread with the number of bytes just copied; an error that it raises ends the copy."""


@dataclass(frozen=True, slots=True)
class Transferred:
    """The result of copying one step."""

    step: int
    num_files: int
    num_copied: int
    """Number of copied files."""
    bytes: int
    """Bytes of the copied files."""
    is_new: bool
    """False if the target already had the step with this manifest."""


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
    """Copy step `step` of one root to another, byte for byte.  Blocks.

    After an error, call it again: files that were copied are skipped.  If the target has another step of
    that number: Exists, or with `replace` it is replaced once all files are copied.  NotFound if the source
    has no such step, Corrupt if it is damaged; the target's steps are then unchanged.
    `progress` gets `Manifest.total_bytes` in all, skipped files included.  `dry_run`: write nothing, and
    return what would be copied.  `threads`: parts to read at once, instead of the source's number.
    """
    threads = threads or threads_of(source)
    key, tell = manifest_key(step), progress or (lambda _: None)
    manifest, data = manifest_with_bytes(source, step)
    seen = bytes_at(target, key)
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


def _check_other(target: Store, manifest: Manifest, seen: bytes, replace: bool) -> None:
    """Exists unless the target's other step of that number may be replaced."""
    step, key = manifest.step, manifest_key(manifest.step)
    if not replace:
        raise Exists(
            f"{target.url} has another step {step}",
            step=step,
            key=key,
            hint="nothing is overwritten: give another target, or delete that step",
        )
    if attempt_in(seen, step) == manifest.attempt:
        raise Exists(
            f"{target.url} has another step {step}, of an attempt of the same name, {manifest.attempt}",
            step=step,
            key=key,
            hint="two roots went apart under one number of a run: give another target",
        )


def _commit(target: Store, step: int, data: bytes, seen: bytes | None) -> None:
    """Put the manifest if the target's is still `seen` (None: if it still has none)."""
    key, old = manifest_key(step), None if seen is None else attempt_in(seen, step)
    try:
        put_over(target, key, data, seen)
    except (Exists, NotFound):
        if bytes_at(target, key) != data:
            raise Exists(
                f"another process has saved or deleted step {step} of {target.url} during the copy",
                step=step,
                key=key,
                hint="copy again, or to another target",
            ) from None
    if old is not None:
        discard(target, step, old)


def _copy_indexes(source: Store, target: Store, manifest: Manifest) -> None:
    """Copy the indexes beside a consolidated step's manifest.  They have no digest, and may be links to any
    file, so only indexes that agree with the manifest are copied."""
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
    """True if an index maps tensors to files as the manifest does, and holds nothing else."""
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
    """StoreError if a copied file is gone again: a run on the target may sweep it."""
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
    """Copy some files of a step, without its manifest: one rank's share of `transfer`.  Blocks.

    Return the bytes copied.  `look`: check for files that were copied before, which costs a listing and a
    request for each.  NotFound if a file is gone from the source, Corrupt if it is damaged there.
    """
    there = set(target.list(files.prefix)) if look else set[str]()
    work = _FilesToCopy(files, target, there, proves=True)
    tell = progress or (lambda _: None)
    missing = [file for file in wanted if not work.is_there(file, tell)]
    work.copy(missing, threads, tell)
    return sum(file.bytes for file in missing)


@dataclass(frozen=True)
class _FilesToCopy:
    """A step's files to copy from one store to another."""

    files: Files
    target: Store
    there: set[str]
    """Keys that the target had at the beginning."""
    proves: bool
    """True to verify the bytes of files that the target has, before a manifest is put."""

    def missing(self, threads: int, tell: Progress) -> list[FileEntry]:
        """The files that have to be copied."""
        all_files, missing = self.files.manifest.objects, set[str]()

        def look(file: FileEntry) -> None:
            if not self.is_there(file, tell):
                missing.add(file.path)

        in_threads(look, list(all_files), threads if self.there else 1)
        return [f for f in all_files if f.path in missing]

    def is_there(self, file: FileEntry, tell: Progress) -> bool:
        """True if the target has a file with the manifest's length and digest table; with `proves`, its
        bytes are verified, too."""
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
        """Copy files in parallel, or the parts of each in parallel if there are few files."""
        side_by_side, in_each = shares([file.bytes for file in files], threads)

        def one(file: FileEntry) -> None:
            key = self.files.key(file)
            if key in self.there:  # but differs from the manifest
                self.target.delete(key)
            try:
                copy_object(self.provable(file), self.files.store, self.target, in_each, tell)
            except Exists:  # another copy of the same step was faster
                if not self._came_first(file):
                    raise
            except HoldfastError as error:
                error.step = self.files.manifest.step
                raise

        in_threads(one, sorted(files, key=lambda f: -f.bytes), side_by_side)

    def provable(self, file: FileEntry) -> Provable:
        """A file with its verified digest table."""
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
    """An object whose bytes can be verified: by digest tables, or because they are known already."""

    key: str
    num_bytes: int
    tables: tuple[tuple[int, DigestTable], ...]
    """Digest tables, each with the byte of the object at which its first chunk begins."""
    known: tuple[tuple[int, bytes], ...] = ()
    """Verified bytes with their offsets, which are not read from the source."""

    @property
    def most_chunk_bytes(self) -> int:
        """Bytes of the largest chunk of its tables."""
        return max((table.chunk_bytes for _, table in self.tables), default=0)

    def read(self, reader: Reader, start: int, scratch: memoryview, stop: int) -> memoryview:
        """Read and verify bytes start..stop into `scratch`, which needs two more chunks.  Corrupt."""
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
        """Extend start..stop to whole chunks."""
        first, end = start, stop
        for at, table in self.tables:
            a, b = max(start - at, 0), min(stop - at, table.end)
            if a < b:
                size = table.chunk_bytes
                first = min(first, at + a // size * size)
                end = max(end, at + min(-(-b // size) * size, table.end))
        return first, end

    def _check(self, table: DigestTable, at: int, first: int, view: memoryview) -> None:
        """Verify the whole chunks of a table in `view`, the bytes from `first` on."""
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
    """Parts to read at once; more for a store with a high latency."""
    return reads_of(source).threads or _THREADS


def shares(sizes: Sequence[int], threads: int) -> tuple[int, int]:
    """Number of objects to copy at once, and of threads for each, at most `threads` in all: as many
    objects as threads if each is one part; at most `_FILES` larger ones, whose writers hold more
    memory."""
    most = threads if max(sizes, default=0) <= COPY_PART_BYTES else min(threads, _FILES)
    most = max(min(most, len(sizes)), 1)
    numbers = {threads // most, -(-threads // most)}
    found = [(min(threads // in_each, most), in_each) for in_each in numbers]
    return max(found, key=lambda one: (one[0] * one[1], one[0]))


def copy_object(this: Provable, source: Store, target: Store, threads: int, tell: Progress) -> None:
    """Copy one object, part by part.  Exists if the target has it; after any error it does not appear."""
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
