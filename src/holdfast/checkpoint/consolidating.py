"""Consolidating: a step rewritten with every tensor whole in one file, for tools that know no meshes.

The result is an ordinary step.  Its mesh has one axis, `file`, and each tensor lies on one coordinate of
it.  Weights lie in files whose headers leave out the key in front of their names, and beside the manifest
is the index that Hugging Face's loaders look for, so that they read the weights where they lie:

    steps/0000001000/manifest.json
    steps/0000001000/model.safetensors.index.json
    steps/0000001000/<attempt>/model-00001-of-00002.safetensors
    steps/0000001000/<attempt>/optim-00001-of-00001.safetensors

Memory: one block of `BLOCK_BYTES`, and what reading it takes.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import numpy as np

from holdfast.checkpoint.claiming import newest_claim, once_attempt
from holdfast.checkpoint.committing import commit
from holdfast.checkpoint.names import committed, step_prefix
from holdfast.checkpoint.opened import Checkpoint
from holdfast.checkpoint.reading import read_alone
from holdfast.checkpoint.rows import RAW, ArrayTarget, Want
from holdfast.checkpoint.tidying import INDEX, attempt_of, discard, sweep
from holdfast.codec.digest import CHUNK_BYTES, digest_chunks, hexdigest, num_chunks
from holdfast.errors import HoldfastError, Unavailable, UsageError
from holdfast.events import emit
from holdfast.format.dtypes import DTYPES
from holdfast.format.image import Image, plan_image
from holdfast.format.manifest import (
    FileEntry,
    Manifest,
    ShardingEntry,
    TensorEntry,
)
from holdfast.layout import flat_range
from holdfast.store import Store, open_store
from holdfast.version import __version__

BLOCK_BYTES = 64 << 20
AXIS = "file"
WEIGHTS = ("param", "buffer")

Progress = Callable[[int], object]


@dataclass(frozen=True)
class Consolidated:
    """The new step, opened, and the extras that could not be kept: each rank had its own."""

    checkpoint: Checkpoint
    left_out: tuple[str, ...]


@dataclass
class _File:
    """A file to be: tensor numbers of the source, the prefix that names lose, the key it is for."""

    key: str
    strip: str
    tensors: list[int]
    bytes: int = 0
    name: str = ""


def consolidate(
    source: Checkpoint,
    store: Store | str | os.PathLike[str],
    *,
    max_file_bytes: int = 5_000_000_000,
    progress: Progress | None = None,
) -> Consolidated:
    """Write a step into another root with every tensor whole; returns it, opened.

    Blocks while it copies; `progress` is told the bytes just written.  Interrupted before the commit, the
    root is as it was; after it, an index of Hugging Face's may be missing or old: consolidate again.
    Extras that single ranks keep are left out unless their rule is `rank0` or `same`.
    UsageError if `store` is where `source` lies.
    """
    target = open_store(store) if isinstance(store, (str, os.PathLike)) else store
    if target.url == source.store.url:
        raise UsageError(
            f"cannot consolidate {target.url} into itself", hint="give a root of its own"
        )
    if max_file_bytes < 1:
        raise UsageError(f"max_file_bytes={max_file_bytes}: must be positive")
    files = _assign(source.manifest, max_file_bytes)
    _sweep(target)
    manifest = _draft(source, target, files)
    try:
        manifest, left_out = _carry_over(
            source, target, manifest, files, progress or (lambda _: None)
        )
        replaced = attempt_of(target, manifest.step)
        commit(target, manifest)
    except BaseException as error:
        if not isinstance(error, Unavailable):  # else the manifest may still appear
            with suppress(HoldfastError):
                discard(target, manifest.step, manifest.attempt)
        raise
    _write_indexes(target, manifest, files)
    if replaced is not None:
        try:
            discard(target, manifest.step, replaced)
        except HoldfastError as error:
            emit("tidy.failed", step=manifest.step, error=str(error))
    return Consolidated(Checkpoint(target, manifest), left_out)


def _sweep(target: Store) -> None:
    """Delete what interrupted ones left."""
    try:
        sweep(target)
    except HoldfastError as error:
        emit("sweep.failed", error=str(error))


def _carry_over(
    source: Checkpoint, target: Store, manifest: Manifest, files: list[_File], progress: Progress
) -> tuple[Manifest, tuple[str, ...]]:
    """Write all files; returns the manifest that is to be committed."""
    written = [
        _write(source, target, manifest, number, file, progress)
        for number, file in enumerate(files)
    ]
    extras, left_out = _keep_extras(source)
    manifest = msgspec.structs.replace(
        manifest, files=tuple(f for f in written if f is not None), extras=extras
    )
    return manifest, left_out


def _assign(manifest: Manifest, max_file_bytes: int) -> list[_File]:
    """Tensors to files, in order: weights apart from the rest, a new file where one is full."""
    with_weights = {_key(t.name) for t in manifest.tensors if t.state in WEIGHTS}
    last: dict[tuple[str, bool], _File] = {}
    files: list[_File] = []
    for number, t in enumerate(manifest.tensors):
        key = _key(t.name)
        weight = t.state in WEIGHTS
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


def _draft(source: Checkpoint, store: Store, files: list[_File]) -> Manifest:
    """The new manifest, but for files and extras."""
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
        run=max([old.run, held.run if held else 0, *(s.run for s in committed(store))]),
        attempt=once_attempt(),
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        software={**old.software, "holdfast": __version__},
        mesh=((AXIS, max(len(files), 1)),),
        chunk_bytes=CHUNK_BYTES,
        algorithm=old.algorithm,
        shardings=tuple(ShardingEntry(on={AXIS: (k,)}) for k in range(len(files))),
        tensors=tensors,
        aliases=old.aliases,
        files=(),
        extras={},
        per_rank={},
    )


def _keep_extras(source: Checkpoint) -> tuple[dict[str, object], tuple[str, ...]]:
    """Extras of all ranks, with those of rank 0 where its rule says that they stand for all."""
    m = source.manifest
    kept = {k for k, rule in m.per_rank.items() if rule in ("rank0", "same")}
    first = source.rank_extras(0) if kept else {}
    extras = {**m.extras, **{k: v for k, v in first.items() if k in kept}}
    return extras, tuple(k for k in m.per_rank if k not in kept or k not in first)


# -- one file -------------------------------------------------------------------------------------


def _write(
    source: Checkpoint,
    store: Store,
    manifest: Manifest,
    number: int,
    file: _File,
    progress: Progress,
) -> FileEntry | None:
    """Write one file block by block; None if its tensors are all empty."""
    pieces = manifest.placement.pieces(number)
    if not pieces.total_bytes:
        return None
    image = plan_image(manifest.tensors, pieces, strip=file.strip)
    path = f"{manifest.attempt}/{file.name}"
    writer = store.create(step_prefix(manifest.step) + path, image.total_bytes)
    try:
        table = np.empty(num_chunks(image.table_start), "<u8")
        buffer = memoryview(bytearray(min(BLOCK_BYTES, image.table_start) + table.nbytes))
        for start in range(0, image.table_start, BLOCK_BYTES):
            stop = min(start + BLOCK_BYTES, image.table_start)
            block = buffer[: stop - start]
            _fill(source, manifest, image, start, block)
            digest_chunks(block, table[start // CHUNK_BYTES :])
            if stop == image.table_start:
                buffer[stop - start : stop - start + table.nbytes] = table.tobytes()
                block = buffer[: image.total_bytes - start]
            writer.write(start, block)
            progress(stop - start)
        writer.finish()
    except BaseException:
        writer.abort()
        raise
    offsets = (image.total_bytes, image.data_start, image.extras_start, image.table_start)
    return FileEntry(number, path, *offsets, hexdigest(table.tobytes()), file.strip)


def _fill(
    source: Checkpoint, manifest: Manifest, image: Image, start: int, block: memoryview
) -> None:
    """Bytes `start..` of a file: header, and tensors straight from the source."""
    header = image.header[start : start + len(block)]
    block[: len(header)] = header
    read_alone(source.files, list(_wants(source, manifest, image, start, block)))


def _wants(
    source: Checkpoint, manifest: Manifest, image: Image, start: int, block: memoryview
) -> Iterator[Want]:
    """What lies in a block, as boxes whose targets are the block's own memory."""
    pieces = image.pieces
    begin = pieces.offset + image.data_start
    stop = start + len(block)
    hit = np.flatnonzero((begin < stop) & (begin + pieces.bytes > start))
    for i in hit.tolist():
        t = manifest.tensors[int(pieces.tensor[i])]
        at, itemsize = int(begin[i]), DTYPES[t.dtype].bytes
        first = (max(start, at) - at) // itemsize
        last = (min(stop, at + int(pieces.bytes[i])) - at) // itemsize
        number = source.index(t.name)
        for box in flat_range(t.shape, first, last):
            offset = at + first * itemsize - start
            array = np.frombuffer(block, RAW[itemsize], box.size, offset).reshape(box.shape)
            first += box.size
            yield Want(number, box, ArrayTarget(array))


# -- the index ------------------------------------------------------------------------------------


def _write_indexes(store: Store, manifest: Manifest, files: list[_File]) -> None:
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
        index = {
            "metadata": {"total_size": sizes[key]},
            "weight_map": dict(sorted(weight_map.items())),
        }
        text = json.dumps(index, indent=2) + "\n"
        store.put(f"{step_prefix(manifest.step)}{key}{INDEX}", text.encode())


__all__ = ["Consolidated", "consolidate"]
