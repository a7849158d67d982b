"""Consolidating: a step rewritten with every tensor whole in one file, for tools without meshes.

The result is an ordinary step.  Its mesh has one axis, `file`, and each tensor lies on one coordinate of
it. Files of weights have headers without the key in front of names, and an index beside the manifest, so
that Hugging Face's loaders can read them in place:

    steps/0000001000/manifest.json
    steps/0000001000/model.safetensors.index.json
    steps/0000001000/<attempt>/model-00001-of-00002.safetensors
    steps/0000001000/<attempt>/optim-00001-of-00001.safetensors

This module plans; `holdfast.core.checkpoint.outfiles` writes the files in bounded memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from holdfast.base.errors import UsageError
from holdfast.base.version import __version__
from holdfast.core.checkpoint.attached import make_pack
from holdfast.core.checkpoint.claiming import newest_claim, runs_of_steps
from holdfast.core.checkpoint.committing import commit
from holdfast.core.checkpoint.names import RootKeys, step_prefix
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.outfiles import ElementSpan, Literal, Outfile
from holdfast.core.checkpoint.tidying import INDEX
from holdfast.core.codec.digest import CHUNK_BYTES, digest_chunks, hexdigest, num_chunks
from holdfast.core.format.dtypes import DTYPES
from holdfast.core.format.image import Image, plan_image
from holdfast.core.format.manifest import (
    FileEntry,
    Manifest,
    ShardingEntry,
    TensorEntry,
    readable,
)
from holdfast.core.format.safetensors import weight_index
from holdfast.core.store import Store, read_range

_AXIS = "file"
WEIGHT_KINDS = ("param", "buffer")


@dataclass
class _File:
    """A planned file: its key, the prefix to strip from names, and tensor numbers of the source."""

    key: str
    strip: str
    tensors: list[int]
    bytes: int = 0
    name: str = ""


@dataclass(frozen=True)
class Consolidation:
    """The plan of a consolidated step: its files, and the commit."""

    draft: Manifest
    """The manifest, without its files."""
    files: tuple[_File, ...]
    planned: tuple[_Planned, ...]
    left_out: tuple[str, ...]
    attached: Mapping[str, bytes]
    """Files attached to the step, by name."""

    @property
    def outfiles(self) -> list[Outfile]:
        return [p.out for p in self.planned]

    def commit(self, target: Store) -> None:
        """Commit the step to `target`, which has its files; writes the indexes first."""
        entries = tuple(p.entry(target) for p in self.planned)
        _write_indexes(target, self.draft, self.files)
        entry = None
        if self.attached:
            entry, data = make_pack(self.draft.attempt, self.attached)
            target.put(step_prefix(self.draft.step) + entry.path, data)
        commit(target, msgspec.structs.replace(self.draft, files=entries, attached=entry))


def plan_consolidation(
    source: Checkpoint, target: Store, attempt: str, max_file_bytes: int
) -> Consolidation:
    """Plan the files of a consolidated step, as newest of a root's runs."""
    if max_file_bytes < 1:
        raise UsageError(f"max_file_bytes={max_file_bytes}: must be positive")
    files = _assign(source.manifest, max_file_bytes)
    extras, left_out = keep_extras(source)
    draft = readable(_draft(source, target, files, attempt, extras))
    planned = [_plan(source, draft, number, file) for number, file in enumerate(files)]
    made = tuple(p for p in planned if p is not None)
    return Consolidation(draft, tuple(files), made, left_out, dict(source.files))


def _assign(manifest: Manifest, max_file_bytes: int) -> list[_File]:
    """Assign tensors to files in order, weights apart from other tensors, at most `max_file_bytes` each."""
    with_weights = {_key(t.name) for t in manifest.tensors if t.state in WEIGHT_KINDS}
    last: dict[tuple[str, bool], _File] = {}
    files: list[_File] = []
    for number, t in enumerate(manifest.tensors):
        key = _key(t.name)
        weight = t.state in WEIGHT_KINDS
        size = math.prod(t.shape) * DTYPES[t.dtype].bytes
        file = last.get((key, weight))
        if file is None or (file.bytes and file.bytes + size > max_file_bytes):
            label = key if weight or key not in with_weights else f"{key}-state"
            file = _File(label, f"{key}." if weight else "", [])
            last[key, weight] = file
            files.append(file)
        file.tensors.append(number)
        file.bytes += size
    counts: dict[str, int] = {}
    for file in files:
        counts[file.key] = counts.get(file.key, 0) + 1
        file.name = f"{file.key}-{counts[file.key]:05d}"
    for file in files:
        file.name += f"-of-{counts[file.key]:05d}.safetensors"
    return files


def _key(name: str) -> str:
    return name.split(".", 1)[0]


