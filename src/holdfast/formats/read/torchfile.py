"""Files of torch.save, read without torch: the tree of values, and the place of each tensor's bytes.

A file is a zip archive whose members are stored and not compressed: `data.pkl`, the tree, and one member
`data/<key>` for each storage.  So a tensor is a range of the file.  DCP puts such archives inside larger
files.
"""

from __future__ import annotations

import struct
import threading
import zipfile
import zlib
from collections import ChainMap
from collections.abc import MutableMapping
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from holdfast.base.errors import Corrupt, FormatError, HoldfastError
from holdfast.base.threads import in_threads
from holdfast.core.format.dtypes import DTYPES
from holdfast.core.layout import Box, Fragment, whole
from holdfast.core.layout.box import is_row_major
from holdfast.core.store import Reader, Store
from holdfast.core.store.contract import reads_of
from holdfast.formats.read.foreign import Foreign, StoredPart
from holdfast.formats.read.sections import Locator, at_place
from holdfast.formats.read.unpickle import UnknownInstance, new_dict, new_set, unpickle

More = MutableMapping[tuple[str, str], Any]
"""Further globals that a file may name; they take precedence over `torch_globals`."""

_MAX_TREE_BYTES = 1 << 29
_MAX_PARTS = 1 << 12
"""Most parts of an expanded tensor."""


