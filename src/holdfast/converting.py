"""Converting: any checkpoint rewritten as what another system loads, in bounded memory.

    holdfast.convert("deepspeed:runs/old", "runs/new", to="universal")

What is to be written is planned first (`holdfast.writers`); then files are filled straight from the source
into `<target>.partial`, read back, and moved to their place in one rename: a target is whole or not there.
Killed and called again with the same arguments, a conversion goes on with the files that are missing.
Under torchrun the ranks share the files evenly.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.checkpoint.consolidating import Consolidation
from holdfast.checkpoint.opened import Checkpoint
from holdfast.checkpoint.outfiles import Outfile, Progress, Written, check_files, write_files
from holdfast.codec.digest import hexdigest
from holdfast.errors import NotFound, OutOfSpace, UsageError
from holdfast.format.manifest import encode
from holdfast.interop.folder import OneFile
from holdfast.interop.foreign import file_of
from holdfast.interop.sections import Sections
from holdfast.looking import open as open_checkpoint
from holdfast.near import near
from holdfast.store import LocalStore, Store, open_store
from holdfast.store.directories import fsync_directory, walk
from holdfast.version import __version__
from holdfast.writers.planned import Options, Planned, Rename
from holdfast.writers.ranks import converting_ranks

FORMATS = ("universal", "deepspeed", "dcp", "huggingface", "torch")
PARTIAL = ".partial"
_MARK = "holdfast-conversion.json"
_WEIGHTS_ONLY = ("huggingface", "torch")

Told = Callable[[str, int, int], object]
"""Told of a phase ("check", "write", "verify"), the bytes just done, and the bytes that it will do."""


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion has made.  `left_out`: extras that the format cannot hold."""

    path: str
    to: str
    step: int
    num_files: int
    num_resumed: int
    bytes: int
    seconds: float
    left_out: tuple[str, ...]


def convert(
    source: str | os.PathLike[str] | Checkpoint,
    target: str | os.PathLike[str],
    *,
    to: str = "universal",
    step: int | None = None,
    key: str = "model",
    dtype: str | None = None,
    rename: Rename | None = None,
    max_file_bytes: int = 5_000_000_000,
    memory_bytes: int = 2 << 30,
    verify: bool = True,
    progress: Told | None = None,
) -> Converted:
    """Rewrite one step of `source` (a URL, also with a prefix) as format `to`, at the path `target`.

    `universal`: a root of holdfast's, each tensor whole; a root that is there gets one more step.
    `deepspeed`: its universal format.  `dcp`: torch.distributed.checkpoint.  `huggingface`, `torch`: the
    weights under `key`, cast to `dtype`, renamed by `rename`; safetensors, or one file of torch.save.
    Any other target must not exist.  Blocks; `memory_bytes` bounds buffers; `verify` reads everything
    back.  UsageError, FormatError, OutOfSpace, Corrupt: then there is no target.
    """
    if to not in FORMATS:
        raise UsageError(f"unknown format {to!r}", hint=near(to, FORMATS) or ", ".join(FORMATS))
    options = Options(max_file_bytes, dtype, rename, key)
    _check(to, options)
    if isinstance(source, Checkpoint):
        return _Conversion(source, target, to, options, memory_bytes, verify, progress).run()
    with open_checkpoint(source, step) as found:
        return _Conversion(found, target, to, options, memory_bytes, verify, progress).run()


def _check(to: str, options: Options) -> None:
    if options.max_file_bytes < 1:
        raise UsageError(f"max_file_bytes={options.max_file_bytes}: must be positive")
    if to not in _WEIGHTS_ONLY and (options.dtype or options.rename):
        what = "dtype" if options.dtype else "rename"
        raise UsageError(
            f"{what}: {to} checkpoints keep the state as it is",
            hint=f"it applies to {' and '.join(_WEIGHTS_ONLY)}, which hold weights alone",
        )


