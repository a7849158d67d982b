"""Reading together: chunks that several ranks need are read by one of them and passed on.

A cut along another dim touches every chunk of a tensor, and all ranks want a replicated tensor; if each
rank read for itself, the store would be read once per rank.  Instead the ranks agree which rank reads
which chunks (`read_assignment`).  A chunk for one rank only is read by that rank, directly into place if
possible.  Shared chunks go round by round: each rank reads and verifies its next chunks into its window
(shared memory on a host; other hosts are sent the bytes), all ranks agree that the round is complete, and
each copies its parts from all windows while the next round is being read.

Two windows per rank bound the memory; `raise_together` carries a failure of any rank to all ranks.
The mechanism is UCP's redundancy-bypassing load (section 4 there), per chunk instead of per file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from holdfast.base.gc_pause import uncollected
from holdfast.base.threads import Worker, in_threads
from holdfast.core.checkpoint.files import Files
from holdfast.core.checkpoint.peers import raise_together
from holdfast.core.checkpoint.read_assignment import ReadAssignment, assign_reads
from holdfast.core.checkpoint.reading import (
    block_chunks,
    blocks_of,
    cores_here,
    open_all,
    run_blocks,
    threads_for,
)
from holdfast.core.checkpoint.rows import Interval, RowIndex, Want, group_rows, needs, plan_rows
from holdfast.core.format.manifest import FileEntry

if TYPE_CHECKING:
    from holdfast.core.group import Group
    from holdfast.core.group.shared_memory import HostWindow

_WINDOW_BYTES = 8 << 20
"""Bytes read per rank and round.  Small windows cost few first touches of fresh pages, which can be
slow; large ones cost fewer rounds.  bench/claims/load_resharded.py shows the whole."""
_FAR_WINDOW_BYTES = 32 << 20
"""The same for a store with a high latency."""


_Run = tuple[int, int, int, int]
"""(file, first, stop, slot): chunks of a file, and their first slot in a reader's window."""


def by_round(runs: Iterable[_Run], per_round: int) -> dict[int, list[_Run]]:
    """Cut runs at the ends of rounds; each has its position among all chunks of its reader."""
    out: dict[int, list[_Run]] = {}
    for file, a, b, position in runs:
        while a < b:
            number, slot = divmod(position, per_round)
            n = min(b - a, per_round - slot)
            out.setdefault(number, []).append((file, a, a + n, slot))
            a, position = a + n, position + n
    return out


