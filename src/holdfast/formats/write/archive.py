"""Plans of torch.save archives: the places of headers and tensors' bytes.

An archive is a zip file with stored members: `data.pkl`, and `data/<n>` per storage.  Headers in front of
members leave the CRC to the descriptor after them, as torch's own do, so an archive can be written from
front to back; `CrcSeal` adds the CRCs.  An archive may begin anywhere in a file (DCP puts many in one).
"""

from __future__ import annotations

import io
import struct
import zlib
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from holdfast.core.checkpoint.outfiles import ElementSpan, Literal, Outfile
from holdfast.core.format.dtypes import DTYPES
from holdfast.core.layout import row_major
from holdfast.formats.read.torchfile import STORAGES
from holdfast.formats.write.pickling import (
    Persistent,
    PickledCall,
    PickledGlobal,
    dumps,
    pickled_call,
)

_ALIGN = 64
_FLAGS = 0x0808  # names are UTF-8; CRC and sizes follow the data
_LARGE = 0xFFFFFFFF
_KINDS = {dtype: name for name, dtype in STORAGES.items() if dtype}


@dataclass(frozen=True, slots=True)
class ArchivedTensor:
    """A tensor for an archive: elements `first..` of tensor number `number` of the source, or `data`.

    Tensors with one `key` share their bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    number: int = -1
    first: int = 0
    data: bytes | None = None
    key: Any = None

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].bytes


@dataclass
class ArchivePlan:
    """A file under construction: its literals, spans and CRCs, from front to back."""

    at: int = 0
    literals: list[Literal] = field(default_factory=list)
    spans: list[ElementSpan] = field(default_factory=list)
    crcs: list[Crc] = field(default_factory=list)

    def put(self, data: bytes) -> None:
        self.literals.append(Literal(self.at, data))
        self.at += len(data)

    def align(self) -> None:
        self.at += -self.at % _ALIGN

    def outfile(self, path: str) -> Outfile:
        crcs = tuple(self.crcs)
        seal = (lambda: CrcSeal(crcs)) if crcs else None
        return Outfile(path, self.at, tuple(self.literals), tuple(self.spans), seal)


@dataclass(frozen=True, slots=True)
class Crc:
    """The CRC-32 of bytes `start..stop` of a file, to be written at each of the later `places`."""

    start: int
    stop: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Member:
    name: bytes
    header_at: int
    size: int
    crc: int | None
    data_at: int
    descriptor_at: int


def add_archive(plan: ArchivePlan, tree: Any) -> None:
    """Append the archive of torch.save(tree); `ArchivedTensor`s in the tree are read from the source.

    Begins at a multiple of 64, and so do tensors' bytes.
    """
    plan.align()
    begin, storages = plan.at, _Storages()
    data = dumps(storages.replace(tree))
    members = [
        _literal(plan, begin, "archive/data.pkl", data),
        _literal(plan, begin, "archive/byteorder", b"little"),
    ]
    for number, tensor in enumerate(storages.found):
        members.append(_storage(plan, begin, f"archive/data/{number}", tensor))
    members.append(_literal(plan, begin, "archive/version", b"3\n"))
    _central(plan, begin, members)


def for_torch(value: Any) -> Any:
    """A decoded extra with arrays as tensors, numpy's scalars as Python's, and files in memory as their
    bytes, which `torch.load` takes by itself."""
    if isinstance(value, np.ndarray):
        return ArchivedTensor(
            str(value.dtype), value.shape, data=np.ascontiguousarray(value).tobytes()
        )
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, io.BytesIO):
        return value.getvalue()
    if isinstance(value, dict):
        return {for_torch(k): for_torch(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, deque)):
        kind = tuple if isinstance(value, tuple) else list
        return kind(for_torch(v) for v in value)
    return value


class _Storages:
    """Replaces tensors in a tree by pickled calls that rebuild them, one storage each."""

    def __init__(self) -> None:
        self.found: list[ArchivedTensor] = []
        self._known: dict[Any, int] = {}

    def replace(self, value: Any) -> Any:
        if isinstance(value, ArchivedTensor):
            return self._rebuild(value)
        if isinstance(value, dict):
            return {k: self.replace(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.replace(v) for v in value)
        return value

    def _rebuild(self, t: ArchivedTensor) -> PickledCall:
        known = self._known.get(t.key) if t.key is not None else None
        number = len(self.found) if known is None else known
        if known is None:
            self.found.append(t)
            if t.key is not None:
                self._known[t.key] = number
        hooks = pickled_call("collections", "OrderedDict")
        rest = (0, t.shape, row_major(t.shape), False, hooks)
        kind = _KINDS.get(t.dtype)
        if kind is not None:
            storage = ("storage", PickledGlobal("torch", kind), str(number), "cpu", prod(t.shape))
            return pickled_call("torch._utils", "_rebuild_tensor_v2", Persistent(storage), *rest)
        untyped = PickledGlobal("torch.storage", "UntypedStorage")
        storage = ("storage", untyped, str(number), "cpu", t.bytes)
        dtype = PickledGlobal("torch", t.dtype)
        return pickled_call("torch._utils", "_rebuild_tensor_v3", Persistent(storage), *rest, dtype)


def _literal(plan: ArchivePlan, begin: int, name: str, data: bytes) -> _Member:
    header_at = _header(plan, name, len(data))
    at = plan.at
    plan.put(data)
    return _ended(plan, begin, name, header_at, at, zlib.crc32(data))


def _storage(plan: ArchivePlan, begin: int, name: str, tensor: ArchivedTensor) -> _Member:
    if tensor.data is not None:
        return _literal(plan, begin, name, tensor.data)
    header_at = _header(plan, name, tensor.bytes)
    at, last = plan.at, tensor.first + prod(tensor.shape)
    if tensor.bytes:
        plan.spans.append(ElementSpan(at, tensor.number, tensor.first, last, tensor.dtype))
    plan.at += tensor.bytes
    return _ended(plan, begin, name, header_at, at, None)


def _header(plan: ArchivePlan, name: str, size: int) -> int:
    """The header in front of a member, padded so that data begins aligned; returns its place."""
    at, raw = plan.at, name.encode()
    large = struct.pack("<HHQQ", 1, 16, size, size) if size >= _LARGE else b""
    size32 = _LARGE if large else 0
    padding = -(at + 30 + len(raw) + len(large) + 4) % _ALIGN
    extra = large + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    fields = (45 if large else 20, _FLAGS, 0, 0, 0x21, 0, size32, size32, len(raw), len(extra))
    plan.put(struct.pack("<4s5H3I2H", b"PK\x03\x04", *fields) + raw + extra)
    return at


def _ended(
    plan: ArchivePlan, begin: int, name: str, header_at: int, data_at: int, crc: int | None
) -> _Member:
    """Append the descriptor after a member's data."""
    size, at = plan.at - data_at, plan.at
    form = "<4sIQQ" if size >= _LARGE else "<4sIII"
    plan.put(struct.pack(form, b"PK\x07\x08", crc or 0, size, size))
    return _Member(name.encode(), header_at - begin, size, crc, data_at, at)


