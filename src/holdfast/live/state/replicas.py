"""Checking that replicas agree, before ranks share the writing of them.

Ranks that hold the same part of a tensor each write a share of it, so replicas that differ (a seed that
went astray, a part of something that only looks whole) would be stitched together, and a load would give
every rank what no rank had.  That plain tensors of one name are replicas is only believed: nothing but
their name says so.  What DTensors say, holds within their mesh: two of one name on meshes that have no rank
in common (experts, each on the sub-mesh of its own ranks) look alike and need not be.  So all are proved
equal at the first save that has them; later a sample of them is compared at each save
(`holdfast.live.state.replica_sampling`), and all of them if asked to.

Each rank digests its whole part of every such tensor.  What all ranks say first is one digest for each
sharding and part; only where these differ do they tell those of single tensors.  Costs a pass over the
replicated bytes in the window.

Buffers of modules are another matter: batch norm's differ between ranks under DDP until the next forward
pass, which begins by sending those of rank 0 to the others.  They are written by the first rank that holds
them (`holdfast.live.state.agreed`), so they are of one piece whether they differ or not; where
nobody sends them about, it is told that they differ, at the first save where they do.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.base.errors import LayoutError, warn_user
from holdfast.base.events import emit
from holdfast.base.text import first_of, listed
from holdfast.base.wire import WireError, decode_msgpack, rank_errors
from holdfast.core.codec.digest import digest
from holdfast.core.group import Group
from holdfast.core.layout.pieces import Placement
from holdfast.live.state.agreed import Class, Sample, SampleRow
from holdfast.live.state.arrays import raw_array
from holdfast.live.state.devices import devices_of, on, wait_for
from holdfast.live.state.named import Collected, LiveTensor
from holdfast.live.state.replica_sampling import Replicated, Sampler, differing, value_of
from holdfast.live.state.snapshot import SetAside, StateView

MAX_LISTED = 20
MAX_LISTED_RANKS = 8


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


class _Rows(msgspec.Struct, frozen=True, array_like=True):
    """A rank's digests of single tensors."""

    rows: list[tuple[Class, list[SampleRow]]]
    meshes: dict[int, list[int]]
    """The ranks of the meshes of those that are DTensors, by tensor number."""


class _Differences(msgspec.Struct, frozen=True, array_like=True):
    """Text that names two ranks that differ, by name of the tensor or buffer."""

    tensors: dict[str, str]
    buffers: dict[str, str]


