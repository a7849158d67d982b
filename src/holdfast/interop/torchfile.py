"""Files of torch.save, without torch: the tree of values, and where each tensor's bytes lie.

A file is a zip archive whose members are stored and not compressed: `data.pkl`, the tree, and one member
`data/<key>` for each storage.  So a tensor is a range of the file.  The same archive stands in the middle
of a larger file in DCP's format.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from dataclasses import dataclass
from typing import Any

from holdfast.errors import Corrupt, FormatError
from holdfast.format.dtypes import DTYPES
from holdfast.interop.unpickle import Table, unpickle
from holdfast.store import Reader

MAX_TREE_BYTES = 1 << 30


@dataclass(frozen=True)
class TensorRef:
    """A tensor in a file: `offset` in bytes from the file's start, `strides` in elements."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    path: str
    offset: int

    @property
    def contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True)
class _Storage:
    dtype: str | None
    start: int
    bytes: int
    path: str


class Section:
    """A part of an object, as the file that `zipfile` wants."""

    def __init__(self, reader: Reader, start: int, stop: int) -> None:
        self._reader = reader
        self.start = start
        self._size = stop - start
        self._at = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._size - self._at, 0)
        into = bytearray(left if size < 0 else min(size, left))
        if into:
            self._reader.read(self.start + self._at, memoryview(into))
        self._at += len(into)
        return bytes(into)


STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128", "ComplexFloatStorage": "complex64",
    "UntypedStorage": None,
}  # fmt: skip


class _StorageKind:
    """A storage class, on its way into a persistent id."""

    def __init__(self, dtype: str | None) -> None:
        self.dtype = dtype


def read_tree(section: Section, path: str, more: Table | None = None) -> Any:
    """What torch.save was given, tensors as `TensorRef`s.  FormatError or Corrupt if it is unsound."""
    try:
        archive = zipfile.ZipFile(section)
        members = {m.filename: m for m in archive.infolist()}
        top = next((n[: -len("data.pkl")] for n in members if n.endswith("data.pkl")), None)
        if top is None:
            raise FormatError("not a file of torch.save: it has no data.pkl", key=path)
        tree = members[top + "data.pkl"]
        if tree.file_size > MAX_TREE_BYTES:
            raise FormatError(f"data.pkl of {tree.file_size} bytes", key=path)
        data = archive.read(tree)
        order = top + "byteorder"
        if order in members and (members[order].file_size > 6 or archive.read(order) != b"little"):
            raise FormatError("a file of a big-endian machine", key=path)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, struct.error, EOFError,
            RuntimeError, ValueError) as error:  # fmt: skip
        raise Corrupt(f"not a whole zip archive of torch.save: {error}", key=path) from None

    def storage(pid: Any) -> _Storage:
        tag, kind, key, _, _ = pid
        if tag != "storage" or not isinstance(kind, _StorageKind):
            raise FormatError(f"unknown kind of reference: {tag!r}", key=path)
        member = members.get(f"{top}data/{key}")
        if member is None:
            raise Corrupt(f"storage {key!r} is missing", key=path)
        if member.compress_type != zipfile.ZIP_STORED:
            raise FormatError(f"storage {key!r} is compressed", key=path)
        return _Storage(kind.dtype, _data_start(section, member), member.file_size, path)

    return unpickle(data, table() | dict(more or {}), storage)


def _data_start(section: Section, member: zipfile.ZipInfo) -> int:
    """Where a member's bytes begin, from the start of the file that the section is of."""
    section.seek(member.header_offset)
    head = section.read(30)
    if len(head) < 30 or head[:4] != b"PK\x03\x04":
        raise Corrupt(f"member {member.filename!r} has no header")
    name, extra = struct.unpack("<HH", head[26:30])
    return section.start + member.header_offset + 30 + int(name) + int(extra)


def _rebuild(
    storage: Any, offset: Any, shape: Any, strides: Any, *_: Any, dtype: str | None = None
) -> TensorRef:
    if not isinstance(storage, _Storage):
        raise FormatError("a tensor of no storage")
    kind = dtype or storage.dtype
    if kind is None or kind not in DTYPES:
        raise FormatError(f"a tensor of unknown type {kind!r}")
    size = DTYPES[kind].bytes
    shape, strides = tuple(shape), tuple(strides)
    sound = len(shape) == len(strides) and all(
        isinstance(n, int) and 0 <= n < 1 << 60 for n in (*shape, *strides, offset)
    )
    if not sound:
        raise FormatError(f"a tensor of shape {shape} and strides {strides}")
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides)) + 1 if all(shape) else offset
    if last * size > storage.bytes:
        raise Corrupt(
            f"a tensor ends at byte {last * size} of a storage of {storage.bytes}", key=storage.path
        )
    return TensorRef(kind, shape, strides, storage.path, storage.start + offset * size)


def _rebuild_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, *_: Any
) -> TensorRef:
    return _rebuild(storage, offset, shape, strides, dtype=dtype)


def table() -> dict[tuple[str, str], Any]:
    """The globals of plain torch.save files."""
    known: dict[tuple[str, str], Any] = {("torch", name): name for name in DTYPES}
    known |= {("torch", name): _StorageKind(dtype) for name, dtype in STORAGES.items()}
    known["torch.storage", "UntypedStorage"] = _StorageKind(None)
    return known | {
        ("collections", "OrderedDict"): dict,
        ("torch", "Size"): lambda *sizes: tuple(*sizes),
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
        ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
        ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
        ("torch.serialization", "_get_layout"): lambda name: name,
        ("torch", "device"): lambda *args: ":".join(map(str, args)),
        ("pathlib", "PosixPath"): lambda *parts: "/".join(map(str, parts)),
        ("builtins", "set"): lambda *items: set(*items),
        ("builtins", "complex"): lambda *parts: complex(*parts),
    }
