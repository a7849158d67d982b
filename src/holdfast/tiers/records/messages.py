"""Messages between a training process and its writer: msgpack, each with its length before it."""

from __future__ import annotations

import socket
from typing import Any

import msgspec

from holdfast.base.wire import WireError, decode_msgpack
from holdfast.tiers.records.segment import Record, SegmentHeader


class Open(msgspec.Struct, frozen=True, tag=True):
    """To the writer: an order, which states what to write where, from which memory.  The descriptor of the
    memory comes with it.  Records that still wait belong to the order before."""

    root: str
    header: SegmentHeader
    slots: int
    slot_bytes: int
    batch: int


class Put(msgspec.Struct, frozen=True, tag=True):
    """To the writer: a slot holds a record."""

    slot: int
    record: Record
    leave_bytes: int = 0
    """Bytes that must stay free on a local disk: room for a full save."""


class Flush(msgspec.Struct, frozen=True, tag=True):
    """To the writer: write all records, even if they are no whole batch."""


class RecordsWrote(msgspec.Struct, frozen=True):
    """From the writer: these slots are free; with an `error`, their records were not written."""

    slots: tuple[int, ...]
    last: int = 0
    """The last of their steps."""
    bytes: int = 0
    seconds: float = 0.0
    fixed_s: float = 0.0
    """The part of `seconds` for opening and finishing the file, which does not depend on its size."""
    error: WireError | None = None


TO_WRITER = Open | Put | Flush


HEAD_BYTES = 8
"""Bytes of the length before each message."""


def framed(message: Any) -> bytes:
    """Return the bytes of a message as they are sent."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEAD_BYTES, "little") + body


def send(line: socket.socket, message: Any) -> None:
    line.sendall(framed(message))


def receive(line: socket.socket, kind: Any) -> tuple[Any, int | None]:
    """Receive a message, and the descriptor that came with it; None when the other end is gone."""
    head, fds, _, _ = socket.recv_fds(line, HEAD_BYTES, 1)
    while head and len(head) < HEAD_BYTES:
        head += line.recv(HEAD_BYTES - len(head))
    body = bytearray(int.from_bytes(head, "little"))
    view, at = memoryview(body), 0
    while head and at < len(body):
        n = line.recv_into(view[at:])
        if not n:
            head = b""
        at += n
    if not head:
        return None, None
    return decode_msgpack(body, kind), (fds[0] if fds else None)