@dataclass(frozen=True)
class TensorRef:
    """A tensor in a file: `offset` in bytes from the file's start, `strides` in elements."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    path: str
    offset: int
    content: tuple[int, int, int] | None = None
    """(CRC-32 of its storage, bytes of the storage, its first byte there); None without CRCs."""

    @property
    def contiguous(self) -> bool:
        return is_row_major(self.shape, self.strides)

    @property
    def source(self) -> Locator:
        """The place of its first element, for a `StoredPart`."""
        return at_place(self.path, self.offset)

    def foreign(self, name: str, state: str) -> Foreign:
        """The tensor as one of a checkpoint, stored whole, in any order of dims."""
        return Foreign(name, self.dtype, self.shape, state, self.parts())

    def parts(self, box: Box | None = None) -> tuple[StoredPart, ...]:
        """Return the stored parts of the tensor; `box`: its place in a larger tensor.

        A dim of stride 0 (`expand`) repeats its elements, and gets one part per index.
        """
        box = whole(self.shape) if box is None else box
        if not box.size:
            return ()
        again = [range(n) if not s and n > 1 else (0,) for n, s in zip(self.shape, self.strides)]
        if prod(map(len, again)) > _MAX_PARTS:
            raise FormatError(
                f"a tensor of shape {self.shape} and strides {self.strides}: expanded",
                key=self.path,
                hint="save tensor.contiguous()",
            )
        wide = [n for n, s in zip(self.shape, self.strides) if s or n == 1]
        if len(wide) == len(self.shape):
            return (StoredPart(Fragment(box, 0, self.strides), (self.source,), self.path),)
        return tuple(
            StoredPart(
                Fragment(_one_of(box, at, again), 0, self.strides), (self.source,), self.path
            )
            for at in product(*again)
        )


def _one_of(box: Box, at: tuple[int, ...], again: list[Any]) -> Box:
    """Return `box` at one index of the dims that repeat."""
    start = tuple(a + i for a, i in zip(box.start, at))
    stops = zip(start, box.stop, again)
    return Box(start, tuple(a + 1 if len(r) > 1 else b for a, b, r in stops))


@dataclass(frozen=True)
class Storage:
    dtype: str | None
    start: int
    bytes: int
    path: str
    crc: int | None = None


def kind_text(value: Any) -> str:
    """Describe, for a message, a value that is not what it should be."""
    known = isinstance(value, TensorRef)
    return f"{value.dtype} of shape {value.shape}" if known else f"a {type(value).__name__}"


_AHEAD_BYTES = 64 << 10
_AHEAD_BLOCKS = 32


class _Ahead:
    """A reader that reads ahead in blocks and caches recent blocks.

    Reading an archive takes many small reads, each of which is a request in a bucket.
    """

    def __init__(self, reader: Reader, size: int) -> None:
        self._reader = reader
        self._size = size
        self._lock = threading.Lock()
        self._blocks: dict[int, bytearray] = {}

    def read(self, offset: int, into: memoryview) -> None:
        """See `Reader.read`."""
        if len(into) >= _AHEAD_BYTES or offset + len(into) > self._size:
            self._reader.read(offset, into)
            return
        at = offset
        while at < offset + len(into):
            number, skip = divmod(at, _AHEAD_BYTES)
            part = memoryview(self._block(number))[skip : skip + offset + len(into) - at]
            into[at - offset : at - offset + len(part)] = part
            at += len(part)

    def _block(self, number: int) -> bytearray:
        with self._lock:
            found = self._blocks.pop(number, None)
            if found is not None:
                self._blocks[number] = found
                return found
        start = number * _AHEAD_BYTES
        found = bytearray(min(_AHEAD_BYTES, self._size - start))
        self._reader.read(start, memoryview(found))
        with self._lock:
            self._blocks[number] = found
            while len(self._blocks) > _AHEAD_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
        return found

    def close(self) -> None:
        """See `Reader.close`."""
        self._reader.close()


class PartFile:
    """A range of an object as a file object for `zipfile`."""

    threads = 1
    """Number of threads that may read at the same time, each with a `part` of its own."""

    @classmethod
    def of(cls, store: Store, key: str, bounds: tuple[int, int] | None = None) -> PartFile:
        """Open an object, or a range of it; the caller closes it."""
        threads, reader = reads_of(store).threads, store.open(key)
        try:
            size = store.size(key) if threads or bounds is None else 0
        except BaseException:
            reader.close()
            raise
        found = cls(_Ahead(reader, size) if threads else reader, *(bounds or (0, size)))
        found.threads = threads or 1
        return found

    def __init__(self, reader: Reader, start: int, stop: int) -> None:
        self._reader = reader
        self.start = start
        self.bytes = stop - start
        self._at = 0

    def part(self, bounds: tuple[int, int]) -> PartFile:
        """A range of the same object, with a position of its own (for a thread)."""
        return PartFile(self._reader, *bounds)

    def close(self) -> None:
        self._reader.close()

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self.bytes)[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self.bytes - self._at, 0)
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
    """A storage class inside a persistent id."""

    def __init__(self, dtype: str | None) -> None:
        self.dtype = dtype


_RawName = bytes


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """A member of an archive: the place of its header in the section, its length and its CRC-32."""

    name: str
    header: int
    length: int
    crc: int
    recorded: _RawName
    """Its name in the header."""


@dataclass(frozen=True)
class Archive:
    """The members of a torch.save file, by name without their common folder."""

    members: dict[str, ArchiveMember]

    @property
    def has_crc(self) -> bool:
        """True if torch wrote checksums (`torch.serialization.set_crc32_options`); 0 stands for none."""
        return any(m.crc for m in self.members.values())


_TREE = "data.pkl"
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
"""First bytes of files of torch before 1.6."""
_RESOLVE = "save tensor.resolve_conj().resolve_neg()"
RESAVE = "convert it where it can be trusted: torch.save(torch.load(old), new)"


def read_archive(section: PartFile, path: str) -> Archive:
    """Read the members of a torch.save file.  Corrupt if incomplete; FormatError for another format."""
    section.seek(0)
    head = section.read(len(_LEGACY))
    if head == _LEGACY:
        raise FormatError(
            "a file of torch before 1.6, which cannot be read lazily", key=path, hint=RESAVE
        )
    if head[:2] != b"PK":
        raise FormatError(
            "not a file of torch.save: it is no zip archive",
            key=path,
            hint="was it copied whole?  files of torch before 1.6 have to be converted: " + RESAVE,
        )
    try:
        infos = zipfile.ZipFile(section).infolist()
        names = (info.filename for info in infos)
        top = next((n[: -len(_TREE)] for n in names if n.rpartition("/")[2] == _TREE), None)
        if top is None:
            raise FormatError("not a file of torch.save: it has no data.pkl", key=path)
        members = [_member(section, info, top, path) for info in infos]
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, struct.error, EOFError,
            RuntimeError, ValueError) as error:  # fmt: skip
        if isinstance(error, HoldfastError):
            raise
        raise Corrupt(f"not a whole zip archive of torch.save: {error}", key=path) from None
    found = {m.name: m for m in members}
    if len(found) != len(members):
        raise Corrupt("two members of the archive have one name", key=path)
    return Archive(found)


def _member(section: PartFile, info: zipfile.ZipInfo, top: str, path: str) -> ArchiveMember:
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        kind = "encrypted" if info.flag_bits & 1 else "compressed"
        raise FormatError(f"member {info.filename!r} is {kind}", key=path, hint=RESAVE)
    if info.file_size < 0 or info.file_size != info.compress_size:
        raise Corrupt(f"member {info.filename!r} has two lengths", key=path)
    recorded = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
    name, at = info.filename.removeprefix(top), info.header_offset
    return ArchiveMember(name, at, info.file_size, info.CRC, recorded)


def start_of(section: PartFile, member: ArchiveMember, path: str) -> int:
    """Return the first byte of a member's data, counted from the start of the section's file."""
    section.seek(member.header)
    head = section.read(30 + len(member.recorded))
    if len(head) < 30 or head[:4] != b"PK\x03\x04":
        raise Corrupt(f"member {member.name!r} has no header", key=path)
    if head[26:28] != len(member.recorded).to_bytes(2, "little") or head[30:] != member.recorded:
        raise Corrupt(f"the header of member {member.name!r} is that of another", key=path)
    name, extra = struct.unpack("<HH", head[26:30])
    start = section.start + member.header + 30 + int(name) + int(extra)
    if start + member.length > section.start + section.bytes:
        raise Corrupt(f"member {member.name!r} reaches past the end of the file", key=path)
    return start


def read_tree(
    section: PartFile, path: str, more: More | None = None, *, lenient: bool = False
) -> Any:
    """Return the saved value, tensors as `TensorRef`s; `lenient`: see `unpickle`.  FormatError; Corrupt."""
    archive = read_archive(section, path)
    data = _read_member(section, archive, _TREE, path)
    if "byteorder" in archive.members:
        if _read_member(section, archive, "byteorder", path, most=6) != b"little":
            raise FormatError("a file of a big-endian machine", key=path)

    starts = _starts(section, archive, path)

    def storage(pid: Any) -> Storage:
        tag, kind, key, _, _ = pid
        if tag != "storage" or not isinstance(kind, _StorageKind):
            raise FormatError(f"unknown kind of reference: {tag!r}", key=path)
        member = archive.members.get(f"data/{key}")
        if member is None:
            raise Corrupt(f"storage {key!r} is missing", key=path)
        start = starts.get(member)
        if start is None:
            start = starts[member] = start_of(section, member, path)
        crc = member.crc if archive.has_crc else None
        return Storage(kind.dtype, start, member.length, path, crc)

    try:
        return unpickle(data, ChainMap(more or {}, torch_globals()), storage, lenient=lenient)
    except FormatError as error:
        error.key = error.key or path
        raise


def _starts(section: PartFile, archive: Archive, path: str) -> dict[ArchiveMember, int]:
    """Read the places of storages in parallel, if reading them one by one is slow.  Faulty members are left
    out; their errors are raised when they are needed."""
    found: dict[ArchiveMember, int] = {}

    def one(member: ArchiveMember) -> None:
        with suppress(FormatError):
            whole = section.start, section.start + section.bytes
            found[member] = start_of(section.part(whole), member, path)

    if section.threads > 1:
        storages = [m for m in archive.members.values() if m.name.startswith("data/")]
        in_threads(one, storages, section.threads)
    return found


def read_file(
    store: Store,
    path: str,
    more: More | None = None,
    *,
    lenient: bool = False,
    bounds: tuple[int, int] | None = None,
) -> Any:
    """Read a file of torch.save, or one in a range of an object, as `read_tree`."""
    with closing(PartFile.of(store, path, bounds)) as section:
        return read_tree(section, path, more, lenient=lenient)


def _read_member(
    section: PartFile, archive: Archive, name: str, path: str, most: int = _MAX_TREE_BYTES
) -> bytes:
    member = archive.members[name]
    if member.length > most:
        raise FormatError(f"{name} of {member.length} bytes", key=path)
    start = start_of(section, member, path)
    section.seek(start - section.start)
    data = section.read(member.length)
    if archive.has_crc:
        check_crc(member, start, zlib.crc32(data), path)
    return data


def check_crc(member: ArchiveMember, start: int, found: int, path: str) -> None:
    """Corrupt if `found` is not a member's CRC-32."""
    if found != member.crc:
        raise Corrupt(
            f"{member.name} differs from what was written: CRC-32 {found:08x}, "
            f"expected {member.crc:08x}",
            key=path,
            start=start,
            stop=start + member.length,
            expected=f"{member.crc:08x}",
            found=f"{found:08x}",
        )


