"""Verifying a foreign checkpoint, as far as its format allows.

There are no digests.  Verifying reads every byte of tensors (so no file is missing or cut short; opening
has checked that parts cover every tensor), compares replicas, and checks the CRC-32 of torch.save's zip
archives, unless torch was told to omit them.  The report states what was checked.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass

from holdfast.base.errors import Corrupt, HoldfastError
from holdfast.base.threads import in_threads
from holdfast.core.checkpoint.diffing import compare_checkpoints
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.reading import threads_here
from holdfast.core.checkpoint.verifying import Findings, Progress, Report
from holdfast.formats.read.folder import file_key
from holdfast.formats.read.sections import Sections
from holdfast.formats.read.torchfile import (
    ArchiveMember,
    PartFile,
    check_crc,
    read_archive,
    start_of,
)

_BLOCK_BYTES = 4 << 20
_ARCHIVES = (".pt", ".pth", ".bin", ".ckpt")

_Ranges = list[tuple[int, int] | None]
"""Byte ranges of archives in a file; None for the whole file."""


@dataclass
class ForeignReport(Report):
    """The report of a foreign checkpoint; `num_with_crc` of `num_archives` archives have a CRC-32."""

    format: str = ""
    num_copies: int = 0
    num_archives: int = 0
    num_with_crc: int = 0


def verify_foreign(
    checkpoint: Checkpoint, *, quick: bool = False, progress: Progress | None = None
) -> ForeignReport:
    """Read all parts, check CRCs, compare replicas.  `quick`: check only lengths.  Blocks.

    Problems of the files are in the report and raise nothing.
    """
    work = _ForeignVerification(checkpoint, quick, progress)
    began = time.perf_counter()
    work.run()
    work.report.seconds = time.perf_counter() - began
    return work.report


def _files_of(checkpoint: Checkpoint) -> list[str]:
    """The files of tensors and their copies, sorted."""
    everything = (checkpoint, *checkpoint.others)
    return sorted({file_key(f) for c in everything for f in c.manifest.files})


def archives_of(checkpoint: Checkpoint) -> dict[str, _Ranges]:
    """Return the places of torch.save archives, by file."""
    assert isinstance(checkpoint.store, Sections)
    archives: dict[str, _Ranges] = {
        f: [None] for f in _files_of(checkpoint) if f.endswith(_ARCHIVES)
    }
    for file, start, stop in checkpoint.store.archives:
        archives.setdefault(file, []).append((start, stop))
    return archives


def check_sums(checkpoint: Checkpoint, files: Iterable[str], progress: Progress) -> None:
    """Check the CRC-32 of archives in files, if they have any.  Corrupt."""
    work, archives = _ForeignVerification(checkpoint, False, progress), archives_of(checkpoint)
    for file in files:
        work.check(file, archives[file])
        for problem in work.report.problems:
            raise Corrupt(
                f"the source is damaged: {problem.message}",
                key=problem.key,
                start=problem.start,
                stop=problem.stop,
            )


class _ForeignVerification:
    def __init__(self, checkpoint: Checkpoint, quick: bool, progress: Progress | None) -> None:
        assert isinstance(checkpoint.store, Sections)
        self.checkpoint = checkpoint
        self.sections = checkpoint.store
        self.report = ForeignReport(checkpoint.step, quick, format=checkpoint.format)
        self.findings = Findings(self.report, progress)

    def run(self) -> None:
        report, manifest = self.report, self.checkpoint.manifest
        report.num_files = len(_files_of(self.checkpoint))
        report.num_tensors = len(manifest.tensors)
        archives = archives_of(self.checkpoint)
        summed = {f for f, found in archives.items() if self.check(f, found)}
        rest = [f.path for f in manifest.files if file_key(f) not in summed]
        in_threads(self._part, rest, threads_here())
        if not report.quick and not report.problems:
            self._copies()
        report.problems.sort(key=lambda p: (p.key, p.start or 0))

    # -- parts ------------------------------------------------------------------------------------

    def _part(self, key: str) -> None:
        """Read every byte of a part, or only the last one if `quick`."""
        size = self.sections.size(key)
        block = memoryview(bytearray(min(_BLOCK_BYTES, size)))
        try:
            with closing(self.sections.open(key)) as reader:
                for at in range(0, size, _BLOCK_BYTES) if not self.report.quick else (size - 1,):
                    view = block[: min(_BLOCK_BYTES, size - at)]
                    reader.read(at, view)
                    self.findings.count(len(view))
        except HoldfastError as error:
            self.findings.blame(error, key.rpartition(":")[0])

    # -- archives ---------------------------------------------------------------------------------

    def check(self, file: str, ranges: _Ranges) -> bool:
        """Check the archives of a file; False if some have no CRCs and were not read."""
        store = self.sections.origin
        self.report.num_archives += len(ranges)
        try:
            whole = PartFile.of(store, file)
        except HoldfastError as error:
            self.findings.blame(error, file)
            return True
        with closing(whole):
            return all([self._archive(whole.part(r) if r else whole, file) for r in ranges])

    def _archive(self, section: PartFile, file: str) -> bool:
        """Check every member of an archive; False if it has no CRCs and was not read."""
        try:
            archive = read_archive(section, file)
            if not archive.has_crc:
                return False
            self.report.num_with_crc += 1
            if self.report.quick:
                return False
            members = list(archive.members.values())
            in_threads(lambda m: self._member(section, m, file), members, threads_here())
        except HoldfastError as error:
            self.findings.blame(error, file)
        return True

    def _member(self, section: PartFile, member: ArchiveMember, file: str) -> None:
        section = section.part((section.start, section.start + section.bytes))
        try:
            start = start_of(section, member, file)
            section.seek(start - section.start)
            found, left = 0, member.length
            while left:
                data = section.read(min(_BLOCK_BYTES, left))
                found, left = zlib.crc32(data, found), left - len(data)
                self.findings.count(len(data))
            check_crc(member, start, found, file)
        except HoldfastError as error:
            self.findings.blame(error, file)

    # -- replicas ---------------------------------------------------------------------------------

    def _copies(self) -> None:
        for other in self.checkpoint.others:
            try:
                found = compare_checkpoints(self.checkpoint, other, progress=self.findings.count)
            except HoldfastError as error:
                self.findings.blame(error, "")
                continue
            self.report.num_copies += len(other.manifest.tensors)
            for v in found.values:
                files = sorted(
                    {file_key(f) for f in other.manifest.files if f.rank in _ranks(other, v.name)}
                )
                self.findings.add(
                    f"{v.name}: replicas differ in {v.num_differing:,} of {v.size:,} elements",
                    ", ".join(files[:3]),
                )


def _ranks(checkpoint: Checkpoint, name: str) -> set[int]:
    """Numbers of the parts of a tensor."""
    held = checkpoint.info(name).sharding.held or ()
    return {number for number, _ in held}
