"""Checking that replicas agree, before ranks share the writing of them.

Ranks that hold the same part of a tensor each write a share of it, so replicas that differ (a seed that
went astray, a part of something that only looks whole) would be stitched together, and a load would give
every rank what no rank had.  That plain tensors of one name are replicas is only believed: nothing but
their name says so.  So it is proved once, at the first save that has them, and at every save if asked to;
then DTensors too, whose placements say it.

Each rank digests its whole part of every such tensor.  What all ranks say first is one digest for each
sharding and part; only where these differ do they tell those of single tensors.  Costs a pass over the
replicated bytes in the window.

Buffers of modules are another matter: batch norm's differ between ranks under DDP until the next forward
pass, which begins by sending those of rank 0 to the others.  They are written by the first rank that holds
them (`holdfast.state.agreed`), so they are of one piece whether they differ or not; where
nobody sends them about, it is told that they differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.codec.digest import digest
from holdfast.errors import LayoutError, warn_user
from holdfast.group import Group
from holdfast.layout import Placement
from holdfast.state.arrays import raw_array
from holdfast.state.live import Live, LiveTensor
from holdfast.state.snapshot import SetAside
from holdfast.wire import WireError, decode_msgpack, rank_errors

Class = tuple[int, int, bool]
"""(number of a sharding, part, whether they are buffers): what is compared in one digest first."""
Row = tuple[int, int, int]
"""(tensor number, part, digest)"""
MOST_NAMED = 20


class _Said(msgspec.Struct, frozen=True, array_like=True):
    """A rank's first message to rank 0."""

    digests: dict[Class, int]
    is_complete: bool
    """True if this rank has looked at its tensors."""
    error: WireError | None = None


class _Asked(msgspec.Struct, frozen=True, array_like=True):
    """The answer of rank 0 to all ranks' `_Said`."""

    differing: list[Class]
    again: bool
    """True if some rank has not looked at its tensors."""


class _Differences(msgspec.Struct, frozen=True, array_like=True):
    """Text that names two ranks that differ, by name of the tensor or buffer."""

    tensors: dict[str, str]
    buffers: dict[str, str]


@dataclass
class Replicas:
    """Names of the replicas of a run that were proved equal, and when to prove them (`mode`)."""

    mode: str
    """`once`, `verify` (at every save), or `trust` (never)."""
    proved: set[str] = field(default_factory=set)
    is_due: bool = True
    """True if there may be tensors that were not looked at yet."""

    def check(
        self,
        name: str,
        live: Live | None,
        kept: SetAside,
        placement: Placement,
        group: Group,
        limit_s: float,
        awaited: str,
    ) -> None:
        """LayoutError on every rank if some replicas differ.  `name`: the exchange's; `live`: None if
        this rank cannot look at its tensors now; `awaited`: words for what a rank that does not answer
        has not done.  Collective; after a failure all have to plan anew, for `is_due` must be alike on
        all ranks.
        """
        always = self.mode == "verify"
        if self.mode == "trust" or group.size == 1 or not (always or self.is_due):
            return
        self.is_due = False
        names = placement.table.names
        wanted = {
            n: t
            for n, t in (live.tensors if live is not None else {}).items()
            if always or not (n in self.proved or isinstance(t.source, DTensor))
        }
        rows: dict[Class, list[Row]] = {}
        error: Exception | None = None
        try:
            aside = set() if live is None else live.aside
            rows = _digests(wanted, aside, kept, placement, group.rank, apart=not always)
        except Exception as failed:  # the others are waiting for what this rank says
            error = failed
        whole = {one: digest(msgspec.msgpack.encode(some)) for one, some in rows.items()}
        failure = None if error is None else WireError.of(error)
        said = _Said(whole, live is not None, failure)
        answer = group.ask(name, msgspec.msgpack.encode(said), _differing, limit_s, awaited)
        asked = decode_msgpack(answer, _Asked)
        if asked.differing:
            each = [(one, rows[one]) for one in asked.differing if one in rows]
            answer = group.ask(
                f"{name}/each",
                msgspec.msgpack.encode(each),
                lambda answers: _compare(answers, names),
                limit_s,
                awaited,
            )
            found = decode_msgpack(answer, _Differences)
            if found.tensors:
                raise _mixture(found.tensors)
            if group.rank == 0 and live is not None:
                _tell_buffers(live, found.buffers)
        self.proved |= wanted.keys()
        self.is_due = asked.again