@dataclass
class ExchangeRounds:
    """The exchange of shared chunks, round after round."""

    files: Files
    by_number: list[FileEntry]
    indexes: dict[str, RowIndex]
    deal: ReadAssignment
    peers: Group
    threads: int
    """Number of reading threads, and of placing threads, which run at the same time."""

    def run(self, longest: int) -> BaseException | None:
        """Exchange up to `longest` chunks of each rank.

        Returns this rank's error in the last round, which the other ranks do not know yet.
        """
        size = self.files.manifest.chunk_bytes
        is_far = self.files.store_reads.threads > 0
        per_window = max(1, (_FAR_WINDOW_BYTES if is_far else _WINDOW_BYTES) // size)
        with closing(self.peers.window(2 * per_window * size)) as window:
            self.remote = set(range(self.peers.size)) - set(window.theirs) - {self.peers.rank}
            self.most_remote = self.peers.all_max(len(self.remote))
            # a rank sends to, and gets from, every remote rank at once
            self.per_round = max(1, per_window // max(1, self.most_remote))
            self._cut_up()
            return self._all(window, size, -(-longest // self.per_round))

    def _cut_up(self) -> None:
        """Compute what this rank reads, gets and sends in each round."""
        ends = accumulate((b - a for _, a, b in self.deal.read), initial=0)
        positions = dict(zip(self.deal.read, ends))
        mine = [(*run, position) for run, position in positions.items()]
        self.mine = by_round(mine, self.per_round)
        self.get = {r: by_round(runs, self.per_round) for r, runs in self.deal.get.items()}
        to: dict[int, list[_Run]] = {}
        for file, a, b, rank in self.deal.to:
            if rank in self.remote:
                to.setdefault(rank, []).append((file, a, b, positions[file, a, b]))
        self.to = {r: by_round(runs, self.per_round) for r, runs in to.items()}

    def _all(self, window: HostWindow, size: int, rounds: int) -> BaseException | None:
        step = self.files.manifest.step
        failed: BaseException | None = None
        with Worker("holdfast-ahead") as ahead:
            reading = ahead.submit(self._read, window, 0, size)
            for number in range(rounds):
                raise_together(self.peers, failed or reading.exception(), step)
                if number + 1 < rounds:
                    reading = ahead.submit(self._read, window, number + 1, size)
                try:
                    self._place(window, number, size)
                except Exception as error:
                    failed = error  # reported in the next round: the others do not wait for it
                if self.most_remote:
                    failed = self._send(window, number, size) or failed
        return failed

    def _half(self, view: memoryview, number: int, size: int) -> memoryview:
        half = self.per_round * size
        return view[(number % 2) * half : (number % 2 + 1) * half]

    def _read(self, window: HostWindow, number: int, size: int) -> None:
        half = self._half(window.mine, number, size)
        most = block_chunks(self.files)
        blocks = [
            (self.by_number[file], first, min(first + most, b), slot + first - a)
            for file, a, b, slot in self.mine.get(number, ())
            for first in range(a, b, most)
        ]

        def one(block: tuple[FileEntry, int, int, int]) -> None:
            file, first, stop, slot = block
            self.files.chunks(file, first, stop, half[slot * size :])

        in_threads(one, blocks, max(self.threads, self.files.store_reads.threads), fills=True)

    def _place(self, window: HostWindow, number: int, size: int) -> None:
        """Copy from the windows that this rank has mapped."""
        work = []
        for reader, runs in self.get.items():
            view = window.mine if reader == self.peers.rank else window.theirs.get(reader)
            if view is not None:
                half = self._half(view, number, size)
                work += [(run, half) for run in runs.get(number, ())]
        in_threads(lambda item: self._copy(item[0], item[1], size), work, self.threads, fills=True)

    def _copy(self, run: _Run, half: memoryview, size: int) -> None:
        entry, a, b = self._span(run)
        slot = run[3]
        self._put(entry, half[slot * size : slot * size + b - a], a)

    def _span(self, run: _Run) -> tuple[FileEntry, int, int]:
        entry = self.by_number[run[0]]
        return entry, *self.files.span(entry, run[1], run[2])

    def _put(self, entry: FileEntry, view: memoryview, at: int) -> None:
        for row in self.indexes[entry.path].touching(at, at + len(view)):
            row.place(view, at)

    def _send(self, window: HostWindow, number: int, size: int) -> Exception | None:
        """Exchange bytes with ranks whose windows are not mapped, and place the received ones."""
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


def plan_shared(files: Files, wants: list[Want], peers: Group) -> Callable[[], None]:
    """Return a function that fills the wants of several ranks (`reading.plan_together`).  Collective."""
    threads = threads_for(files)
    size = files.manifest.chunk_bytes
    by_number = sorted(files.manifest.files, key=lambda f: f.path)
    number_of = {f.path: i for i, f in enumerate(by_number)}
    error: BaseException | None = None
    indexes: dict[str, RowIndex] = {}
    needed: dict[int, list[Interval]] = {}
    try:
        with uncollected():
            indexes = group_rows(plan_rows(files.manifest, wants))
            needed = {number_of[path]: runs for path, runs in needs(indexes, size).items()}
    except Exception as failed:
        error = failed
    deal = assign_reads(peers, needed)
    if error is None:
        try:
            mine = {*deal.alone, *(number for number, _, _ in deal.read)}
            open_all(files, [by_number[number] for number in sorted(mine)], threads)
        except Exception as failed:
            error = failed
    raise_together(peers, error, files.manifest.step)
    rounds = ExchangeRounds(files, by_number, indexes, deal, peers, cores_here())
    return partial(_read_shared, rounds, threads)


def _read_shared(rounds: ExchangeRounds, threads: int) -> None:
    """Read chunks that only this rank needs, then shared chunks in rounds.  Collective."""
    files, deal, peers = rounds.files, rounds.deal, rounds.peers
    step = files.manifest.step
    alone = {rounds.by_number[n].path: sorted(runs) for n, runs in deal.alone.items()}
    error: BaseException | None = None
    try:
        run_blocks(files, blocks_of(files, rounds.indexes, alone), rounds.indexes, threads)
    except Exception as failed:
        error = failed
    raise_together(peers, error, step)
    longest = peers.all_max(sum(b - a for _, a, b in deal.read))
    if longest:
        raise_together(peers, rounds.run(longest), step)
