"""A writer of pickles for torch.load and DCP, opcode by opcode, without importing anything.

holdfast's own format has no pickles, but torch.load and DCP read nothing else.  The protocol is 2, which
torch's restricted loader accepts:

    dumps({"param": Call(Global("torch._utils", "_rebuild_tensor_v2"), (...))})

A `PickledGlobal` is two strings, which are never looked up.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from holdfast.base.errors import UsageError


@dataclass(frozen=True, slots=True)
class PickledGlobal:
    """A class or function, by name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class PickledCall:
    """A call that the reader makes."""

    function: PickledGlobal
    args: tuple[Any, ...]


def pickled_call(module: str, name: str, *args: Any) -> PickledCall:
    """A call of a function by its name with these arguments."""
    return PickledCall(PickledGlobal(module, name), args)


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An instance made without `__init__` and given its state (usually a dict of fields)."""

    cls: PickledGlobal
    state: Any


@dataclass(frozen=True, slots=True)
class Persistent:
    """A reference that the reader resolves itself."""

    value: Any


class _Pickler:
    """Writes values depth first; repeated names and strings refer to the first by the memo."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self.memo: dict[Any, int] = {}

    def write(self, value: Any) -> None:
        match value:
            case None:
                self.out += b"N"
            case bool():
                self.out += b"\x88" if value else b"\x89"
            case int():
                self._int(value)
            case float():
                self.out += b"G" + struct.pack(">d", value)
            case str():
                self._once(value, lambda: b"X" + _sized(value.encode("utf-8", "surrogatepass")))
            case bytes():
                self.write(pickled_call("_codecs", "encode", value.decode("latin1"), "latin1"))
            case PickledGlobal():
                self._once(value, lambda: f"c{value.module}\n{value.name}\n".encode())
            case tuple():
                self._tuple(value)
            case list():
                self.out += b"]"
                self._marked(value, b"e")
            case dict():
                _check_keys(value)
                self.out += b"}"
                self._marked((x for pair in value.items() for x in pair), b"u")
            case PickledCall():
                self.write(value.function)
                self._tuple(value.args)
                self.out += b"R"
            case Instance():
                self.write(value.cls)
                self.out += b")\x81"
                self.write(value.state)
                self.out += b"b"
            case Persistent():
                self.write(value.value)
                self.out += b"Q"
            case set() | frozenset():
                _check_keys(value)
                self.write(pickled_call("builtins", "set", list(value)))
            case complex():
                self.write(pickled_call("builtins", "complex", value.real, value.imag))
            case _:
                raise UsageError(f"a {type(value).__name__} cannot be written for torch.load")

    def _once(self, value: Any, first: Any) -> None:
        known = self.memo.get(value)
        if known is not None:
            self.out += b"j" + struct.pack("<I", known)
            return
        self.out += first() + b"r" + struct.pack("<I", len(self.memo))
        self.memo[value] = len(self.memo)

    def _int(self, value: int) -> None:
        if -(1 << 31) <= value < 1 << 31:
            self.out += b"J" + struct.pack("<i", value)
            return
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        if len(data) > 255:
            raise UsageError(f"a number of {len(data)} bytes cannot be written for torch.load")
        self.out += b"\x8a" + bytes([len(data)]) + data

    def _tuple(self, items: tuple[Any, ...]) -> None:
        if len(items) > 3:
            self._marked(items, b"t")
            return
        for item in items:
            self.write(item)
        self.out += (b")", b"\x85", b"\x86", b"\x87")[len(items)]

    def _marked(self, items: Iterable[Any], end: bytes) -> None:
        self.out += b"("
        for item in items:
            self.write(item)
        self.out += end


def _check_keys(keys: Iterable[Any]) -> None:
    """UsageError for a frozenset as a key: torch.load only has sets, which cannot be keys."""
    for key in keys:
        if isinstance(key, frozenset):
            raise UsageError(f"a frozenset cannot be written for torch.load as a key: {key!r:.60}")
        if isinstance(key, tuple):
            _check_keys(key)


def _sized(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def dumps(value: Any) -> bytes:
    """Pickle plain values and this module's values.  UsageError for other types."""
    pickler = _Pickler()
    try:
        pickler.write(value)
    except RecursionError:
        raise UsageError("a value nested too deeply to be written for torch.load") from None
    return bytes(pickler.out + b".")
