"""What a rank keeps for its group: copies or parity, made of ranges of the others' images."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from holdfast.codec.stripes import Contribution, Stripes
from holdfast.errors import NotFound, UsageError
from holdfast.memory.node import words as w
from holdfast.memory.node.fetch import Peer
from holdfast.memory.node.machine import Slot
from holdfast.memory.node.segment import Segments, mapped, put_table, with_table
from holdfast.memory.node.sources import LocalImage, RemoteImage, Verified, room
from holdfast.store import LocalStore, Reader

WINDOW_BYTES = 8 << 20
"""Read at a time, which bounds memory."""


def guard_bytes(stripes: Stripes) -> int:
    """Bytes of what each member keeps, with its digest table."""
    return with_table(stripes.kept_bytes)


def protect(
    segments: Segments, agent: str, names: Mapping[int, str], slot: Slot, order: w.Protect
) -> str:
    """Fill a guard; the digest of its table.  Blocks; what is read of others is verified.

    `names`: files of this agent that hold images of the group, by rank.
    """
    lengths = tuple(x.bytes for x in order.members)
    stripes = Stripes(lengths, order.num_data, order.num_parity)
    if slot.bytes < guard_bytes(stripes):
        raise UsageError(f"{guard_bytes(stripes)} bytes to keep, in a slot of {slot.bytes}")
    me = [x.rank for x in order.members].index(order.rank)
    memory = memoryview(bytearray(room(WINDOW_BYTES)))
    opened: dict[int, tuple[Reader, Verified]] = {}
    try:
        with mapped(segments.path(order.job, slot.name), slot.bytes) as view:
            for c in stripes.contributions(me):
                if c.source.member not in opened:
                    member = order.members[c.source.member]
                    opened[c.source.member] = _open(segments, agent, names, order, member)
                _add(stripes, view, c, opened[c.source.member][1], memory)
            return put_table(view, stripes.kept_bytes)
    finally:
        for reader, _ in opened.values():
            reader.close()


def _open(
    segments: Segments, agent: str, names: Mapping[int, str], order: w.Protect, member: w.Member
) -> tuple[Reader, Verified]:
    key = f"{order.attempt}/r{member.rank:05d}.safetensors"
    reader: Reader
    if member.card.agent == agent:
        if member.rank not in names:
            raise NotFound("the image is not here", key=key)
        reader = LocalImage(LocalStore(segments.jobs / order.job).open(names[member.rank]))
    else:
        path = f"/v1/{order.job}/{order.attempt}/share/{member.rank}"
        reader = RemoteImage(Peer(member.card.address, member.card.token), path, key)
    whole = Verified(reader, size=member.bytes, table=member.table, digest=member.digest, key=key)
    return reader, whole


def _add(
    stripes: Stripes, view: memoryview, c: Contribution, source: Verified, memory: memoryview
) -> None:
    """One contribution, window by window."""
    unit = stripes.code.unit_bytes
    window = max(WINDOW_BYTES // unit, 1) * unit
    for at in range(0, stripes.block_bytes, window):
        stop = min(at + window, stripes.block_bytes)
        first, last = (min(c.source.start + x, c.source.stop) for x in (at, stop))
        data = source.read(first, last, memory)
        row = np.frombuffer(view, np.uint8)[c.at + at : c.at + stop]
        block = np.frombuffer(data, np.uint8)
        stripes.code.accumulate({c.row: row}, c.index, block, fresh=c.index == 0)