def _draft(
    source: Checkpoint, store: Store, files: list[_File], attempt: str, extras: dict[str, Any]
) -> Manifest:
    """The new manifest, without its files."""
    old = source.manifest
    home = {number: i for i, file in enumerate(files) for number in file.tensors}
    tensors = tuple(
        TensorEntry(t.name, t.dtype, t.shape, home[i], t.state, t.replica)
        for i, t in enumerate(old.tensors)
    )
    held = newest_claim(store)
    return Manifest(
        holdfast=old.holdfast,
        step=old.step,
        run=max([old.run, held.run if held else 0, *runs_of_steps(store, RootKeys(store))]),
        attempt=attempt,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        software={**old.software, "holdfast": __version__},
        mesh=((_AXIS, max(len(files), 1)),),
        chunk_bytes=CHUNK_BYTES,
        algorithm=old.algorithm,
        shardings=tuple(ShardingEntry(on={_AXIS: (k,)}) for k in range(len(files))),
        tensors=tensors,
        aliases=old.aliases,
        files=(),
        extras=extras,
        per_rank={},
        metrics={k: v if math.isfinite(v) else None for k, v in source.metrics.items()},
    )


def keep_extras(source: Checkpoint) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the encoded extras that all ranks share, with rank 0's where the rule makes them stand for
    all, and the keys of the extras that cannot be kept."""
    m = source.manifest
    kept = {k for k, rule in m.per_rank.items() if rule in ("rank0", "same")}
    first = source.rank_extras(0) if kept else {}
    extras = {**m.extras, **{k: v for k, v in first.items() if k in kept}}
    return extras, tuple(k for k in m.per_rank if k not in kept or k not in first)


# -- one file -------------------------------------------------------------------------------------


def _plan(source: Checkpoint, manifest: Manifest, number: int, file: _File) -> _Planned | None:
    """Plan file `number`; None if its tensors are all empty."""
    pieces = manifest.placement.pieces(number)
    if not pieces.total_bytes:
        return None
    image = plan_image(manifest.tensors, pieces, strip=file.strip)
    begin = (pieces.offset + image.data_start).tolist()
    tensors = [manifest.tensors[i] for i in pieces.tensor.tolist()]
    spans = tuple(
        ElementSpan(at, source.index(t.name), 0, math.prod(t.shape), t.dtype)
        for at, t in zip(begin, tensors)
    )
    path = f"{manifest.attempt}/{file.name}"
    key = step_prefix(manifest.step) + path
    out = Outfile(
        key, image.total_bytes, (Literal(0, image.header),), spans, lambda: _TableSeal(image)
    )
    return _Planned(number, path, file.strip, image, out)


@dataclass(frozen=True)
class _Planned:
    """A file whose image is planned."""

    number: int
    path: str
    strip: str
    image: Image
    out: Outfile

    def entry(self, store: Store) -> FileEntry:
        """The file's entry for the manifest, once the file is written."""
        image = self.image
        start = image.table_start
        table = read_range(store, self.out.path, start, image.total_bytes - start)
        offsets = (image.total_bytes, image.data_start, image.extras_start, start)
        return FileEntry(self.number, self.path, *offsets, hexdigest(table), self.strip)


class _TableSeal:
    """A seal that writes the digest table after the data."""

    def __init__(self, image: Image) -> None:
        self._start = image.table_start
        self._table = np.empty(num_chunks(image.table_start), "<u8")

    def __call__(self, start: int, block: memoryview) -> None:
        data = block[: max(self._start - start, 0)]
        if len(data):
            digest_chunks(data, self._table[start // CHUNK_BYTES :])
        if len(data) < len(block):
            at = start + len(data) - self._start
            block[len(data) :] = self._table.tobytes()[at : at + len(block) - len(data)]


# -- the index ------------------------------------------------------------------------------------


def _write_indexes(store: Store, manifest: Manifest, files: Sequence[_File]) -> None:
    """One index per key with weights; paths in it are relative to itself."""
    maps: dict[str, dict[str, str]] = {}
    sizes: dict[str, int] = {}
    for file in files:
        if not file.strip or not file.bytes:
            continue
        sizes[file.key] = sizes.get(file.key, 0) + file.bytes
        for number in file.tensors:
            t = manifest.tensors[number]
            if 0 not in t.shape:
                name = t.name.removeprefix(file.strip)
                maps.setdefault(file.key, {})[name] = f"{manifest.attempt}/{file.name}"
    for key, weight_map in maps.items():
        index = weight_index(sizes[key], weight_map)
        store.put(f"{step_prefix(manifest.step)}{key}{INDEX}", index)


__all__ = ["WEIGHT_KINDS", "Consolidation", "keep_extras", "plan_consolidation"]
