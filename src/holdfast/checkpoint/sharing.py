"""Reading together: chunks that several ranks need are read by one of them and passed on.

A cut along another dim touches every chunk of a tensor, and a replicated tensor is wanted whole by all;
if each rank read for itself, the store would be read once per rank.  Instead:

1. each rank tells, for each file, the chunks that it needs to the file's coordinator (files are dealt to
   ranks in turn, so no rank sees everything; a few chunks are told to all, and then 2 and 3 need no
   messages);
2. the coordinator gives each chunk to one of the ranks that need it, evenly, and tells these readers;
3. each reader tells the others in which of its rounds their chunks come.
   Chunks that one rank alone needs it reads alone, straight into place where it can.
4. Round by round, each rank reads and verifies its next chunks into its window (shared memory on a
   host; another host's ranks get the bytes sent), all agree that the round is there, and each places
   what it needs from all windows, while the next round is being read.

Two windows per rank bound the memory; `agree` carries a failure of any rank to all of them.
The mechanism is UCP's redundancy-bypassing load (section 4 there), per chunk instead of per file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from holdfast.checkpoint.reading import (
    BLOCK_CHUNKS,
    Block,
    Files,
    Interval,
    RowIndex,
    Want,
    group_rows,
    in_threads,
    needs,
    plan_blocks,
    plan_rows,
    read_alone,
    run_blocks,
    threads_here,
)
from holdfast.errors import Corrupt, FormatError, NotFound, RankErrors, Unavailable
from holdfast.format.manifest import FileEntry

WINDOW_BYTES = 8 << 20
"""Read per rank and round.  Small windows cost few first touches of fresh pages, which can be slow;
large ones cost fewer rounds.  bench/load_resharded.py shows the whole."""

OPEN_CLAIMS = 1000
"""Up to so many claims are told to all ranks instead of to coordinators: fewer round trips."""
AGAIN = 0.01
"""Every rank reads for itself if that reads at most such a part of the bytes again."""


class Window(Protocol):
    """Memory of this rank that the ranks of its host can read."""

    mine: memoryview
    theirs: dict[int, memoryview]
    """Windows of other ranks on this host; a rank that is not here must be sent its bytes."""

    def close(self) -> None: ...


class Peers(Protocol):
    """The ranks that load together; every method is collective and has a deadline."""

    rank: int
    size: int

    def exchange(self, payloads: Sequence[bytes]) -> list[memoryview]:
        """Send `payloads[r]` to each rank r; returns what each sent to this one."""

    def exchange_parts(self, parts: Sequence[Sequence[bytes | memoryview]]) -> list[memoryview]:
        """The same, for payloads in parts."""

    def share(self, data: bytes) -> list[bytes]:
        """Every rank's bytes."""

    def any(self, flag: bool) -> bool:
        """Whether any rank says so; returns when all have said."""

    def most(self, number: int) -> int:
        """The largest number that any rank says."""

    def window(self, size: int) -> Window:
        """Memory that is shared within the host."""


_SAME = (Unavailable, NotFound, FormatError)
"""Errors by which a caller decides whether an older step may be tried."""


class _Report(msgspec.Struct, frozen=True):
    """What each rank says when a round is read: its error, if it has one."""

    message: str | None = None
    key: str | None = None
    start: int | None = None
    stop: int | None = None
    expected: str | None = None
    found: str | None = None
    kind: str = ""
    """Class of the error, if the other ranks shall raise the same."""


def report_of(error: BaseException | None) -> bytes:
    """An error as bytes for the other ranks; empty for none."""
    if error is None:
        return b""
    if isinstance(error, Corrupt):
        report = _Report(
            error.message,
            error.key,
            error.start,
            error.stop,
            error.expected,
            error.found,
            "Corrupt",
        )
    elif type(error) in _SAME:
        report = _Report(error.message, error.key, kind=type(error).__name__)  # type: ignore[attr-defined]
    else:
        report = _Report(f"{type(error).__name__}: {error}")
    return msgspec.msgpack.encode(report)