@dataclass
class Replicas:
    """Names of the replicas of a run that were proved equal, and when to prove them (`mode`)."""

    mode: str
    """`once` (and by samples later), `verify` (at every save), or `trust` (never, but for DTensors of one
    name on several meshes)."""
    proved: set[str] = field(default_factory=set)
    is_due: bool = True
    """True if there may be tensors that were not looked at yet."""
    unlike: set[str] = field(default_factory=set)
    """Buffers that are known to differ."""
    _singly: set[Class] = field(default_factory=set)
    """Classes that ranks hold different tensors of, which therefore are compared one by one."""
    _sampler: Sampler = field(default_factory=Sampler)
    _arranged_for: Placement | None = None

    def check(
        self,
        name: str,
        live: Collected | None,
        kept: SetAside,
        placement: Placement,
        group: Group,
        limit_s: float,
        awaited: str,
        *,
        doubted: Iterable[Class] = (),
    ) -> None:
        """LayoutError on every rank if some replicas differ.  `name`: the exchange's; `live`: None if
        this rank cannot look at its tensors now; `awaited`: words for what a rank that does not answer
        has not done; `doubted`: classes of which the ranks' samples differ.  Collective; after a failure
        all have to plan anew, for `is_due` must be alike on all ranks.
        """
        talk = _Talk(name, placement.table.names, group, limit_s, awaited, self.mode == "trust")
        if doubted := list(doubted):
            self._settle(talk, live, _Rows(self._sampler.rows(doubted), {}), doubted)
        always = self.mode == "verify"
        if not (always or self.is_due):
            return
        self.is_due = False
        wanted = self._wanted(live, group.size)
        rows: dict[Class, list[SampleRow]] = {}
        error: Exception | None = None
        try:
            if wanted:
                rows = _digests(wanted, kept, placement, group.rank, apart=not always)
        except Exception as failed:  # the others are waiting for what this rank says
            error = failed
        whole = {one: digest(msgspec.msgpack.encode(some)) for one, some in rows.items()}
        failure = None if error is None else WireError.of(error)
        said = _Said(whole, live is not None, failure)
        answer = group.ask(name, msgspec.msgpack.encode(said), _differing, limit_s, awaited)
        asked = decode_msgpack(answer, _Asked)
        if asked.differing:
            each = [(one, rows[one]) for one in asked.differing if one in rows]
            self._settle(talk, live, _Rows(each, {}), asked.differing)
        self.proved |= wanted.keys()
        self._arranged_for = None
        self.is_due = asked.again

    def _wanted(self, live: Collected | None, num_ranks: int) -> dict[str, LiveTensor]:
        """Return the tensors to be proved now, in whole."""
        tensors = live.tensors if live is not None else {}
        if self.mode == "verify":
            return dict(tensors)
        wanted = {n: t for n, t in tensors.items() if n not in self.proved}
        if self.mode == "trust":
            return {n: t for n, t in wanted.items() if 0 < len(_mesh_of(t)) < num_ranks}
        return wanted

    def _settle(self, talk: _Talk, live: Collected | None, mine: _Rows, kinds: list[Class]) -> None:
        """Compare the single tensors of some classes: LayoutError if any differ, a notice of buffers."""
        for _, rows in mine.rows:
            for index, _, _ in rows:
                t = None if live is None else live.tensors.get(talk.names[index])
                if t is not None and isinstance(t.source, DTensor):
                    mine.meshes[index] = _mesh_of(t)
        found = talk.compare(mine)
        self._arranged_for = None
        if found.tensors:
            self.proved -= found.tensors.keys()
            raise _mixture(found.tensors)
        self.unlike |= found.buffers.keys()
        if not found.buffers:
            self._singly |= set(kinds)
        if talk.group.rank == 0 and live is not None:
            _tell_buffers(live, found.buffers)

    def sample(
        self, moment: StateView, kept: SetAside, placement: Placement, rank: int
    ) -> Sample | None:
        """Take this save's sample of what was proved; None if this rank cannot, or nothing is to be."""
        if self.mode != "once" or not self.proved:
            return None
        tensors = moment.live.tensors
        try:
            if self._arranged_for is not placement:
                wanted = {n: t for n, t in tensors.items() if n in self.proved - self.unlike}
                held = replicated(wanted, placement, rank, apart=True, singly=self._singly)
                self._sampler.arrange(held, tensors)
                self._arranged_for = placement
            with torch.no_grad():
                return self._sampler.take(tensors, kept, moment.ready)
        except Exception as error:
            # a save without its sample is as good as one before there were any
            emit("replicas.unsampled", error=str(error))
            return None

    def next_round(self, number: int) -> None:
        """Say which sample comes next, as all ranks have agreed."""
        self._sampler.round = number


@dataclass(frozen=True)
class _Talk:
    """An exchange of digests of single tensors."""

    name: str
    names: tuple[str, ...]
    group: Group
    limit_s: float
    awaited: str
    only_meshes: bool
    """True if only tensors on several meshes count."""

    def compare(self, mine: _Rows) -> _Differences:
        """Return the names that differ.  Collective."""
        answer = self.group.ask(
            f"{self.name}/each",
            msgspec.msgpack.encode(mine),
            lambda answers: _compare(answers, self.names, only_meshes=self.only_meshes),
            self.limit_s,
            self.awaited,
        )
        return decode_msgpack(answer, _Differences)


def _mesh_of(t: LiveTensor) -> list[int]:
    """The ranks of the mesh of a DTensor; none of a plain tensor."""
    if not isinstance(t.source, DTensor):
        return []
    return t.source.device_mesh.mesh.flatten().tolist()


def replicated(
    wanted: Mapping[str, LiveTensor],
    placement: Placement,
    rank: int,
    *,
    apart: bool,
    singly: Iterable[Class] = (),
) -> Iterator[Replicated]:
    """The parts that this rank holds of those tensors that other ranks hold too.  `apart`: mark buffers as
    such.  `singly`: classes whose tensors are each a class of their own.

    Of what is listed rank by rank only the writers are known: a plain tensor, and a DTensor, may have other
    holders.
    """
    table, singly = placement.table, set(singly)
    parts: dict[int, int | None] = {}
    for index, (name, number) in enumerate(zip(table.names, table.sharding.tolist())):
        t = wanted.get(name)
        if t is None:
            continue
        if (
            t.state == "buffer" and t.placed.cuts == ()
        ):  # the first holder's alone, as it is written
            kind = number, 0, apart
        elif table.shardings[number].held is not None:
            if t.placed.cuts is None and not isinstance(t.source, DTensor):
                continue
            box = t.placed.box
            kind = -1 - index, zlib.crc32(repr((box.start, box.stop)).encode()), False
        else:
            if number not in parts:
                parts[number] = _shared_part(placement, number, rank)
            shared = parts[number]
            if shared is None:
                continue
            kind = number, shared, False
        yield Replicated(name, index, (-1 - index, *kind[1:]) if kind in singly else kind)


