"""Guards, which a rank keeps for its group: copies or parity, made of ranges of the others'
images."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from holdfast.base.errors import Corrupt, NotFound, SegmentLost, UsageError
from holdfast.core.codec.stripes import Contribution, Stripes
from holdfast.core.store import LocalStore, Reader
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.fetch import Peer
from holdfast.tiers.memory.node.messages import Slot
from holdfast.tiers.memory.node.segment import Segments, mapped, put_table, with_table
from holdfast.tiers.memory.node.sources import FileImage, RemoteImage, Verified, room
from holdfast.tiers.memory.node.throttle import Throttle

WINDOW_BYTES = 8 << 20
"""Bytes to read at a time, which bounds memory."""


def guard_bytes(stripes: Stripes) -> int:
    """Return the bytes of each member's guard, with its digest table."""
    return with_table(stripes.kept_bytes)


class Encoding:
    """A guard being made, which may be given up: then no thread must go on waiting for a peer."""

    def __init__(self, needed: Callable[[], bool]) -> None:
        self._needed = needed
        self._peers: list[Peer] = []
        self.over = False

    def peer(self, card: w.Card) -> Peer:
        self._peers.append(Peer(card))
        return self._peers[-1]

    def check(self) -> None:
        """SegmentLost if it has been given up."""
        if not self._needed():
            raise SegmentLost("given up by the process that asked")

    def end_if_given_up(self) -> None:
        """Wake a thread that waits for a peer, if the guard was given up; from any thread."""
        if not self._needed():
            for peer in self._peers:
                peer.hang_up()


def protect(
    segments: Segments,
    agent: str,
    names: Mapping[int, str],
    slot: Slot,
    order: w.Protect,
    throttle: Throttle,
    encoding: Encoding,
) -> str:
    """Fill a guard and return the digest of its table.  Blocks.  All bytes of the images are verified.

    `names`: files of this agent that hold images of the group, by rank.  `encoding`: ends it early.
    """
    lengths = tuple(x.bytes for x in order.members)
    stripes = Stripes(lengths, order.num_data, order.num_parity)
    if slot.bytes < guard_bytes(stripes):
        raise UsageError(f"{guard_bytes(stripes)} bytes to keep, in a slot of {slot.bytes}")
    me = [x.rank for x in order.members].index(order.rank)
    memory = memoryview(bytearray(room(WINDOW_BYTES)))
    opened: dict[int, tuple[Reader, Verified]] = {}

    def image(number: int) -> Verified:
        if number not in opened:
            opened[number] = _open(segments, agent, names, order, order.members[number], encoding)
        return opened[number][1]

    try:
        for number, first, digests in order.seen:
            if not image(number).has(first, digests):
                rank = order.members[number].rank
                raise Corrupt(f"rank {order.rank} does not hold what rank {rank} has saved")
        with mapped(segments.path(order.job, slot.name), slot.bytes) as view:
            for c in stripes.contributions(me):
                begun = order.begun[c.source.member] if order.begun else None
                if begun is not None and begun >= c.source.stop:
                    continue
                encoding.check()
                _add(stripes, view, c, image(c.source.member), memory, begun, throttle)
            return put_table(view, stripes.kept_bytes)
    finally:
        encoding.over = True
        for reader, _ in opened.values():
            reader.close()


def _open(
    segments: Segments,
    agent: str,
    names: Mapping[int, str],
    order: w.Protect,
    member: w.Member,
    encoding: Encoding,
) -> tuple[Reader, Verified]:
    key = f"{order.attempt}/r{member.rank:05d}.safetensors"
    reader: Reader
    if member.card.agent == agent:
        if member.rank not in names:
            raise NotFound("the image is not here", key=key)
        file = LocalStore(segments.jobs / order.job).open(names[member.rank])
        reader = FileImage(file, "local")
    else:
        path = f"/v1/{order.job}/{order.attempt}/share/{member.rank}"
        peer = encoding.peer(member.card)
        reader = RemoteImage(peer, path, key)
    whole = Verified(reader, size=member.bytes, table=member.table, digest=member.digest, key=key)
    return reader, whole


def _add(
    stripes: Stripes,
    view: memoryview,
    c: Contribution,
    source: Verified,
    memory: memoryview,
    begun: int | None,
    throttle: Throttle,
) -> None:
    """Add one contribution to the guard, window by window; of one that was `begun`, what is missing."""
    unit = stripes.code.unit_bytes
    window = max(WINDOW_BYTES // unit, 1) * unit
    skip = 0 if begun is None else max(begun - c.source.start, 0)
    for at in range(skip // window * window, stripes.block_bytes, window):
        row = np.frombuffer(view, np.uint8)[
            c.at + at : c.at + min(at + window, stripes.block_bytes)
        ]
        lead = max(skip - at, 0)
        start = c.source.start + at + lead
        throttle.wait(len(row) - lead, w.PROTECTED)
        data = source.read(start, min(c.source.start + at + len(row), c.source.stop), memory)
        block = np.frombuffer(data, np.uint8)
        if lead:
            block = np.concatenate([np.zeros(lead, np.uint8), block])
        fresh = begun is None and c.index == 0
        if fresh or len(data):
            stripes.code.accumulate({c.row: row}, c.index, block, fresh=fresh)
