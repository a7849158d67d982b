"""The additions of a save to a step besides the state: small files, which rank 0 reads, and metrics.

    ckpt.files["config.json"] = path                   # or its bytes, or a function that returns them
    ckpt.save(100, metrics={"loss": 0.3}, files={"note.txt": b"the good one"})

The training thread reads the files when a durable save begins, so that they match the state.  A file that
cannot be read is left out of the step, and reported as `on_error` says.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from math import nan
from typing import Any, TypeAlias, Union

from holdfast.base.arguments import function_of, path_of, shown, unfit
from holdfast.base.errors import HoldfastError, StoreError, UsageError
from holdfast.core.checkpoint.attached import make_pack
from holdfast.core.checkpoint.names import step_prefix
from holdfast.core.checkpoint.notes import Metrics, metrics_of
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.format.checking import is_safe_name
from holdfast.core.format.manifest import MAX_ATTACHED, PackEntry
from holdfast.core.store import Store

FileSource: TypeAlias = Union[bytes, bytearray, str, "os.PathLike[str]", Callable[[], bytes]]
"""A path, the bytes themselves, or a function without arguments that returns them."""


class AttachedFiles(MutableMapping[str, FileSource]):
    """The files that are kept beside each durable step, by the name that they have there."""

    def __init__(self, given: Any, call: str) -> None:
        self._call = call
        self._sources: dict[str, FileSource] = {}
        if given is not None and not isinstance(given, Mapping):
            raise unfit(call, "files", given, "a dict of paths, bytes or functions by file name")
        for name, source in (given or {}).items():
            self[name] = source

    def __setitem__(self, name: str, source: FileSource) -> None:
        """UsageError unless the name is plain and relative, and the source a path, bytes or a function."""
        self._check_name(name)
        self._sources[name] = self._checked(name, source)

    def _check_name(self, name: Any) -> None:
        what = "names of files such as 'config.json': relative, with / and without .."
        if not isinstance(name, str) or not is_safe_name(name):
            raise unfit(self._call, "files", name, what, typed=not isinstance(name, str))
        for other in self._sources:
            if f"{other}/".startswith(f"{name}/") != (other == name) or name.startswith(
                f"{other}/"
            ):
                raise UsageError(
                    f"{self._call}(files=...): {name!r} and {other!r} cannot both be files"
                )

    def _checked(self, name: str, source: Any) -> FileSource:
        where = f"files[{shown(name)}]"
        if isinstance(source, (bytes, bytearray)):
            return bytes(source)
        if isinstance(source, (str, os.PathLike)):
            return path_of(source, self._call, where)
        if callable(source):
            what = "without arguments that returns bytes"
            return function_of(source, self._call, where, what, 0)  # type: ignore[no-any-return]
        raise unfit(self._call, where, source, "a path, bytes, or a function that returns bytes")

    def __getitem__(self, name: str) -> FileSource:
        return self._sources[name]

    def __delitem__(self, name: str) -> None:
        del self._sources[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __repr__(self) -> str:
        return f"<files beside each step: {', '.join(self) or 'none'}>"


@dataclass(frozen=True)
class Attached:
    """Files and metrics of one save, on rank 0."""

    contents: dict[str, bytes] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)

    @cached_property
    def _packed(self) -> tuple[PackEntry, bytes]:
        return make_pack("", self.contents)

    def in_manifest(self, attempt: str) -> dict[str, Any]:
        """Return the manifest's fields for these metrics and files."""
        return {"metrics": self.metrics, "attached": self._entry(attempt)}

    def _entry(self, attempt: str) -> PackEntry | None:
        if not self.contents:
            return None
        entry, _ = self._packed
        ends = entry.bytes, entry.table, entry.digest, entry.files
        return PackEntry(attempt + entry.path, *ends)

    def put(self, store: Store, step: int, attempt: str) -> None:
        """Write the files; blocks until they are durable.  The manifest is written after them."""
        entry = self._entry(attempt)
        if entry is not None:
            store.put(step_prefix(step) + entry.path, self._packed[1])


def attached(
    files: Mapping[str, FileSource],
    more: Any,
    metrics: Any,
    call: str,
    complain: Callable[[BaseException], object],
    *,
    reads: bool,
) -> Attached | None:
    """Return the metrics and contents of files of a save; None if there are none.

    `files`: the declared ones; `more`: those of this save, which take precedence.  `reads`: True on rank 0,
    which reads the files, and calls `complain` with the error of each that cannot be read.  UsageError for
    unusable arguments.
    """
    values = {} if metrics is None else metrics_of(metrics, call)
    sources = {**files, **AttachedFiles(more, call)}
    AttachedFiles(sources, call)  # both together
    _check_size({n: s for n, s in sources.items() if isinstance(s, bytes)})
    if not reads or not (sources or values):
        return None
    contents: dict[str, bytes] = {}
    for name, source in sources.items():
        try:
            contents[name] = _read(name, source)
        except Exception as error:
            complain(error)
    try:
        _check_size(contents)
    except UsageError as error:
        complain(error)
        contents = {}
    return Attached(contents, values)


def attached_to(
    step: Checkpoint, declared: Collection[str], warn: Callable[[str], object]
) -> tuple[dict[str, float], dict[str, bytes]]:
    """Return the metrics and files of a restored step that is saved again.

    A snapshot in memory has them only if its durable save has written them.  `warn` is called with a text
    that names what cannot be read, except `declared` files, which the new save reads again.
    """
    number, files = step.manifest.step, dict[str, bytes]()
    lost = list[str]()
    for name in step.files:
        try:
            files[name] = step.files[name]
        except HoldfastError:
            lost += [name] if name not in declared else []
    if lost:
        warn(f"step {number} is saved again without {', '.join(lost)}, which cannot be read")
    try:
        return step.metrics, files
    except HoldfastError as error:
        warn(f"step {number} is saved again without its later metrics: {error}")
        metrics = {k: nan if v is None else v for k, v in step.manifest.metrics.items()}
        return metrics, files


def _read(name: str, source: FileSource) -> bytes:
    if isinstance(source, (bytes, bytearray)):
        return bytes(source)
    if not callable(source):
        try:
            if os.path.getsize(source) > MAX_ATTACHED:
                _check_bytes(os.path.getsize(source), repr(name))
            with open(source, "rb") as file:
                return file.read(MAX_ATTACHED + 1)
        except OSError as error:
            text = f"the file {name!r} cannot be read: {error}"
            raise StoreError(text, key=os.fspath(source)) from error
    try:
        found = source()
    except HoldfastError:
        raise
    except Exception as error:
        text = f"the function for the file {name!r} failed: {error!r}"
        raise StoreError(text) from error
    if isinstance(found, (bytes, bytearray, memoryview)):
        return bytes(found)
    raise UsageError(
        f"the function for the file {name!r} returned {shown(found)}, not bytes",
        hint="return text.encode()" if isinstance(found, str) else None,
    )


def _check_size(contents: Mapping[str, Any]) -> None:
    names = [f"{name} ({len(data):,})" for name, data in contents.items()]
    _check_bytes(sum(map(len, contents.values())), ", ".join(names))


def _check_bytes(num_bytes: int, names: str) -> None:
    if num_bytes > MAX_ATTACHED:
        raise UsageError(
            f"the files of a step may have {MAX_ATTACHED:,} bytes in all, and these have {num_bytes:,}: "
            f"{names[:300]}",
            hint="keep large values in the state, as tensors",
        )