def _digests(
    wanted: Mapping[str, LiveTensor],
    kept: SetAside,
    placement: Placement,
    rank: int,
    *,
    apart: bool,
) -> dict[Class, list[SampleRow]]:
    """Digests of what this rank holds of those tensors that other ranks hold too.  `apart`: mark buffers
    as such, in classes of their own."""
    # what the training has given may still be under way
    wait_for(devices_of(part.local for t in wanted.values() for part in t.parts))
    found: dict[Class, list[SampleRow]] = {}
    for one in replicated(wanted, placement, rank, apart=apart):
        local = value_of(wanted[one.name], kept)
        with on(local.device):
            plain = np.ascontiguousarray(raw_array(local.cpu()))
        row = one.index, one.part, digest(plain.reshape(-1).view(np.uint8).data)
        found.setdefault(one.kind, []).append(row)
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
    again = not all(one.is_complete for one in said)
    return msgspec.msgpack.encode(_Asked(differing(one.digests for one in said), again))


def _compare(answers: list[bytes], names: tuple[str, ...], *, only_meshes: bool) -> bytes:
    """On rank 0: find which tensors differ, and on which ranks."""
    first: dict[tuple[int, int], tuple[int, int]] = {}
    found = _Differences({}, {})
    said = [decode_msgpack(answer, _Rows) for answer in answers]
    for rank, one in enumerate(said):
        for (_, _, is_buffer), rows in one.rows:
            for index, part, value in rows:
                owner, expected = first.setdefault((index, part), (rank, value))
                if value == expected:
                    continue
                meshes = said[owner].meshes.get(index), one.meshes.get(index)
                if only_meshes and meshes[0] == meshes[1]:
                    continue
                into = found.buffers if is_buffer else found.tensors
                into.setdefault(names[index], f"ranks {owner} and {rank}{_on(*meshes)}")
    return msgspec.msgpack.encode(found)


def _on(mesh: list[int] | None, other: list[int] | None) -> str:
    """Words for two meshes that a tensor is on; none for one."""
    if mesh is None or other is None or mesh == other:
        return ""
    kind = "" if set(mesh) & set(other) else "disjoint "
    return f", on the {kind}meshes {_shown(mesh)} and {_shown(other)}"


def _shown(mesh: list[int]) -> str:
    return f"[{listed(mesh, MAX_LISTED_RANKS)}]"


def _mixture(differ: dict[str, str]) -> LayoutError:
    hint = (
        "broadcast them before saving, make parts of one tensor a DTensor, or give them names of "
        'their own per rank; replicas="trust" saves a mixture of them'
    )
    if any("meshes" in ranks for ranks in differ.values()):
        hint = (
            "DTensors of one name are parts of one tensor: put them on one mesh of all their ranks, cut "
            "along the axis of the experts, or give them names of their own per rank"
        )
    return LayoutError(f"replicas of {len(differ)} tensor(s) differ:" + _lines(differ), hint=hint)


def _lines(differ: dict[str, str]) -> str:
    lines = (f"{name}: {ranks}" for name, ranks in differ.items())
    return "".join(f"\n  {line}" for line in first_of(lines, MAX_LISTED))


def _tell_buffers(live: Collected, differ: dict[str, str]) -> None:
    """HoldfastWarning for buffers that differ and stay so."""
    sent = {key for key, modules in live.modules.items() if _are_sent(modules)}
    lost = {name: ranks for name, ranks in differ.items() if name.split(".", 1)[0] not in sent}
    if lost:
        warn_user(
            f"{len(lost)} buffer(s) differ between ranks, and nothing sends rank 0's to the others; the "
            "first rank's are saved, and all ranks get these from a restore (sum them up, or keep each "
            "rank's as a plain value, if they must differ):" + _lines(lost),
            notice="buffers-of-ranks",
        )


def _are_sent(modules: Iterable[nn.Module]) -> bool:
    """True if DDP sends rank 0's buffers to the other ranks before each forward pass."""
    return any(
        isinstance(part, nn.parallel.DistributedDataParallel) and part.broadcast_buffers
        for module in modules
        for part in module.modules()
    )
