"""Assignment of chunks to the ranks that read them, without a list of all chunks on any rank.

1. For each file, each rank sends the chunks that it needs to the file's coordinator (files are assigned to
   coordinators round-robin).
2. The coordinator assigns each chunk to one of the ranks that need it, evenly, and tells these readers.
3. Each reader tells the other ranks the positions of their chunks among the chunks that it reads.

If there are few claims, all ranks get all of them, and steps 2 and 3 need no messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from holdfast.core.checkpoint.rows import Interval

if TYPE_CHECKING:
    from holdfast.core.group import Group

_OPEN_CLAIMS = 1000
"""Up to this many claims are sent to all ranks instead of coordinators, which saves round trips."""
_AGAIN = 0.01
"""Ranks read for themselves if that reads at most this fraction of the bytes more than once."""


@dataclass
class ReadAssignment:
    """Chunks that a rank reads for others and gets from others, as (file, first, stop, ...)."""

    alone: dict[int, list[Interval]] = field(default_factory=dict)
    read: list[tuple[int, int, int]] = field(default_factory=list)
    """Runs of shared chunks that this rank reads, in order."""
    to: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(file, first, stop, recipient) of each run that another rank needs."""
    get: dict[int, list[tuple[int, int, int, int]]] = field(default_factory=dict)
    """By reader: (file, first, stop, position of `first` among all chunks that the reader reads)."""


def assign(
    claims: list[tuple[int, int, int]], load: dict[int, int]
) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
    """Assign each chunk to one of the ranks that claim it.

    `claims`: (rank, first, stop).  Yields (first, stop, reader, ranks that need it).  `load`: the number of
    chunks that each rank reads so far, which is kept even and updated.
    """
    edges = sorted({e for _, a, b in claims for e in (a, b)})
    starts: dict[int, list[tuple[int, int]]] = {}
    for rank, a, b in claims:
        starts.setdefault(a, []).append((rank, b))
    active: dict[int, int] = {}
    for a, b in zip(edges, edges[1:]):
        for rank, until in starts.get(a, ()):
            active[rank] = max(until, active.get(rank, 0))
        active = {r: until for r, until in active.items() if until > a}
        if not active:
            continue
        needers = tuple(sorted(active))
        order = sorted(needers, key=lambda r: (load.get(r, 0), r))
        for i, reader in enumerate(order):
            # rounded up, so that the remainder goes to the ranks with the least load
            lo, hi = (a - (a - b) * k // len(order) for k in (i, i + 1))
            if hi > lo:
                load[reader] = load.get(reader, 0) + hi - lo
                yield lo, hi, reader, needers


def _pack(rows: Sequence[tuple[int, ...]]) -> bytes:
    return np.array(rows, np.int64).tobytes()


def _unpack(data: bytes | memoryview, width: int) -> list[tuple[int, ...]]:
    return [tuple(r) for r in np.frombuffer(data, np.int64).reshape(-1, width).tolist()]


def assign_reads(peers: Group, needed: dict[int, list[Interval]]) -> ReadAssignment:
    """Agree which rank reads which chunks.  `needed`: chunks by file number.  Collective."""
    mine = [(file, a, b) for file, intervals in needed.items() for a, b in intervals]
    if peers.all_max(len(mine)) * peers.size <= _OPEN_CLAIMS:
        return _deal_openly(peers, needed, peers.all_gather(_pack(mine)))
    out: list[list[tuple[int, ...]]] = [[] for _ in range(peers.size)]
    for claim in mine:
        out[claim[0] % peers.size].append(claim)
    claims = _claims(peers.exchange([_pack(rows) for rows in out]))
    return _spread(peers, _orders(peers, claims))


def _claims(packed: Sequence[bytes | memoryview]) -> dict[int, list[tuple[int, int, int]]]:
    """Decode the chunks that each rank needs: (rank, first, stop), by file."""
    claims: dict[int, list[tuple[int, int, int]]] = {}
    for rank, data in enumerate(packed):
        for file, a, b in _unpack(data, 3):
            claims.setdefault(file, []).append((rank, a, b))
    return claims


def _deal_openly(
    peers: Group, needed: dict[int, list[Interval]], packed: list[bytes]
) -> ReadAssignment:
    """Assign on every rank from all claims, with the same result."""
    claims, load = _claims(packed), dict[int, int]()
    orders = [(file, *order) for file in sorted(claims) for order in assign(claims[file], load)]
    again = sum((b - a) * (len(needers) - 1) for _, a, b, _, needers in orders)
    if again <= _AGAIN * sum(b - a for _, a, b, _, _ in orders):
        return ReadAssignment(alone=needed)
    result = ReadAssignment()
    positions = [0] * peers.size
    for file, a, b, reader, needers in orders:
        if needers == (reader,):
            if reader == peers.rank:
                result.alone.setdefault(file, []).append((a, b))
            continue
        if reader == peers.rank:
            result.read.append((file, a, b))
            result.to += [(file, a, b, rank) for rank in needers]
        if peers.rank in needers:
            result.get.setdefault(reader, []).append((file, a, b, positions[reader]))
        positions[reader] += b - a
    return result


def _orders(
    peers: Group, claims: dict[int, list[tuple[int, int, int]]]
) -> list[tuple[int, int, int, int]]:
    """Assign as coordinator; return what to read: (file, first, stop, recipient), also for this rank."""
    load: dict[int, int] = {}
    out: list[list[tuple[int, ...]]] = [[] for _ in range(peers.size)]
    for file in sorted(claims):
        for a, b, reader, needers in assign(claims[file], load):
            out[reader] += [(file, a, b, rank) for rank in needers]
    answers = peers.exchange([_pack(rows) for rows in out])
    return sorted(r for data in answers for r in _unpack(data, 4))  # type: ignore[misc]


def _spread(peers: Group, orders: list[tuple[int, int, int, int]]) -> ReadAssignment:
    """Number the shared chunks that this rank reads, and send each recipient the positions of its own."""
    result = ReadAssignment()
    runs: dict[tuple[int, int, int], list[int]] = {}
    for file, a, b, rank in orders:
        runs.setdefault((file, a, b), []).append(rank)
    out: list[list[tuple[int, ...]]] = [[] for _ in range(peers.size)]
    position = 0
    for (file, a, b), ranks in runs.items():
        if ranks == [peers.rank]:
            result.alone.setdefault(file, []).append((a, b))
            continue
        result.read.append((file, a, b))
        for rank in ranks:
            out[rank].append((file, a, b, position))
            result.to.append((file, a, b, rank))
        position += b - a
    for reader, data in enumerate(peers.exchange([_pack(rows) for rows in out])):
        if data:
            result.get[reader] = _unpack(data, 4)  # type: ignore[assignment]
    return result
