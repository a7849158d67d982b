"""Checking that replicas agree: on request, before a save shares their writing.

Ranks that hold the same part of a tensor each write a share of it, so replicas that differ (a buffer that
is not broadcast, a seed that went astray) would be stitched together.  Each rank digests its whole
part of every replicated tensor; rank 0 compares.  Costs a pass over the replicated bytes in the window.
"""

from __future__ import annotations

import msgspec
import numpy as np

from holdfast.codec.digest import digest
from holdfast.errors import LayoutError
from holdfast.layout import Placement
from holdfast.state.live import Live
from holdfast.state.snapshot import Kept, raw_array

Found = tuple[int, int, int]
"""(tensor number, part, digest)"""


def replica_digests(live: Live, kept: Kept, placement: Placement, rank: int) -> bytes:
    """Digests of what this rank holds of every tensor that other ranks hold too."""
    found: list[Found] = []
    table = placement.table
    for index, name in enumerate(table.names):
        t = live.tensors.get(name)
        sharding = table.shardings[int(table.sharding[index])]
        if t is None or sharding.held is not None:
            continue
        place = placement.place(sharding, rank)
        if place is not None and len(placement.holders(sharding, place[0])) > 1:
            local = t.placed.local if t.steady else kept[name, 0]
            plain = np.ascontiguousarray(raw_array(local.cpu()))
            found.append((index, place[0], digest(plain.reshape(-1).view(np.uint8).data)))
    return msgspec.msgpack.encode(found)


def check_replicas(answers: list[bytes], names: tuple[str, ...]) -> bytes:
    """LayoutError with every tensor whose replicas differ, and on which ranks."""
    first: dict[tuple[int, int], tuple[int, int]] = {}
    differ: dict[str, str] = {}
    for rank, answer in enumerate(answers):
        for index, part, value in msgspec.msgpack.decode(answer, type=list[Found]):
            owner, expected = first.setdefault((index, part), (rank, value))
            if value != expected:
                differ.setdefault(names[index], f"ranks {owner} and {rank}")
    if differ:
        lines = [f"  {name}: {ranks}" for name, ranks in list(differ.items())[:20]]
        raise LayoutError(
            f"replicas of {len(differ)} tensor(s) differ:\n" + "\n".join(lines),
            hint="broadcast them before saving, or give them names of their own per rank",
        )
    return b""