class _Conversion:
    """One conversion on one rank."""

    def __init__(
        self,
        source: Checkpoint,
        target: str | os.PathLike[str],
        to: str,
        options: Options,
        memory_bytes: int,
        verify: bool,
        told: Told | None,
    ) -> None:
        self.source = source
        self.target = _local(target)
        self.to = to
        self.options = options
        self.memory_bytes = memory_bytes
        self.verify = verify
        self.told = told or (lambda phase, done, total: None)
        self.work = LocalStore(self.target + PARTIAL, durable=False)
        self.identity = _identity(source, to, options)

    def run(self) -> Converted:
        begin = time.monotonic()
        _check_target(self.target, self.to)
        with converting_ranks() as ranks:
            plan = self._plan()
            files = plan.outfiles if isinstance(plan, Consolidation) else list(plan.files)
            with ExitStack() as held:
                ranks.first("begin", lambda: self._begin(files, held))
                with ranks.all("written"):
                    there = self._write(ranks.share(files))
                ranks.first("end", lambda: self._end(plan))
        return Converted(
            self.target,
            self.to,
            self.source.step,
            len(files),
            there,
            sum(f.bytes for f in files),
            time.monotonic() - begin,
            plan.left_out,
        )

    def _plan(self) -> Planned | Consolidation:
        match self.to:  # each imports its writer alone: a command line starts sooner
            case "deepspeed":
                from holdfast.writers.deepspeed import plan_deepspeed

                return plan_deepspeed(self.source, self.options)
            case "dcp":
                from holdfast.writers.dcp import plan_dcp

                return plan_dcp(self.source, self.options)
            case "huggingface":
                from holdfast.writers.huggingface import plan_huggingface

                return plan_huggingface(self.source, self.options)
            case "torch":
                from holdfast.writers.torchsave import plan_torch

                return plan_torch(self.source, self.options, os.path.basename(self.target))
        from holdfast.writers.universal import plan_universal

        return plan_universal(self.source, open_store(self.target), self.identity, self.options)

    def _begin(self, files: Sequence[Outfile], held: ExitStack) -> None:
        """Go on with what an interrupted conversion of the same has left, or clear it away."""
        os.makedirs(self.work.root, exist_ok=True)
        held.enter_context(_locked(self.work.root))
        mark = msgspec.json.encode({"conversion": self.identity, "boot": _boot()})
        try:
            same = self.work.get(_MARK) == mark
        except NotFound:
            if any(walk(self.work.root)):
                raise UsageError(
                    f"{self.work.root} is in the way, and is not of a conversion",
                    hint="remove it, or give another target",
                ) from None
            same = False
        self._clear(files if same else ())
        self.work.put(_MARK, mark)
        wanted = sum(f.bytes for f in files if not self._is_there(f))
        free = shutil.disk_usage(self.work.root).free
        if wanted > free:
            if not same:
                shutil.rmtree(self.work.root)
            raise OutOfSpace(
                f"{wanted:,} bytes are to be written into {self.work.root}, {free:,} are free"
            )

    def _clear(self, files: Sequence[Outfile]) -> None:
        """Delete all but these: what a killed process was writing, or another conversion."""
        mine = {os.path.join(self.work.root, f.path) for f in files}
        for path in list(walk(self.work.root)):
            if path not in mine:
                os.unlink(path)

    def _is_there(self, file: Outfile) -> bool:
        try:
            return self.work.size(file.path) == file.bytes
        except NotFound:
            return False

    def _write(self, files: Sequence[Outfile]) -> int:
        """Write what is missing, and read all back; the number of files that were there."""
        there = [f for f in files if self._is_there(f)]
        missing = [f for f in files if not self._is_there(f)]
        for f in missing:
            self.work.delete(f.path)
        written: list[Written] = []
        if there and self.verify:
            written += self._pass("check", there, None)
        if missing:
            written += self._pass("write", missing, self.work)
        self.work.sync([f.path for f in files])
        if self.verify:
            check_files(self.work, written, progress=self._progress("verify", files))
        return len(there)

    def _pass(self, phase: str, files: Sequence[Outfile], store: Store | None) -> list[Written]:
        return write_files(
            self.source,
            store,
            files,
            memory_bytes=self.memory_bytes,
            progress=self._progress(phase, files),
        )

    def _progress(self, phase: str, files: Sequence[Outfile]) -> Progress:
        total = sum(f.bytes for f in files)
        self.told(phase, 0, total)
        return lambda done: self.told(phase, done, total)

    def _end(self, plan: Planned | Consolidation) -> None:
        """Make the result exist."""
        if isinstance(plan, Consolidation):
            self._commit(plan)
            return
        for path, data in plan.last:
            self.work.put(path, data)
        self.work.sync([path for path, _ in plan.last])
        if self.to == "torch":
            os.rename(os.path.join(self.work.root, os.path.basename(self.target)), self.target)
            shutil.rmtree(self.work.root)
        else:
            if os.path.isdir(self.target):
                os.rmdir(self.target)  # it was found empty
            os.rename(self.work.root, self.target)
            os.unlink(os.path.join(self.target, _MARK))
        fsync_directory(os.path.dirname(self.target))

    def _commit(self, plan: Consolidation) -> None:
        target = LocalStore(self.target)
        for file in plan.outfiles:
            path = os.path.join(target.root, file.path)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if self._is_there(file):  # else an interrupted end has moved it
                os.rename(os.path.join(self.work.root, file.path), path)
        for directory in {os.path.dirname(f.path) for f in plan.outfiles}:
            while directory:
                fsync_directory(os.path.join(target.root, directory))
                directory = os.path.dirname(directory)
        fsync_directory(target.root)
        _, replaced = plan.commit(target, target)
        plan.finish(target, replaced)
        shutil.rmtree(self.work.root)