def agree(peers: Peers, error: BaseException | None, step: int | None) -> None:
    """Raise on every rank if any rank has an error: the same one where its kind matters, else
    RankErrors."""
    if not peers.any(error is not None):
        return
    answers = peers.share(report_of(error))
    reports = {r: msgspec.msgpack.decode(a, type=_Report) for r, a in enumerate(answers) if a}
    if not reports:
        return
    for rank, one in reports.items():
        if one.kind == "Corrupt":
            raise Corrupt(
                one.message or "",
                key=one.key,
                start=one.start,
                stop=one.stop,
                expected=one.expected,
                found=one.found,
                rank=rank,
                step=step,
            ) from error
    for kind in _SAME:
        for rank, one in reports.items():
            if one.kind == kind.__name__:
                raise kind(one.message or "", key=one.key, rank=rank, step=step) from error
    raise RankErrors("load", {r: x.message or "" for r, x in reports.items()}, step=step) from error


@dataclass
class Deal:
    """What one rank reads for others and gets from others; chunks as (file, first, stop, ...)."""

    alone: dict[int, list[Interval]] = field(default_factory=dict)
    read: list[tuple[int, int, int]] = field(default_factory=list)
    """Runs that this rank reads for several, in the order in which it does."""
    to: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(file, first, stop, recipient): who needs which of them."""
    get: dict[int, list[tuple[int, int, int, int]]] = field(default_factory=dict)
    """By reader: (file, first, stop, position of first among all chunks that the reader reads)."""


def assign(
    claims: list[tuple[int, int, int]], load: dict[int, int]
) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
    """Give each chunk to one of the ranks that claim it.

    From (rank, first, stop) to (first, stop, reader, all that need it); `load` counts the chunks that
    each rank reads so far and is kept even.
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
            # rounded up, so that what is left over goes to those who have read the least
            lo, hi = (a - (a - b) * k // len(order) for k in (i, i + 1))
            if hi > lo:
                load[reader] = load.get(reader, 0) + hi - lo
                yield lo, hi, reader, needers


def _pack(rows: Sequence[tuple[int, ...]]) -> bytes:
    return np.array(rows, np.int64).tobytes()


def _unpack(data: bytes | memoryview, width: int) -> list[tuple[int, ...]]:
    return [tuple(r) for r in np.frombuffer(data, np.int64).reshape(-1, width).tolist()]


def deal(peers: Peers, needed: dict[int, list[Interval]]) -> Deal:
    """Agree who reads what.  `needed`: chunks by file number."""
    mine = [(file, a, b) for file, intervals in needed.items() for a, b in intervals]
    if peers.most(len(mine)) * peers.size <= OPEN_CLAIMS:
        return _deal_openly(peers, needed, peers.share(_pack(mine)))
    out: list[list[tuple[int, ...]]] = [[] for _ in range(peers.size)]
    for claim in mine:
        out[claim[0] % peers.size].append(claim)
    claims = _claims(peers.exchange([_pack(rows) for rows in out]))
    return _spread(peers, _orders(peers, claims))


def _claims(packed: Sequence[bytes | memoryview]) -> dict[int, list[tuple[int, int, int]]]:
    """By file, what each rank needs of it: (rank, first, stop)."""
    claims: dict[int, list[tuple[int, int, int]]] = {}
    for rank, data in enumerate(packed):
        for file, a, b in _unpack(data, 3):
            claims.setdefault(file, []).append((rank, a, b))
    return claims


def _deal_openly(peers: Peers, needed: dict[int, list[Interval]], packed: list[bytes]) -> Deal:
    """Every rank knows all claims and decides the same."""
    claims, load = _claims(packed), dict[int, int]()
    orders = [(file, *order) for file in sorted(claims) for order in assign(claims[file], load)]
    again = sum((b - a) * (len(needers) - 1) for _, a, b, _, needers in orders)
    if again <= AGAIN * sum(b - a for _, a, b, _, _ in orders):
        return Deal(alone=needed)
    result = Deal()
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
    peers: Peers, claims: dict[int, list[tuple[int, int, int]]]
) -> list[tuple[int, int, int, int]]:
    """As coordinator decide; as reader learn: (file, first, stop, recipient), own copies included."""
    load: dict[int, int] = {}
    out: list[list[tuple[int, ...]]] = [[] for _ in range(peers.size)]
    for file in sorted(claims):
        for a, b, reader, needers in assign(claims[file], load):
            out[reader] += [(file, a, b, rank) for rank in needers]
    answers = peers.exchange([_pack(rows) for rows in out])
    return sorted(r for data in answers for r in _unpack(data, 4))  # type: ignore[misc]