def _central(plan: ArchivePlan, begin: int, members: Sequence[_Member]) -> None:
    """The directory at the end of an archive; offsets count from the archive's first byte."""
    start = plan.at
    for m in members:
        large = m.size >= _LARGE or m.header_at >= _LARGE
        extra = struct.pack("<HHQQQ", 1, 24, m.size, m.size, m.header_at) if large else b""
        size, offset = (_LARGE, _LARGE) if large else (m.size, m.header_at)
        if m.crc is None:
            plan.crcs.append(
                Crc(m.data_at, m.data_at + m.size, (m.descriptor_at + 4, plan.at + 16))
            )
        fields = (45 if large else 20, 45 if large else 20, _FLAGS, 0, 0, 0x21)
        sizes = (m.crc or 0, size, size, len(m.name), len(extra), 0, 0, 0, 0, offset)
        plan.put(struct.pack("<4s6H3I5H2I", b"PK\x01\x02", *fields, *sizes) + m.name + extra)
    length, offset, count = plan.at - start, start - begin, len(members)
    if offset >= _LARGE or count >= 0xFFFF or length >= _LARGE:
        end = plan.at - begin
        plan.put(
            struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, offset)
            + struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
        )
    tail = (min(count, 0xFFFF), min(count, 0xFFFF), min(length, _LARGE), min(offset, _LARGE), 0)
    plan.put(struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, *tail))


class CrcSeal:
    """A seal that computes CRCs of the written bytes and inserts them."""

    def __init__(self, crcs: Sequence[Crc]) -> None:
        self._crcs = sorted((c for c in crcs), key=lambda c: (c.start, c.stop))
        self._stops = [c.stop for c in self._crcs]
        self._starts = [c.start for c in self._crcs]
        self._running: dict[int, int] = {}
        self._places = sorted((at, i) for i, c in enumerate(self._crcs) for at in c.places)
        self._ats = [at for at, _ in self._places]

    def __call__(self, start: int, block: memoryview) -> None:
        stop = start + len(block)
        lo, hi = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        for i in range(lo, hi):
            crc = self._crcs[i]
            part = block[max(crc.start, start) - start : min(crc.stop, stop) - start]
            self._running[i] = zlib.crc32(part, self._running.get(i, 0))
        lo, hi = bisect_right(self._ats, start - 4), bisect_left(self._ats, stop)
        for at, i in self._places[lo:hi]:
            value = struct.pack("<I", self._running.get(i, 0))
            a, b = max(at, start), min(at + 4, stop)
            block[a - start : b - start] = value[a - at : b - at]
