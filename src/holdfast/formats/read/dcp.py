"""Checkpoints of torch.distributed.checkpoint (DCP), read in place and without torch.

`.metadata` is a pickle: each tensor's size and chunks, and for each chunk the file, offset and length of
a small torch.save archive, which is opened when the tensor is read.  Other values are archives too, and
become extras (`holdfast.formats.read.dcptree`).
"""

from __future__ import annotations

from collections import ChainMap
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.base.errors import FormatError, NotFound
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.format import extras
from holdfast.core.format.dtypes import DTYPES
from holdfast.core.layout.box import box_at
from holdfast.core.store import Store
from holdfast.core.store.contract import size_at
from holdfast.formats.read.dcptree import arrange_tree
from holdfast.formats.read.foreign import Foreign, StoredPart, foreign
from holdfast.formats.read.plaindata import PLAIN_GLOBALS, ints, plain_value, text
from holdfast.formats.read.sections import ArchiveRange, FilePlace, Strided
from holdfast.formats.read.stepnumber import stated_step
from holdfast.formats.read.torchfile import (
    More,
    TensorRef,
    kind_text,
    read_file,
    torch_globals,
)
from holdfast.formats.read.unknown import is_needed, not_data, unknown_in, warn_left_out
from holdfast.formats.read.unpickle import MALFORMED, UnknownInstance, record, unpickle

_METADATA = ".metadata"
_META = "torch.distributed.checkpoint.metadata"
_META_BEFORE = "torch.distributed._shard.sharded_tensor.metadata"
"""Module of the classes of tensor properties in torch before 2.3."""
_PLANNER = "torch.distributed.checkpoint.planner"
_KNOWN = {
    (_META, name): record(name)
    for name in (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "BytesStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )
} | {
    (_META_BEFORE, name): record(name) for name in ("TensorProperties", "MEM_FORMAT_ENCODING")
} | {
    (_PLANNER, name): record(name)
    for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): record("_StorageInfo"),
    ("torch.serialization", "_get_layout"): lambda name: name,
}  # fmt: skip

_Key = tuple[str, tuple[int, ...] | None]


@dataclass(frozen=True)
class Contents:
    """Contents of `.metadata`: tensors, and places of the archives of other values, by name."""

    tensors: list[Foreign]
    objects: dict[str, UnknownInstance]
    archives: list[ArchiveRange]
    """Archives of tensors and of other values."""
    meta: UnknownInstance


def is_dcp(store: Store) -> bool:
    """True if a directory holds a DCP checkpoint."""
    return bool(size_at(store, _METADATA))


def open_dcp(store: Store, step: int | None = None) -> Checkpoint:
    """Open a DCP directory as a checkpoint of the step that its values state, or of step 0.  FormatError,
    Corrupt or NotFound."""
    found = read_contents(store)
    values = _values(store, found.objects)
    here = stated_step(values, found.tensors, store)
    if step not in (None, here):
        raise NotFound(f"{store.url} is a dcp checkpoint of step {here}; it has no step {step}")
    software = {"torch.distributed.checkpoint": text(found.meta.get("version") or "unknown")}
    tensors, values = arrange_tree(store, found.tensors, values, found.meta)
    return foreign(
        store, tensors, step=here, software=software, extras=values, archives=found.archives
    )


def read_contents(store: Store, folder: str = "", more: More | None = None) -> Contents:
    """Read the contents of a directory: `folder` of the store, a prefix that ends in `/`.

    `more`: what its pickles may name besides DCP's own classes.  FormatError, Corrupt or NotFound.
    """
    key = folder + _METADATA
    data = store.get(key)
    try:
        known = ChainMap(_KNOWN, PLAIN_GLOBALS, torch_globals(), more or {})
        return _contents(store, folder, unpickle(data, known, most=len(data)))
    except FormatError as error:
        error.key = error.key or key
        raise
    except MALFORMED as error:
        raise FormatError(f"malformed metadata: {error}", key=key) from None


def _contents(store: Store, folder: str, meta: Any) -> Contents:
    if not isinstance(meta, UnknownInstance) or meta.name != "Metadata":
        raise FormatError("not the metadata of DCP")
    places: dict[_Key, UnknownInstance] = {}
    for index, info in _dict(meta["storage_data"]).items():
        if not (isinstance(index, UnknownInstance) and isinstance(info, UnknownInstance)):
            raise FormatError("malformed storage_data")
        here = UnknownInstance(info.name)
        here.fields = info.fields | {"relative_path": folder + text(info["relative_path"])}
        offset = index.get("offset")
        places[text(index["fqn"]), None if offset is None else ints(offset)] = here
    tensors, objects = [], {}
    for name, entry in _dict(meta["state_dict_metadata"]).items():
        if not isinstance(entry, UnknownInstance):
            raise FormatError(f"malformed entry of {text(name)!r}")
        if entry.name == "BytesStorageMetadata":
            objects[text(name)] = _place(places, (text(name), None))
        else:
            tensors.append(_tensor(store, text(name), entry, places))
    return Contents(
        tensors, objects, sorted({section_range(info) for info in places.values()}), meta
    )