def _spread(peers: Peers, orders: list[tuple[int, int, int, int]]) -> Deal:
    """Number the shared chunks that this rank reads and tell each recipient where its own come."""
    result = Deal()
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


Run = tuple[int, int, int, int]
"""(file, first, stop, slot): chunks of a file, and where in a reader's window they begin."""


def by_round(runs: Iterable[Run], per_round: int) -> dict[int, list[Run]]:
    """Cut runs, given with their positions among all chunks of a reader, where its rounds end."""
    out: dict[int, list[Run]] = {}
    for file, a, b, position in runs:
        while a < b:
            number, slot = divmod(position, per_round)
            n = min(b - a, per_round - slot)
            out.setdefault(number, []).append((file, a, a + n, slot))
            a, position = a + n, position + n
    return out


@dataclass
class Rounds:
    """The exchange of shared chunks, round after round."""

    files: Files
    by_number: list[FileEntry]
    indexes: dict[str, RowIndex]
    deal: Deal
    peers: Peers
    threads: int

    def run(self, longest: int) -> BaseException | None:
        """Pass on up to `longest` chunks of each rank.

        Returns what went wrong here in the last round, which the others do not know yet.
        """
        size = self.files.manifest.chunk_bytes
        per_window = max(1, WINDOW_BYTES // size)
        window = self.peers.window(2 * per_window * size)
        try:
            self.remote = set(range(self.peers.size)) - set(window.theirs) - {self.peers.rank}
            self.most_remote = self.peers.most(len(self.remote))
            # a rank sends to, and gets from, every remote rank at once
            self.per_round = max(1, per_window // max(1, self.most_remote))
            self._cut_up()
            return self._all(window, size, -(-longest // self.per_round))
        finally:
            window.close()

    def _cut_up(self) -> None:
        """Who reads, gets and sends what in each round."""
        positions = dict(zip(self.deal.read, _positions(self.deal.read)))
        mine = [(*run, position) for run, position in positions.items()]
        self.mine = by_round(mine, self.per_round)
        self.get = {r: by_round(runs, self.per_round) for r, runs in self.deal.get.items()}
        to: dict[int, list[Run]] = {}
        for file, a, b, rank in self.deal.to:
            if rank in self.remote:
                to.setdefault(rank, []).append((file, a, b, positions[file, a, b]))
        self.to = {r: by_round(runs, self.per_round) for r, runs in to.items()}

    def _all(self, window: Window, size: int, rounds: int) -> BaseException | None:
        step = self.files.manifest.step
        failed: BaseException | None = None
        with ThreadPoolExecutor(1, "holdfast-ahead") as ahead:
            reading = ahead.submit(self._read, window, 0, size)
            for number in range(rounds):
                agree(self.peers, failed or reading.exception(), step)
                if number + 1 < rounds:
                    reading = ahead.submit(self._read, window, number + 1, size)
                try:
                    self._place(window, number, size)
                except Exception as error:
                    failed = error  # told at the next chance: the others are not waiting for it
                if self.most_remote:
                    failed = self._send(window, number, size) or failed
        return failed

    def _half(self, view: memoryview, number: int, size: int) -> memoryview:
        half = self.per_round * size
        return view[(number % 2) * half : (number % 2 + 1) * half]

    def _read(self, window: Window, number: int, size: int) -> None:
        half = self._half(window.mine, number, size)
        blocks = [
            (self.by_number[file], first, min(first + BLOCK_CHUNKS, b), slot + first - a)
            for file, a, b, slot in self.mine.get(number, ())
            for first in range(a, b, BLOCK_CHUNKS)
        ]

        def one(block: tuple[FileEntry, int, int, int]) -> None:
            file, first, stop, slot = block
            self.files.chunks(file, first, stop, half[slot * size :])

        in_threads(one, blocks, self.threads)

    def _place(self, window: Window, number: int, size: int) -> None:
        """Copy from the windows that can be seen."""
        work = []
        for reader, runs in self.get.items():
            view = window.mine if reader == self.peers.rank else window.theirs.get(reader)
            if view is not None:
                half = self._half(view, number, size)
                work += [(run, half) for run in runs.get(number, ())]
        in_threads(lambda item: self._copy(item[0], item[1], size), work, self.threads)

    def _copy(self, run: Run, half: memoryview, size: int) -> None:
        entry, a, b = self._span(run)
        slot = run[3]
        self._put(entry, half[slot * size : slot * size + b - a], a)

    def _span(self, run: Run) -> tuple[FileEntry, int, int]:
        entry = self.by_number[run[0]]
        return entry, *self.files.span(entry, run[1], run[2])

    def _put(self, entry: FileEntry, view: memoryview, at: int) -> None:
        for row in self.indexes[entry.path].touching(at, at + len(view)):
            row.place(view, at)

    def _send(self, window: Window, number: int, size: int) -> Exception | None:
        """Bytes for and from ranks whose memory cannot be seen from here."""
        half = self._half(window.mine, number, size)
        out: list[list[memoryview]] = [[] for _ in range(self.peers.size)]
        for rank, runs in self.to.items():
            for run in runs.get(number, ()):
                _, a, b = self._span(run)
                out[rank].append(half[run[3] * size : run[3] * size + b - a])
        answers = self.peers.exchange_parts(out)
        try:
            for reader in self.remote & self.get.keys():
                view, at = answers[reader], 0
                for run in self.get[reader].get(number, ()):
                    entry, a, b = self._span(run)
                    self._put(entry, view[at : at + b - a], a)
                    at += b - a
        except Exception as error:
            return error
        return None


def _positions(runs: list[tuple[int, int, int]]) -> list[int]:
    out, at = [], 0
    for _, a, b in runs:
        out.append(at)
        at += b - a
    return out


def read_together(files: Files, wants: list[Want], peers: Peers | None) -> None:
    """Fill every rank's wants; the store is read about once for all.  Collective.

    Any rank's failure is raised on every rank, after which targets are partly overwritten.
    """
    if peers is None or peers.size == 1:
        read_alone(files, wants)
        return
    threads = threads_here()
    size = files.manifest.chunk_bytes
    by_number = sorted(files.manifest.files, key=lambda f: f.path)
    number_of = {f.path: i for i, f in enumerate(by_number)}
    error: BaseException | None = None
    indexes: dict[str, RowIndex] = {}
    needed: dict[int, list[Interval]] = {}
    try:
        indexes = group_rows(plan_rows(files.manifest, wants))
        needed = {number_of[path]: runs for path, runs in needs(indexes, size).items()}
    except Exception as failed:
        error = failed
    dealt = deal(peers, needed)
    alone = {by_number[n].path: sorted(runs) for n, runs in dealt.alone.items()}
    if error is None:
        try:
            run_blocks(files, _alone(files, indexes, alone, size), indexes, threads)
        except Exception as failed:
            error = failed
    agree(peers, error, files.manifest.step)
    longest = peers.most(sum(b - a for _, a, b in dealt.read))
    if longest:
        error = Rounds(files, by_number, indexes, dealt, peers, threads).run(longest)
        agree(peers, error, files.manifest.step)


def _alone(
    files: Files, indexes: dict[str, RowIndex], needed: dict[str, list[Interval]], size: int
) -> list[Block]:
    by_path = {f.path: f for f in files.manifest.files}
    blocks = []
    for path, intervals in needed.items():
        blocks += plan_blocks(by_path[path], intervals, indexes[path], size)
    return blocks