def _digests(
    wanted: Mapping[str, LiveTensor],
    aside: set[str],
    kept: SetAside,
    placement: Placement,
    rank: int,
    *,
    apart: bool,
) -> dict[Class, list[Row]]:
    """Digests of what this rank holds of those tensors that other ranks hold too.  `apart`: mark buffers
    as such, in classes of their own."""
    for device in {t.placed.local.device for t in wanted.values()}:
        if device.type != "cpu":  # what the training has given it may still be under way
            torch.accelerator.synchronize(device)
    table = placement.table
    parts: dict[int, int | None] = {}
    found: dict[Class, list[Row]] = {}
    for index, (name, number) in enumerate(zip(table.names, table.sharding.tolist())):
        t = wanted.get(name)
        if t is None:
            continue
        is_buffer = t.state == "buffer" and t.placed.cuts == ()
        if number not in parts:
            parts[number] = _shared_part(placement, number, rank)
        part = 0 if is_buffer else parts[number]  # the first holder's alone, as it is written
        if part is not None:
            local = kept[name, 0] if name in aside else t.placed.local
            plain = np.ascontiguousarray(raw_array(local.cpu()))
            row = index, part, digest(plain.reshape(-1).view(np.uint8).data)
            one = (-1 if is_buffer else number, part, is_buffer and apart)
            found.setdefault(one, []).append(row)
    return found


def _shared_part(placement: Placement, number: int, rank: int) -> int | None:
    """The part of tensors of a sharding that this rank holds, if others hold it too."""
    sharding = placement.table.shardings[number]
    place = None if sharding.held is not None else placement.place(sharding, rank)
    if place is None or len(placement.holders(sharding, place[0])) < 2:
        return None
    return place[0]


def _differing(answers: list[bytes]) -> bytes:
    """On rank 0: find the classes that differ, whose tensors have to be looked at one by one."""
    said = [decode_msgpack(a, _Said) for a in answers]
    errors = {rank: one.error for rank, one in enumerate(said) if one.error is not None}
    if errors:
        raise rank_errors("comparing replicas", errors)
    first: dict[Class, int] = {}
    differing: dict[Class, None] = {}
    for one in said:
        for key, value in one.digests.items():
            if first.setdefault(key, value) != value:
                differing[key] = None
    again = not all(one.is_complete for one in said)
    return msgspec.msgpack.encode(_Asked(list(differing), again))


def _compare(answers: list[bytes], names: tuple[str, ...]) -> bytes:
    """On rank 0: find which tensors differ, and on which ranks."""
    first: dict[tuple[int, int], tuple[int, int]] = {}
    found = _Differences({}, {})
    for rank, answer in enumerate(answers):
        for (_, _, is_buffer), rows in decode_msgpack(answer, list[tuple[Class, list[Row]]]):
            for index, part, value in rows:
                owner, expected = first.setdefault((index, part), (rank, value))
                if value != expected:
                    into = found.buffers if is_buffer else found.tensors
                    into.setdefault(names[index], f"ranks {owner} and {rank}")
    return msgspec.msgpack.encode(found)


def _mixture(differ: dict[str, str]) -> LayoutError:
    return LayoutError(
        f"replicas of {len(differ)} tensor(s) differ:\n" + "\n".join(_lines(differ)),
        hint="broadcast them before saving, make parts of one tensor a DTensor, or give them names of "
        'their own per rank; replicas="trust" saves a mixture of them',
    )


def _lines(differ: dict[str, str]) -> list[str]:
    return [f"  {name}: {ranks}" for name, ranks in list(differ.items())[:MOST_NAMED]]


def _tell_buffers(live: Live, differ: dict[str, str]) -> None:
    """HoldfastWarning for buffers that differ and stay so."""
    sent = {key for key, modules in live.modules.items() if _are_sent(modules)}
    lost = {name: ranks for name, ranks in differ.items() if name.split(".", 1)[0] not in sent}
    if lost:
        warn_user(
            f"{len(lost)} buffer(s) differ between ranks, and nothing sends rank 0's to the others; the "
            "first rank's are saved, and all ranks get these from a restore:\n"
            + "\n".join(_lines(lost))
        )


def _are_sent(modules: Iterable[nn.Module]) -> bool:
    """True if DDP sends rank 0's buffers to the other ranks before each forward pass."""
    return any(
        isinstance(part, nn.parallel.DistributedDataParallel) and part.broadcast_buffers
        for module in modules
        for part in module.modules()
    )
