"""Converting any checkpoint to a format that another system loads, in bounded memory.

    holdfast.convert("deepspeed:runs/old", "runs/new", to="universal")

The output is planned first (`holdfast.formats.write`); then files are written from the source to
`<target>.partial`, read back, and moved into place by one rename, so a target is complete or absent.  In a
bucket, which has no renames, the file that makes it a checkpoint is put last (`write.bucket`).  A killed
conversion continues when it is called again with the same arguments: on a file system with the missing
blocks (`write.begun`), in a bucket with the missing files.
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
from functools import partial
from typing import Any, ParamSpec, TypeVar

import msgspec

from holdfast.base.arguments import (
    choice_of,
    count_of,
    flag_of,
    function_of,
    named_step_of,
    path_of,
    shown,
    text_of,
    unfit,
)
from holdfast.base.entry import public
from holdfast.base.errors import Corrupt, HoldfastError, NotFound, OutOfSpace, UsageError, warn_user
from holdfast.base.host import boot_id
from holdfast.base.sizes import MAX_SIZE_BYTES
from holdfast.base.suggest import did_you_mean
from holdfast.base.version import __version__
from holdfast.base.wire import decode_json
from holdfast.core.checkpoint.consolidating import Consolidation, plan_consolidation
from holdfast.core.checkpoint.listing import attempt_of
from holdfast.core.checkpoint.names import FOLDERS
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.outfiles import (
    FileDigests,
    Outfile,
    Progress,
    read_back,
    write_files,
)
from holdfast.core.codec.digest import hexdigest
from holdfast.core.format.dtypes import DTYPES
from holdfast.core.format.manifest import encode_manifest
from holdfast.core.store import LocalStore, Store, get_small, open_store
from holdfast.core.store.contract import size_at
from holdfast.core.store.directories import (
    first_link,
    fsync_directories,
    fsync_directory,
    unlink_below,
    walk,
)
from holdfast.core.store.oserrors import translated
from holdfast.formats.looking import open as open_checkpoint
from holdfast.formats.read.detect import split_format
from holdfast.formats.read.folder import MARK, ListedFolder, OneFile, file_key, last_name
from holdfast.formats.read.sections import Sections
from holdfast.formats.write.begun import BEGUN, BLOCKS, BegunFiles
from holdfast.formats.write.bucket import CONVERSION_PREFIX, BucketTarget, bucket_for
from holdfast.formats.write.converting_ranks import Ranks, converting_ranks
from holdfast.formats.write.file_plans import (
    ONE_FILE,
    Planned,
    Renaming,
    WriteOptions,
    weights,
    with_attached,
)

_P = ParamSpec("_P")
_T = TypeVar("_T")

TARGET_FORMATS = ("universal", "deepspeed", "dcp", "huggingface", "safetensors", "torch")
_PARTIAL = ".partial"
_WEIGHTS_ONLY = ("huggingface", "safetensors", "torch")

_Told = Callable[[str, int, int], object]
"""Called with a phase ("check", "write", "verify"), the bytes just done, and the phase's total."""


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of a conversion.  `left_out`: extras that the format cannot hold."""

    path: str
    to: str
    step: int
    num_files: int
    num_resumed: int
    bytes: int
    seconds: float
    left_out: tuple[str, ...]


@public
def convert(
    source: str | os.PathLike[str] | Checkpoint,
    target: str | os.PathLike[str],
    *,
    to: str = "universal",
    step: int | str | None = None,
    key: str = "model",
    dtype: str | None = None,
    rename: Renaming | None = None,
    max_file_bytes: int = 5_000_000_000,
    memory_bytes: int = 2 << 30,
    verify: bool = True,
    progress: _Told | None = None,
) -> Converted:
    """Rewrite one step of `source` (a URL, also with a prefix) as format `to`, at the path or URL `target`.
    The step is named as in `holdfast.open`.

    `universal`: a root of holdfast's, each tensor whole; an existing root gets one more step.
    `deepspeed`: its universal format.  `dcp`: torch.distributed.checkpoint.  `huggingface`, `safetensors`,
    `torch`: the weights under `key`, cast to `dtype`, renamed by `rename`; a folder of safetensors, or
    `target` itself as one file of safetensors or torch.save, however large.
    Any other target must not exist.  Blocks; `memory_bytes` bounds buffers; `verify` checks the CRC-32 of
    foreign files first, and reads everything back.  UsageError, FormatError, StoreError, Corrupt: then
    there is no target.
    """
    call = "convert"
    source = source if isinstance(source, Checkpoint) else path_of(source, call, "source")
    target = path_of(target, call, "target")
    prefix, path = split_format(target)
    if prefix:
        raise UsageError(
            f"target {target!r} names a format besides a path",
            hint=f"give the path {path!r}, and the format as to={prefix!r}",
        )
    choice_of(to, TARGET_FORMATS, call, "to")
    _check_name(target, to)
    step = None if step is None else named_step_of(step, call)
    memory_bytes = count_of(memory_bytes, call, "memory_bytes", most=MAX_SIZE_BYTES)
    flag_of(verify, call, "verify")
    if progress is not None:
        function_of(progress, call, "progress", "that takes a phase and two numbers of bytes", 3)
    options = _options(max_file_bytes, dtype, rename, key)
    _check(to, options)
    with ExitStack() as opened:
        if not isinstance(source, Checkpoint):
            source = opened.enter_context(open_checkpoint(source, step=step))
        if left := source.left_out:
            warn_user(
                f"step {source.step} was saved by trainable_only(): {len(left)} frozen parameters, "
                f"{next(iter(left))} the first, are not in it, and not in {target}"
            )
        store = open_store(target)
        place = store.root if isinstance(store, LocalStore) else target
        return _Conversion(source, place, to, options, memory_bytes, verify, progress).run()


def _options(
    max_file_bytes: int, dtype: str | None, rename: Renaming | None, key: str
) -> WriteOptions:
    call = "convert"
    if dtype is not None and (not isinstance(dtype, str) or dtype not in DTYPES):
        name = shown(dtype).strip("'").removeprefix("torch.")
        hint = f"dtype={name!r}" if name in DTYPES else did_you_mean(name, DTYPES)
        what, typed = "the name of a dtype, such as 'bfloat16'", not isinstance(dtype, str)
        raise unfit(call, "dtype", dtype, what, typed=typed, hint=hint)
    if rename is not None:
        function_of(rename, call, "rename", "that takes a name and returns the new one", 1)
    max_file_bytes = count_of(max_file_bytes, call, "max_file_bytes", most=MAX_SIZE_BYTES)
    return WriteOptions(max_file_bytes, dtype, rename, text_of(key, call, "key"))


def _check_name(target: str, to: str) -> None:
    """UsageError if the target's name is that of a file and `to` writes a folder, or of another kind of
    file."""
    place = target.partition("?")[0] if "://" in target else target
    endings = {ending: kind for kind, some in ONE_FILE.items() for ending in some}
    named = endings.get(os.path.splitext(place)[1])
    if to == "safetensors" and named != to:
        raise UsageError(
            f"{target} does not end in .safetensors, and safetensors is one file",
            hint="name the file, such as weights.safetensors; to='huggingface' writes a folder",
        )
    is_folder = to not in ONE_FILE and place.endswith((*ONE_FILE["safetensors"], ".pt", ".pth"))
    if is_folder or (to == "torch" and named == "safetensors"):
        kind = "a folder" if is_folder else "a file of torch.save"
        raise UsageError(
            f"{target} is the name of a {named} file, and {to} writes {kind}",
            hint=f"to={named!r} writes that file; or give another name",
        )


def _check(to: str, options: WriteOptions) -> None:
    if to not in _WEIGHTS_ONLY and (options.dtype or options.rename):
        what = "dtype" if options.dtype else "rename"
        raise UsageError(
            f"{what}: {to} checkpoints keep the state as it is",
            hint=f"it applies to {' and '.join(_WEIGHTS_ONLY)}, which hold weights alone",
        )


@dataclass
class _Conversion:
    """One conversion on one rank."""

    source: Checkpoint
    target: str
    to: str
    options: WriteOptions
    memory_bytes: int
    verify: bool
    told: _Told | None

    def __post_init__(self) -> None:
        self.identity = self._identity_now()
        self.bucket: BucketTarget | None = None
        if "://" in self.target:
            self.bucket = bucket_for(self.target, self.to, self.identity, self.source.step)
            return
        self.partial = LocalStore(self.target + _PARTIAL)
        """The mark and the folder of unfinished output."""
        self.work = BegunFiles(os.path.join(self.partial.root, "files"), durable=False)

    def _identity_now(self, *, is_stamped: bool = True) -> str:
        return _identity(self.source, self.target, self.to, self.options, is_stamped=is_stamped)

    def run(self) -> Converted:
        begin = time.monotonic()
        with converting_ranks() as ranks:
            ranks.check_same(self.source.step, self._identity_now(is_stamped=False))
            plan = self._plan()
            files = plan.outfiles if isinstance(plan, Consolidation) else list(plan.files)
            there = len(files)
            if self.verify and isinstance(self.source.store, Sections):
                with ranks.all("checked"):
                    self._check_sums(ranks, self.source.store.origin)
            with ExitStack() as held:
                if not ranks.first("begin", partial(self._on_disk, self._begin, plan, files, held)):
                    with ranks.all("written"):
                        there = self._write(ranks.share(files))
                ranks.first("end", partial(self._on_disk, self._end, plan, files))
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

    def _on_disk(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run a part of the conversion; raise OSErrors as StoreErrors."""
        with translated("convert into", "", self.target):
            return work(*args, **kwargs)

    def _plan(self) -> Planned | Consolidation:
        plan = self._plan_state()
        return (
            plan if isinstance(plan, Consolidation) else with_attached(plan, self.source, self.to)
        )

    def _plan_state(self) -> Planned | Consolidation:
        match self.to:  # import only the writer in use: the command line starts sooner
            case "deepspeed":
                from holdfast.formats.write.deepspeed import plan_deepspeed

                return plan_deepspeed(self.source, self.options)
            case "dcp":
                from holdfast.formats.write.dcp import plan_dcp

                return plan_dcp(self.source, self.options)
            case "huggingface":
                from holdfast.formats.write.weights import plan_huggingface

                return plan_huggingface(self.source, self.options)
            case "safetensors" | "torch":
                from holdfast.formats.write.weights import plan_safetensors, plan_torch

                name = last_name(self.target) if self.bucket else os.path.basename(self.target)
                plan = plan_torch if self.to == "torch" else plan_safetensors
                return plan(self.source, self.options, name)
        target, most = open_store(self.target), self.options.max_file_bytes
        return plan_consolidation(self.source, target, _attempt_name(self.identity), most)

    def _begin(
        self, plan: Planned | Consolidation, files: Sequence[Outfile], held: ExitStack
    ) -> bool:
        """Continue an interrupted conversion with the same arguments, or clear its output.

        True if the result is in place already: the conversion was interrupted after that.
        """
        if self.bucket is not None:
            last = [path for path, _ in plan.last] if isinstance(plan, Planned) else []
            return self.bucket.begin(files, last, self.source.store.url)
        marked = self._marked()
        finished = marked.get("conversion") == self.identity and self._is_result(files)
        if not finished:
            self._check_target()
        self._make_partial()
        held.enter_context(_locked(self.partial.root))
        if finished:
            return True
        if not marked and self.partial.list():
            raise UsageError(
                f"{self.partial.root} is in the way, and is not of a conversion",
                hint="remove it, or give another target",
            )
        # files from before a power cut may not be durable, and are written again
        mark = {"conversion": self.identity, "boot": boot_id()}
        same = marked == mark
        self._clear(files if same else ())
        self.partial.put(MARK, msgspec.json.encode(mark))
        self._check_space(files, same)
        return False

    def _make_partial(self) -> None:
        """Make the partial folder.  UsageError if it is or holds a link, behind which nothing may be
        written or deleted."""
        with translated("create", "", self.partial.root):
            try:
                os.makedirs(self.partial.root, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as error:
                what = f"{error.filename} is in the way: a file where a folder must be"
                raise UsageError(what, hint="remove it, or give another target") from None
            if link := first_link(self.partial.root):
                what = f"'{link}' is a link, and a conversion is written into folders of its own"
                raise UsageError(what, hint="remove it, or give a target on the disk that is meant")

    def _remove_partial(self) -> None:
        """Remove the partial folder, the mark last: without it, the rest would count as foreign files."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self.work.root)
        shutil.rmtree(self.partial.root)

    def _marked(self) -> dict[str, str]:
        """Return the fields of the mark of a begun conversion; empty if there is none."""
        try:
            return decode_json(get_small(self.partial, MARK), dict[str, str])
        except (NotFound, msgspec.DecodeError):
            return {}

    def _is_result(self, files: Sequence[Outfile]) -> bool:
        """True if the target is the result of this conversion."""
        if self.to == "universal":
            return self._attempt() == _attempt_name(self.identity)
        if not os.path.lexists(self.target):
            return False
        root = os.path.dirname(self.target) if self.to in ONE_FILE else self.target
        return all(_has(LocalStore(root), f) for f in files)

    def _attempt(self) -> str | None:
        """Return the attempt of the step in the target; None if there is no such step."""
        return attempt_of(LocalStore(self.target), self.source.step)

    def _check_target(self) -> None:
        """UsageError if the target exists, or lies in a folder of a root."""
        root = self.source.store.root if isinstance(self.source.store, LocalStore) else None
        inside = os.path.relpath(self.target, root).split(os.sep)[0] if root is not None else ""
        if inside in FOLDERS:
            what = f"{self.target} lies in {inside}/ of the root {root}, where holdfast keeps its files"
            raise UsageError(what, hint="give a path outside of it")
        if not os.path.lexists(self.target):
            return
        entries = os.listdir(self.target) if os.path.isdir(self.target) else None
        if entries == [] and self.to not in ONE_FILE:
            return
        if self.to != "universal":
            raise UsageError(f"{self.target} exists", hint="give a path that is not there yet")
        if entries is None or not {"steps", "claims"} & set(entries):
            what = f"{self.target} is no root of holdfast's"
            raise UsageError(what, hint="give a path that is not there yet")
        if self._attempt() is not None:
            what = f"{self.target} has a step {self.source.step} already"
            raise UsageError(what, hint="nothing is overwritten: give another root")

    def _check_space(self, files: Sequence[Outfile], same: bool) -> None:
        lacking = [f for f in files if not _has(self.work, f)]
        wanted = sum(max(f.bytes - self.work.begun_bytes(f.path), 0) for f in lacking)
        free = shutil.disk_usage(self.partial.root).free
        if wanted > free:
            if not same:
                self._remove_partial()
            raise OutOfSpace(
                f"{wanted:,} bytes are to be written into {self.partial.root}, {free:,} are free"
            )

    def _clear(self, files: Sequence[Outfile]) -> None:
        """Delete all other files: leftovers of a killed process or another conversion."""
        mine = set()
        for f in files:
            name = os.path.join(self.work.root, f.path)
            mine |= {name} if _has(self.work, f) else {name, name + BEGUN, name + BLOCKS}
        for path in list(walk(self.partial.root)):
            if path not in mine:
                unlink_below(path, self.partial.root)

    def _write(self, files: Sequence[Outfile]) -> int:
        """Write missing files, and read all files back; return the number of files that existed."""
        missing, work = (
            self._missing(files),
            self.work if self.bucket is None else self.bucket.store,
        )
        there = [f for f in files if f not in missing]
        for f in missing:
            work.delete(f.path)
        written: list[FileDigests] = []
        if there and self.verify:
            written += self._pass("check", there, None)
        if missing:
            written += self._pass("write", missing, work)
        if self.bucket is None:
            self.work.sync([f.path for f in files])
        if self.verify:
            read_back(work, written, progress=self._progress("verify", files))
        return len(there)

    def _check_sums(self, ranks: Ranks, origin: Store) -> None:
        """Check the CRC-32 of foreign files before anything is written, as reading ranges does not; each
        rank checks some files."""
        from holdfast.formats.read.verifying import archives_of, check_sums

        archived = [Outfile(file, origin.size(file), (), ()) for file in archives_of(self.source)]
        if mine := ranks.share(archived):
            check_sums(self.source, [f.path for f in mine], self._progress("check", mine))

    def _missing(self, files: Sequence[Outfile]) -> list[Outfile]:
        if self.bucket is not None:
            return self.bucket.missing(files)
        return [f for f in files if not _has(self.work, f)]

    def _pass(self, phase: str, files: Sequence[Outfile], store: Store | None) -> list[FileDigests]:
        return write_files(
            self.source,
            store,
            files,
            memory_bytes=self.memory_bytes,
            progress=self._progress(phase, files),
        )

    def _progress(self, phase: str, files: Sequence[Outfile]) -> Progress:
        total = sum(f.bytes for f in files)
        told = self.told or (lambda phase, done, total: None)
        told(phase, 0, total)
        return lambda done: told(phase, done, total)

    def _end(self, plan: Planned | Consolidation, files: Sequence[Outfile]) -> None:
        """Move the result into place, unless it is there, and remove the partial folder."""
        if self.bucket is not None:
            self._check_source(partial(self.bucket.clear, files))
            self.bucket.end(plan, files)
            return
        if not self._is_result(files):
            self._check_end(files)
            if isinstance(plan, Consolidation):
                self._move_step(plan, files)
            else:
                self._move(plan)
        self._remove_partial()

    def _check_end(self, files: Sequence[Outfile]) -> None:
        """Check that all files are written and the source is unchanged."""
        self._check_target()
        list(walk(self.partial.root))  # NFS: refreshes cached lookups of missing files
        missing = next((f.path for f in files if not self._is_written(f)), None)
        if missing is not None:
            raise HoldfastError(f"{missing} was not written", hint="convert again: it goes on")
        self._check_source(self._remove_partial)

    def _check_source(self, clear: Callable[[], object]) -> None:
        if self._identity_now() != self.identity:
            clear()
            raise Corrupt(
                f"{self.source.store.url} has changed while it was converted",
                hint="convert again once nobody writes to it",
            )

    def _is_written(self, file: Outfile) -> bool:
        """True if the file is written, even if an interrupted `_end` has moved it already."""
        moved = self.to == "universal" and _has(LocalStore(self.target), file)
        return moved or _has(self.work, file)

    def _move(self, plan: Planned) -> None:
        for path, data in plan.last:
            self.work.put(path, data)
        self.work.sync([path for path, _ in plan.last])
        if self.to in ONE_FILE:
            os.rename(os.path.join(self.work.root, os.path.basename(self.target)), self.target)
        else:
            if os.path.isdir(self.target):
                os.rmdir(self.target)  # an empty folder
            os.rename(self.work.root, self.target)
        fsync_directory(os.path.dirname(self.target))

    def _move_step(self, plan: Consolidation, files: Sequence[Outfile]) -> None:
        target = LocalStore(self.target)
        for file in files:
            path = os.path.join(target.root, file.path)
            os.makedirs(folder := os.path.dirname(path), exist_ok=True)
            if os.path.islink(folder):
                raise UsageError(f"'{folder}' is a link where a step's own folder must be")
            if _has(self.work, file):
                os.rename(os.path.join(self.work.root, file.path), path)
        for directory in {os.path.dirname(f.path) for f in files}:
            fsync_directories(os.path.join(target.root, directory), target.root)
        plan.commit(target)


def _attempt_name(identity: str) -> str:
    """Return the attempt name of a step, by the identity of the conversion that writes it."""
    return f"{CONVERSION_PREFIX}{identity}"


def _has(store: LocalStore, file: Outfile) -> bool:
    return size_at(store, file.path) == file.bytes


def _identity(
    source: Checkpoint, target: str, to: str, options: WriteOptions, *, is_stamped: bool
) -> str:
    """Return a digest of the source's state and the arguments, by which a begun conversion is recognised.
    Its own output in the source's folder does not count.  `is_stamped`: include the times and inode numbers
    of files on this host."""
    manifest = hexdigest(encode_manifest(source.manifest))
    files: list[Any] = []
    if isinstance(source.store, Sections):  # list again: files may have changed since
        origin = source.store.origin
        origin = ListedFolder(origin.inner) if isinstance(origin, ListedFolder) else origin
        keys = origin.list()
        if isinstance(origin, OneFile):  # and the files that it names, if it is an index
            origin = origin.inner
            keys = sorted({*keys, *map(file_key, source.manifest.files)})
        inner = origin.inner if isinstance(origin, ListedFolder) else origin
        folder = inner.root if isinstance(inner, LocalStore) else inner.url
        own = target.removeprefix(f"{folder.rstrip('/')}/")
        below = f"{own}/", f"{own}{_PARTIAL}/"
        theirs = [k for k in keys if k != own and not k.startswith(below)]
        files = [(k, *(_stamp(origin, k) if is_stamped else (origin.size(k),))) for k in theirs]
    asked = (options.max_file_bytes, options.dtype, options.key)
    names = [(w.name, w.also) for w in weights(source, options)] if options.rename else []
    told = repr((source.store.url, manifest, files, to, asked, names, __version__))
    return hexdigest(told.encode())


def _stamp(store: Store, key: str) -> tuple[int, ...]:
    """Return numbers that change when a file is replaced or rewritten."""
    if not isinstance(store, LocalStore):
        return (store.size(key),)
    path = os.path.join(store.root, key)
    with translated("read", key, path):
        found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


@contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Exclude other conversions until this process ends; does nothing if there are no locks."""
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


__all__ = ["TARGET_FORMATS", "Converted", "convert"]