def rebuild_parameter(data: Any, *_: Any) -> Any:
    """`torch._utils._rebuild_parameter`."""
    return data


def rebuild(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    grad: Any = None,
    hooks: Any = None,
    metadata: Any = None,
    *,
    dtype: str | None = None,
) -> TensorRef:
    """`torch._utils._rebuild_tensor_v2`."""
    if metadata:
        raise FormatError(
            f"a tensor with {metadata}: its values are not what is stored", hint=_RESOLVE
        )
    if not isinstance(storage, Storage):
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
    at = offset * size
    content = None if storage.crc is None else (storage.crc, storage.bytes, at)
    return TensorRef(kind, shape, strides, storage.path, storage.start + at, content)


def _rebuild_v3(*args: Any) -> TensorRef:
    """`torch._utils._rebuild_tensor_v3`, whose seventh argument is a dtype."""
    *before, dtype = args[:7]
    return rebuild(*before, *args[7:], dtype=dtype)


def enumerated(owner: Any, name: Any) -> UnknownInstance:
    """A member of an enumeration as pickled by Python 3.11.0 to 3.11.3; looks nothing up."""
    if not isinstance(owner, UnknownInstance) or not isinstance(name, str):
        raise FormatError("an attribute of something that is no class")
    return type(owner)(f"{owner.name}.{name}")


def torch_globals() -> dict[tuple[str, str], Any]:
    """The globals of plain torch.save files."""
    known: dict[tuple[str, str], Any] = {("torch", name): name for name in DTYPES}
    known |= {("torch", name): _StorageKind(dtype) for name, dtype in STORAGES.items()}
    known["torch.storage", "UntypedStorage"] = _StorageKind(None)
    return known | {
        ("collections", "OrderedDict"): new_dict,
        ("torch", "Size"): lambda *sizes: tuple(*sizes),
        ("torch._utils", "_rebuild_tensor_v2"): rebuild,
        ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
        ("torch._utils", "_rebuild_parameter"): rebuild_parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): rebuild_parameter,
        ("torch.serialization", "_get_layout"): lambda name: name,
        ("torch", "device"): lambda *args: ":".join(map(str, args)),
        ("pathlib", "PosixPath"): lambda *parts: "/".join(map(str, parts)),
        ("builtins", "set"): new_set,
        ("builtins", "complex"): lambda *parts: complex(*parts),
        **dict.fromkeys((("builtins", "getattr"), ("__builtin__", "getattr")), enumerated),
    }