def _local(target: str | os.PathLike[str]) -> str:
    store = open_store(os.fspath(target))
    if not isinstance(store, LocalStore):
        raise UsageError(f"{store.url}: conversions are written to file systems only")
    return store.root


def _check_target(target: str, to: str) -> None:
    """UsageError if something would be overwritten."""
    if not os.path.lexists(target):
        return
    if to == "universal" and os.path.isdir(target):
        entries = set(os.listdir(target))
        if not entries or "steps" in entries or "claims" in entries:
            return
    elif to != "torch" and os.path.isdir(target) and not os.listdir(target):
        return
    what = "is no root of holdfast's" if to == "universal" else "exists"
    raise UsageError(f"{target} {what}", hint="give a path that is not there yet")


def _identity(source: Checkpoint, to: str, options: Options) -> str:
    """What tells whether a conversion that was begun is this one: the source's state, and what is asked."""
    manifest = hexdigest(encode(source.manifest))
    files: list[Any] = []
    if isinstance(source.store, Sections):
        origin, keys = source.store.origin, source.store.origin.list()
        if isinstance(origin, OneFile):  # and what it names, if it is an index
            origin, keys = origin.inner, sorted({*keys, *map(file_of, source.manifest.files)})
        if isinstance(origin, LocalStore):
            statuses = [(key, os.stat(os.path.join(origin.root, key))) for key in keys]
            files = [(key, s.st_size, s.st_mtime_ns) for key, s in statuses]
    asked = (options.max_file_bytes, options.dtype, options.key)
    names = [options.rename(t.name) for t in source.manifest.tensors] if options.rename else []
    told = repr((source.store.url, manifest, files, to, asked, names, __version__))
    return hexdigest(told.encode())


@contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Keep other conversions out; the lock goes with the process.  Where there are no locks, nothing."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"another conversion is writing into {directory}",
                    hint="wait for it, or stop it",
                ) from None
        yield
    finally:
        os.close(fd)


def _boot() -> str:
    """A power cut may take what was not yet durable: files that were there before it are written anew."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


__all__ = ["FORMATS", "Converted", "convert"]