def _tensor(
    store: Store, name: str, entry: UnknownInstance, places: dict[_Key, UnknownInstance]
) -> Foreign:
    shape, dtype = ints(entry["size"]), _dtype(entry["properties"])
    parts = []
    for chunk in entry["chunks"]:
        start, sizes = ints(chunk["offsets"]), ints(chunk["sizes"])
        box = box_at(start, sizes)
        if not box.size:
            continue
        info = _place(places, (name, start))
        where = partial(_where, store, name, info, sizes, dtype)
        parts.append(StoredPart.of(box, str(info["relative_path"]), where))
    return Foreign(name, dtype, shape, "tensor", tuple(parts))


def _dtype(properties: Any) -> str:
    """The dtype in a tensor's properties, pickled as a tuple with the dtype first, or as fields."""
    found = properties.get("dtype") if isinstance(properties, UnknownInstance) else None
    if found is None and isinstance(properties, UnknownInstance):
        state = properties.get("state")
        found = state[0] if isinstance(state, tuple) and state else None
    if text(found) not in DTYPES:
        raise FormatError(f"unknown dtype {found!r}")
    return text(found)


def _place(places: dict[_Key, UnknownInstance], key: _Key) -> UnknownInstance:
    found = places.get(key)
    if found is None:
        at = "" if key[1] is None else f" at {list(key[1])}"
        raise FormatError(f"no file is listed for {key[0]!r}{at}")
    if found.get("transform_descriptors"):
        raise FormatError(f"{key[0]!r} is stored by an extension (compressed?)")
    return found


def section_range(info: UnknownInstance) -> ArchiveRange:
    """The file of a value, and the byte range of its archive."""
    path, offset, length = str(info["relative_path"]), int(info["offset"]), int(info["length"])
    if offset < 0 or length < 0:
        raise FormatError(f"bytes {offset}..{offset + length} of {path!r}")
    return path, offset, offset + length


def section_tree(
    store: Store, info: UnknownInstance, more: More | None = None, *, lenient: bool = False
) -> Any:
    """Read an archive inside a file, with tensors as `TensorRef`s; `lenient` as for `unpickle`."""
    path, start, stop = section_range(info)
    return read_file(store, path, more, lenient=lenient, bounds=(start, stop))


def _where(
    store: Store, name: str, info: UnknownInstance, sizes: tuple[int, ...], dtype: str
) -> FilePlace | Strided:
    """Return where the bytes of one chunk begin in its file; `Strided` if not row-major."""
    found = section_tree(store, info)
    if not isinstance(found, TensorRef) or (found.shape, found.dtype) != (sizes, dtype):
        raise FormatError(
            f"{name!r}: a {dtype} part of shape {sizes} was expected, found {kind_text(found)}",
            key=str(info["relative_path"]),
        )
    if not found.contiguous:
        return Strided(found.path, found.offset, dtype, found.shape, found.strides)
    return found.path, found.offset


def _values(store: Store, objects: dict[str, UnknownInstance]) -> dict[str, Any]:
    """Values other than tensors, by flat name, without those that hold unknown objects."""
    found, strange = {}, {}
    for flat, info in objects.items():
        value = section_tree(store, info, PLAIN_GLOBALS, lenient=True)
        path = str(info["relative_path"])
        name = unknown_in(value, path, set())
        if name is None:
            found[flat] = _encoded(value, path)
        elif is_needed(flat.split(".")):
            raise not_data(name, path)
        else:
            strange[flat] = name
    warn_left_out(strange, [store.url])
    return found


def _encoded(value: Any, path: str) -> Any:
    """Encode a value for extras, without its tensors."""

    def other(leaf: Any, where: str) -> Any:
        if isinstance(leaf, UnknownInstance):
            return extras.encode(plain_value(leaf), other, where, where.count(".") + 1)
        raise FormatError(f"a value with a {type(leaf).__name__} at {where or 'its top'}", key=path)

    try:
        return extras.encode(value, other)
    except FormatError as error:
        error.key = error.key or path
        raise


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise FormatError("malformed metadata")
    return value
