"""Verifying that a step is, byte for byte, what was saved.  Reports every problem, not only the first.

A step is good if

* its manifest is readable and its seal holds (decoding checks that shardings cover every tensor);
* every rank that must hold bytes has a file, of the stated length;
* each file's digest table has the digest in the manifest, and each chunk the digest in the table;
* each file's header is the one that follows from the manifest, so that it is a sound safetensors file;
* extras can be decoded, and tensors that they refer to exist.

Memory: a block and the header of a file per thread.  Threads verify files in parallel, or the blocks of one
file if there are few files.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from holdfast.base.errors import FormatError, HoldfastError
from holdfast.base.text import listed
from holdfast.base.threads import in_threads
from holdfast.core.checkpoint.files import Files
from holdfast.core.checkpoint.listing import wrong_size
from holdfast.core.checkpoint.names import committed, manifest_key, read_manifest
from holdfast.core.checkpoint.opened import Checkpoint, plain_tensor
from holdfast.core.checkpoint.reading import Scratch, threads_for
from holdfast.core.checkpoint.rows import union
from holdfast.core.codec.digest import num_chunks
from holdfast.core.codec.table import DigestTable
from holdfast.core.format.extras import MADE_OF, decode, referred
from holdfast.core.format.image import Image, plan_image
from holdfast.core.format.manifest import AttachedFile, FileEntry, Manifest
from holdfast.core.layout.pieces import Placement
from holdfast.core.store import Store, read_range

_BLOCK_CHUNKS = 32
"""8 MiB at the usual chunk size: large enough for full speed, small enough to report progress."""

Progress = Callable[[int], object]
"""Called from any thread with the number of bytes just read."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem, with the file's `key` and, if known, its bytes `start..stop`."""

    message: str
    key: str
    start: int | None = None
    stop: int | None = None


@dataclass
class Report:
    """The result of verifying a step.  `bytes`: the number read."""

    step: int
    quick: bool
    problems: list[Problem] = field(default_factory=list)
    num_files: int = 0
    num_tensors: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return not self.problems


class Findings:
    """A report that several threads add to, with the progress callback."""

    def __init__(self, report: Report, progress: Progress | None) -> None:
        self.report = report
        self._progress = progress or (lambda _: None)
        self._lock = threading.Lock()

    def add(
        self, message: str, key: str, start: int | None = None, stop: int | None = None
    ) -> None:
        """Add a problem of a file, or of its bytes start..stop."""
        with self._lock:
            self.report.problems.append(Problem(message, key, start, stop))

    def blame(self, error: HoldfastError, key: str) -> None:
        """Add an error as a problem; `key`: the file, if the error names none."""
        start, stop = getattr(error, "start", None), getattr(error, "stop", None)
        self.add(error.message, error.key or key, start, stop)

    def count(self, num_bytes: int) -> None:
        """Add to the number of bytes read, and report progress."""
        with self._lock:
            self.report.bytes += num_bytes
        self._progress(num_bytes)


