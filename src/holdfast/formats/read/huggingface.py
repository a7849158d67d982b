"""Safetensors files of Hugging Face, read in place and without torch.

A model is one file (`model.safetensors`), or shards and an index that says which of them holds each tensor:

    model-00001-of-00002.safetensors  model-00002-of-00002.safetensors  model.safetensors.index.json

Tensors become `model.<name>`.  Headers state where every tensor lies, so nothing else is read at open.
"""

from __future__ import annotations

import json
import re
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from holdfast.base.errors import FormatError, NotFound, UsageError
from holdfast.base.suggest import did_you_mean
from holdfast.base.text import listed
from holdfast.base.threads import in_threads
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.reading import threads_here
from holdfast.core.format.safetensors import Header, HeaderEntry, read_safetensors_header
from holdfast.core.layout import whole
from holdfast.core.store import Store, get_small
from holdfast.core.store.contract import size_at
from holdfast.formats.read.folder import OneFile, joined, top
from holdfast.formats.read.foreign import Foreign, StoredPart, foreign
from holdfast.formats.read.sections import at_place

SUFFIX, INDEX = ".safetensors", ".safetensors.index.json"
_SHARD = re.compile(r"(.+)-\d+-of-\d+(\..+)?\.safetensors")
_FOUND = re.compile(r"(model|diffusion_pytorch_model|pytorch_model|adapter_model)(\.\w+)?"
                    r"\.safetensors(\.index\.json)?")  # fmt: skip
"""Names by which a folder is recognised as a checkpoint of Hugging Face."""
_OURS = "holdfast."
"""Prefix of tensors of holdfast's images that are not weights."""


def is_huggingface(store: Store) -> bool:
    """True if a folder has weights under the names that Hugging Face's libraries give them, or is a
    safetensors file itself."""
    if isinstance(store, OneFile):
        return store.name.endswith((SUFFIX, INDEX))
    return any(_FOUND.fullmatch(name) or name.endswith(INDEX) for name in top(store))


def holds_safetensors(store: Store) -> bool:
    """True if a folder holds any safetensors file."""
    return any(name.endswith((SUFFIX, INDEX)) for name in top(store))


def open_huggingface(store: Store, step: int | None = None) -> Checkpoint:
    """A folder, or one file, of safetensors as a checkpoint, its step 0.

    Corrupt, FormatError or NotFound if a file is not whole, is missing, or is not what the index says;
    UsageError if the folder holds several models.
    """
    if step not in (None, 0):
        raise NotFound(f"{store.url} is a huggingface checkpoint; it has no step {step}")
    name = _choose(store)
    index = read_index(store, name, (SUFFIX,)) if name.endswith(INDEX) else None
    files = sorted(set(index.files.values())) if index else [name]
    headers = _headers(store, files, name)
    if index is not None:
        _check_index(index, headers)
    tensors = [
        _tensor(file, entry)
        for file in files
        for entry in headers[file].entries
        if index is None or entry.name in index.files
    ]
    metadata = _metadata(headers, index)
    found = {"metadata": metadata} if metadata else {}
    return foreign(store, tensors, step=0, software={}, extras=found)


def _choose(store: Store) -> str:
    """The key of the model's index or file.  NotFound; UsageError for several models."""
    names = top(store)
    indexes = [n for n in names if n.endswith(INDEX)]
    singles = [
        n for n in names if n.endswith(SUFFIX) and (len(names) == 1 or not _SHARD.fullmatch(n))
    ]
    found = [*indexes, *singles]
    if not found:
        shards = [n for n in names if n.endswith(SUFFIX)]
        if shards:
            raise NotFound(
                f"shards in {store.url}, but no index",
                key=f"*{INDEX}",
                hint="the index says which shards there must be; copy it too, or name one shard",
            )
        raise NotFound(f"no safetensors file in {store.url}")
    if len(found) > 1:
        raise UsageError(
            f"several models in {store.url}: {', '.join(found)}",
            hint=f"name one: huggingface:{joined(store.url, found[0]).removeprefix('file://')}",
        )
    return found[0]