def verify(
    store: Store,
    step: int,
    *,
    quick: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Verify a step.  `quick`: only the manifest, lengths, tables and headers, not all data.  Blocks.

    Problems of the step are in the report and raise nothing.
    """
    began = time.perf_counter()
    report = Report(step, quick)
    findings = Findings(report, progress)
    try:
        manifest = read_manifest(store, step)
    except HoldfastError as error:
        findings.blame(error, manifest_key(step))
        return report
    report.num_files, report.num_tensors = len(manifest.objects), len(manifest.tensors)
    work = _Verification(store, manifest, findings, threads)
    work.run()
    report.seconds = time.perf_counter() - began
    return report


def good_before(store: Store, step: int, *, quick: bool = False) -> int | None:
    """The newest step before `step` that verifies; None if there is none."""
    order = [s.step for s in committed(store)]
    older = order[: order.index(step)] if step in order else order
    return next((s for s in reversed(older) if verify(store, s, quick=quick).good), None)


def planned_image(manifest: Manifest, file: FileEntry, placement: Placement) -> Image:
    """The image of a file, planned from the manifest.  FormatError if its offsets disagree."""
    image = plan_image(
        manifest.tensors,
        placement.pieces(file.rank),
        extras_bytes=file.table - file.extras,
        chunk_bytes=manifest.chunk_bytes,
        strip=file.strip,
    )
    planned = (image.data_start, image.extras_start, image.table_start, image.total_bytes)
    stated = (file.data, file.extras, file.table, file.bytes)
    if planned != stated:
        raise FormatError(f"the manifest states offsets {stated}; its shardings give {planned}")
    return image


class _Verification:
    """The verification of one step."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        findings: Findings,
        threads: int | None,
    ) -> None:
        self.checkpoint = Checkpoint(store, manifest, verify=False)
        self.store = store
        self.manifest = manifest
        self.files: Files = self.checkpoint.images
        self.report = findings.report
        self.findings = findings
        self.threads = threads or threads_for(self.files)
        self._scratch = Scratch()

    def run(self) -> None:
        """Verify every file.  Each matches its shardings, and decoding the manifest has checked that
        files and tensors have equally many bytes, so no rank's file is missing."""
        files, manifest = self.manifest.files, manifest_key(self.manifest.step)
        side_by_side = self.threads if len(files) >= self.threads else 1
        if side_by_side > 1:
            self.threads = 1
        in_threads(self._check_file, list(files), side_by_side)
        self._check_attached()
        self._check_extras("extras", manifest, self.manifest.extras)
        self.report.problems.sort(key=lambda p: (p.key != manifest, p.key, p.start or 0))

    def _check_file(self, file: FileEntry) -> None:
        key = self.files.key(file)
        if (fault := wrong_size(self.store, self.manifest, file)) is not None:
            self.findings.add(fault, key)
            return
        try:
            image = self._image(file)
            table = self.files.table(file)
        except HoldfastError as error:
            self.findings.blame(error, key)
            return
        bad = [] if self.report.quick else self._bad_chunks(file, table)
        size = self.manifest.chunk_bytes
        for first, stop in bad:
            a, b = self.files.span(file, first, stop)
            hit = tensors_at(self.manifest, image, a, b)
            self.findings.add(f"{b - a:,} bytes differ from what was written: {hit}", key, a, b)
        if not any(first * size < file.data for first, _ in bad):
            self._check_header(file, image)
        if not any(stop * size > file.extras for _, stop in bad):
            self._check_rank_extras(file)

    def _check_attached(self) -> None:
        """Check the pack of attached files, and each of them."""
        for file in self.manifest.objects[len(self.manifest.files) :]:
            key = self.files.key(file)
            if (fault := wrong_size(self.store, self.manifest, file)) is not None:
                self.findings.add(fault, key)
                continue
            try:
                bad = [] if self.report.quick else self._bad_chunks(file, self.files.table(file))
            except HoldfastError as error:
                self.findings.blame(error, key)
                continue
            for first, stop in bad:
                a, b = self.files.span(file, first, stop)
                hit = ", ".join(f.name for f in self._attached_in(a, b))
                self.findings.add(
                    f"{b - a:,} bytes differ from what was attached: {hit}", key, a, b
                )

    def _attached_in(self, start: int, stop: int) -> list[AttachedFile]:
        pack = self.manifest.attached
        files = pack.files if pack is not None else ()
        return [f for f in files if f.start < stop and f.start + f.bytes > start]

    def _image(self, file: FileEntry) -> Image:
        """The image of a file, by a placement of its own, whose caches end with the file."""
        m = self.manifest
        return planned_image(m, file, Placement(m.layout, m.placement.table))

    def _bad_chunks(self, file: FileEntry, table: DigestTable) -> list[tuple[int, int]]:
        """Runs of chunks that differ from the table."""
        size, chunks = self.manifest.chunk_bytes, num_chunks(file.table, self.manifest.chunk_bytes)
        bad: list[tuple[int, int]] = []

        def one(first: int) -> None:
            stop = min(first + _BLOCK_CHUNKS, chunks)
            a, b = self.files.span(file, first, stop)
            try:
                view = self._scratch.get(_BLOCK_CHUNKS * size)[: b - a]
                self.files.readers.read(self.files.key(file), a, view)
                wrong = table.differing(first, view)
            except HoldfastError as error:
                self.findings.add(f"cannot be read: {error.message}", self.files.key(file), a, b)
                wrong = []
            bad.extend((i, i + 1) for i in wrong)
            self.findings.count(b - a)

        with self.files.readers.kept():
            in_threads(one, list(range(0, chunks, _BLOCK_CHUNKS)), self.threads)
        return union(bad)

    def _check_header(self, file: FileEntry, image: Image) -> None:
        try:
            found = read_range(self.store, self.files.key(file), 0, file.data)
        except HoldfastError as error:
            self.findings.add(
                f"cannot be read: {error.message}", self.files.key(file), 0, file.data
            )
            return
        if found != image.header:
            at = next(i for i, (a, b) in enumerate(zip(found, image.header)) if a != b)
            self.findings.add(
                f"header is not the one that follows from the manifest, from byte {at} on",
                self.files.key(file),
                0,
                file.data,
            )

    def _check_rank_extras(self, file: FileEntry) -> None:
        key = self.files.key(file)
        try:
            found = self.checkpoint.file_extras(file)
        except HoldfastError as error:
            self.findings.add(error.message, key, file.extras, file.table)
            return
        for name in found.keys() - self.manifest.per_rank.keys():
            self.findings.add(f"extras {name!r} of a rank that the manifest does not list", key)
        self._check_extras("rank extras", key, found)

    def _check_extras(self, what: str, key: str, trees: dict[str, Any]) -> None:
        known = self.manifest.by_name.keys() | self.manifest.aliases.keys()
        known |= {n.removesuffix(MADE_OF) for n in self.manifest.extras if n.endswith(MADE_OF)}
        for name, tree in trees.items():
            try:
                decode(tree, plain_tensor)
            except (HoldfastError, ValueError, TypeError, KeyError, AttributeError) as error:
                self.findings.add(f"{what} {name!r} cannot be decoded: {error}", key)
                continue
            for tensor in referred(tree):
                if tensor not in known:
                    self.findings.add(
                        f"{what} {name!r} refers to {tensor!r}, which is not there", key
                    )


def tensors_at(manifest: Manifest, image: Image, start: int, stop: int, most: int = 3) -> str:
    """Name the tensors and sections in a byte range of a file, for a message."""
    parts = ["the header"] if start < image.data_start else []
    begin = image.pieces.offset + image.data_start
    hit = np.flatnonzero((begin < stop) & (begin + image.pieces.bytes > start))
    names = [manifest.tensors[i].name for i in image.pieces.tensor[hit].tolist()]
    parts += [listed(names, most)] if names else []
    if stop > image.extras_start and image.extras_bytes:
        parts.append("the rank's extras")
    return ", ".join(parts) or "padding"


__all__ = ["Problem", "Report", "good_before", "verify"]