# -- shards ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Index:
    """An index of shards: the file that holds each tensor, by the tensor's name."""

    key: str
    files: dict[str, str]
    metadata: dict[str, Any]


def read_index(store: Store, key: str, suffixes: tuple[str, ...]) -> Index:
    """An index of shards.  FormatError if it is malformed or names files elsewhere."""
    try:
        found = json.loads(get_small(store, key))
        files, metadata = found["weight_map"], found.get("metadata") or {}
        plain = isinstance(metadata, dict) and all(isinstance(f, str) for f in files.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"malformed index: {error}", key=key) from None
    if not plain or not files:
        raise FormatError("malformed index: no map of names to files", key=key)
    for file in files.values():
        if not file.endswith(suffixes) or file.startswith("/") or ".." in file.split("/"):
            raise FormatError(f"malformed index: it names the file {file!r}", key=key)
    return Index(key, files, {str(k): v for k, v in metadata.items()})


def _headers(store: Store, files: list[str], named_by: str) -> dict[str, Header]:
    """The header of each file."""
    missing_files(store, files, named_by)
    found: dict[str, Header] = {}

    def one(file: str) -> None:
        found[file] = header_of(store, file)

    in_threads(one, files, threads_here())
    return found


def missing_files(store: Store, files: list[str], named_by: str) -> None:
    """NotFound, with the names, if files of an index are missing."""
    missing = [file for file in files if size_at(store, file) is None]
    if missing:
        raise NotFound(
            f"{len(missing)} of {len(files)} files that {named_by} names are missing: "
            + listed(missing, 5),
            key=missing[0],
            hint="was it copied or downloaded whole?",
        )


def header_of(store: Store, file: str) -> Header:
    """The header of a safetensors file in a store."""
    with closing(store.open(file)) as reader:

        def read(start: int, stop: int) -> bytes:
            data = bytearray(stop - start)
            reader.read(start, memoryview(data))
            return bytes(data)

        return read_safetensors_header(read, store.size(file), file)


def _check_index(index: Index, headers: dict[str, Header]) -> None:
    """FormatError unless every tensor is in the file of the index, and in no other."""
    where: dict[str, str] = {}
    for file, header in headers.items():
        for entry in header.entries:
            other = where.setdefault(entry.name, file)
            if other != file and not entry.name.startswith(_OURS):
                raise FormatError(f"{entry.name!r} is in two files: {other} and {file}", key=file)
    for name, file in index.files.items():
        if where.get(name) != file:
            at = f"it is in {where[name]}" if name in where else "it is in none"
            raise FormatError(
                f"{name!r} is not in {file}, as {index.key} says: {at}",
                key=file,
                hint=None if name in where else did_you_mean(name, where),
            )
    ours = {f for f, h in headers.items() if "holdfast" in h.metadata}
    more = [n for n, f in where.items() if n not in index.files and f not in ours]
    if more:
        raise FormatError(
            f"{index.key} does not list {listed(f'{name!r} (in {where[name]})' for name in more)}",
            key=index.key,
            hint="index and shards are of different models or versions",
        )


# -- as a checkpoint ------------------------------------------------------------------------------


def _tensor(file: str, entry: HeaderEntry) -> Foreign:
    box = whole(entry.shape)
    parts = (StoredPart.of(box, file, at_place(file, entry.start)),) if box.size else ()
    return Foreign(f"model.{entry.name}", entry.dtype, entry.shape, "param", parts)


def _metadata(headers: dict[str, Header], index: Index | None) -> dict[str, Any]:
    """Return the files' metadata, once if they agree, else by file, and the index's as `index`."""
    found = {file: h.metadata for file, h in headers.items() if h.metadata}
    same = len({tuple(sorted(m.items())) for m in found.values()}) == 1
    out: dict[str, Any] = dict(next(iter(found.values()))) if same else dict(found)
    return out | ({"index": index.metadata} if index and index.metadata else {})
