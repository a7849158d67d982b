"""The exchange: collectives over a gloo group of holdfast's own, for loads.

The gloo group is made at the first use and shared by every later `Group`: closing one takes 20 ms.  gloo
ends each operation within `deadline_s`.  After a failure the group is closed and the remaining ranks
report to each other: the error names the ranks that do not.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from holdfast.base.calls import call_within
from holdfast.base.errors import AgentError, Deadline
from holdfast.base.wire import decode_error, encode_error
from holdfast.core.group.gloo import Gloo, broadcast, gloo_of_torch
from holdfast.core.group.meeting import Meeting, Met, ranks_text

_SHARE_BYTES = 1 << 10
_BROADCAST_BYTES = 16 << 10
"""Bytes of the first message of `all_gather` and `broadcast`: the size, and the beginning of the data."""
_SIZE = struct.Struct("<q")
_WORD_BYTES = 4 << 10
_WORD_PAUSE_S = 0.0003
"""Longest pause between polls for rank 0's word, which takes milliseconds."""

_ROLL_CALL_S = 3.0
"""Seconds in which the remaining ranks must notice that a collective failed."""
_CONNECT_S = 2.0
"""Seconds beyond the deadline in which torch must report that ranks did not connect."""


class Exchange:
    """Collectives among all ranks."""

    rank: int
    size: int
    deadline_s: float
    meeting: Meeting
    met: Met

    def exchange(self, payloads: Sequence[bytes]) -> list[memoryview]:
        """Send `payloads[r]` to each rank r; return what each rank sent, by rank.  Collective."""
        return self.exchange_parts([[p] for p in payloads])

    def exchange_parts(self, parts: Sequence[Sequence[bytes | memoryview]]) -> list[memoryview]:
        """`exchange` of payloads in parts: `parts[r]`, joined, goes to rank r.  Collective."""
        out = bytearray().join(p for to in parts for p in to)
        with self._talking("exchange") as group:
            sizes = torch.tensor([sum(map(len, to)) for to in parts], dtype=torch.int64)
            theirs = torch.empty_like(sizes)
            group.all_to_all(theirs, sizes)
            into = torch.empty(int(theirs.sum()), dtype=torch.uint8)
            source = torch.frombuffer(out, dtype=torch.uint8) if out else into[:0]
            group.all_to_all(into, source, theirs.tolist(), sizes.tolist())
        data, at, answers = memoryview(into.numpy()), 0, []
        for n in theirs.tolist():
            answers.append(data[at : at + n])
            at += n
        return answers

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes; one round trip if all are short.  Collective."""
        with self._talking("share") as group:
            heads = self._all_gather(_SIZE.pack(len(data)) + data, _SHARE_BYTES, group)
            sizes = [_SIZE.unpack(h[: _SIZE.size])[0] for h in heads]
            rest = max(sizes) - (_SHARE_BYTES - _SIZE.size)
            tails = [b""] * self.size
            if rest > 0:
                tails = self._all_gather(data[_SHARE_BYTES - _SIZE.size :], rest, group)
        return [(h[_SIZE.size :] + t)[:n] for h, t, n in zip(heads, tails, sizes)]

    def _all_gather(self, data: bytes, width: int, group: Gloo) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data[:width].ljust(width, b"\0")), dtype=torch.uint8)
        into = torch.empty(self.size * width, dtype=torch.uint8)
        group.all_gather(into, mine)
        found = into.numpy().tobytes()
        return [found[r * width : (r + 1) * width] for r in range(self.size)]

    def any(self, flag: bool) -> bool:
        """True if `flag` is true on any rank.  Collective; blocks until all have called."""
        return bool(self.all_max(int(flag)))

    def all_max(self, number: int) -> int:
        """The largest `number` of any rank.  Collective; blocks until all have called."""
        said = torch.tensor([number], dtype=torch.int64)
        with self._talking("agree") as group:
            group.max(said)
        return int(said)

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        """Return the bytes of rank `source` on every rank; one round trip if they are few.  Collective."""
        data = data or b""
        with self._talking("broadcast") as group:
            head = bytearray((_SIZE.pack(len(data)) + data)[:_BROADCAST_BYTES])
            into = torch.frombuffer(head.ljust(_BROADCAST_BYTES, b"\0"), dtype=torch.uint8)
            group.broadcast(into, source)
            found: bytes = into.numpy().tobytes()
            (size,) = _SIZE.unpack(found[: _SIZE.size])
            found = found[_SIZE.size : _SIZE.size + size]
            if len(found) < size:
                rest = bytearray(data[len(found) :]) or bytearray(size - len(found))
                group.broadcast(torch.frombuffer(rest, dtype=torch.uint8), source)
                found += rest
        return found

    def from_rank0(self, work: Callable[[], bytes]) -> bytes:
        """Run `work` on rank 0; return its result, or raise its error, on every rank.  Collective.

        On other ranks an error that is not a HoldfastError becomes an AgentError.
        """
        if self.rank == 0:
            try:
                answer = work()
            except Exception as error:
                self.broadcast(b"\1" + encode_error(error))
                raise
            self.broadcast(b"\0" + answer)
            return answer
        answer = self.broadcast(None)
        if answer[:1] == b"\1":
            raise decode_error(answer[1:], rank=0)
        return answer[1:]

    @contextmanager
    def _talking(self, what: str) -> Iterator[Gloo]:
        """Yield the gloo group; close it if a collective fails, for it is broken on all ranks."""
        met = self.met
        try:
            yield self._gloo_group(met, what)
        except BaseException as error:
            _, held = self.meeting.held.pop(self.deadline_s, (0, None))
            if held is not None:
                held.end()  # so that the other ranks notice
            if isinstance(error, (RuntimeError, dist.DistError)):
                raise self._explained(met, what, error) from error
            raise

    def _explained(
        self,
        met: Met,
        what: str,
        error: Exception,
        *,
        has_gone_on: int | None = None,
    ) -> AgentError:
        """Return the error of a failed collective, which names the ranks that do not answer.

        `has_gone_on`: a rank that leaves the collective first and may not notice the failure, so its
        silence counts only if every other rank answers.
        """
        if isinstance(error, AgentError):
            return error
        try:
            missing = self.meeting.roll_call(met, _ROLL_CALL_S)
        except AgentError as gone:
            return gone
        missing = [rank for rank in missing if rank != has_gone_on] or missing
        if missing:
            return Deadline(
                f"{ranks_text(missing)} did not answer in the middle of {met.call} (within "
                f"{self.deadline_s:g} s, or no longer: {what})",
                rank=missing[0],
                hint="look at the log of that rank; it may have died, or hang",
            )
        return AgentError(
            f"the ranks have lost each other in the middle of {met.call} ({what}: {error})",
            hint="the network may be down; the other ranks' logs say more",
        )

    @property
    def holds(self) -> str:
        """Identity of this rank's gloo group; all ranks must have the same."""
        held = self.meeting.held.get(self.deadline_s)
        return "" if held is None else str(held[0])

    def confide(self, word: bytes | None) -> bytes:
        """Return rank 0's secret `word`, of at most `_WORD_BYTES`, on every rank.  Collective.

        It uses connections that torch made with the process group, which an attacker on the store cannot
        intercept later.  If torch's group has no gloo (NCCL alone), or there is none, it uses a gloo
        group of holdfast's, whose ranks find each other through the job's store: an attacker who changes
        addresses there at this moment could intercept it, as with torch's own group.
        """
        if (torchs := gloo_of_torch()) is None:
            return self.broadcast(word)
        until = time.monotonic() + self.deadline_s
        data = bytearray(_SIZE.pack(len(word or b"")) + (word or b""))
        data = data.ljust(_SIZE.size + _WORD_BYTES, b"\0")
        try:
            work = broadcast(torchs, torch.frombuffer(data, dtype=torch.uint8), 0)
            if word is not None:
                return word  # rank 0 does not wait for the others
            pauses = self.meeting.pauses()
            while not work.is_completed():
                if time.monotonic() > until:
                    raise RuntimeError("rank 0 has sent nothing")
                time.sleep(min(next(pauses), _WORD_PAUSE_S))
            work.wait()
        except (RuntimeError, dist.DistError) as error:
            what = "hear where the board is"
            raise self._explained(self.met, what, error, has_gone_on=0) from error
        (size,) = _SIZE.unpack(data[: _SIZE.size])
        return bytes(data[_SIZE.size : _SIZE.size + size])

    def _gloo_group(self, met: Met, what: str) -> Gloo:
        kept = self.meeting.held.get(self.deadline_s)
        if kept is not None:
            return kept[1]
        limit = max(self.deadline_s, 1.0)

        def make() -> Gloo:
            store = self.meeting.line.ask(what, lambda s: s, limit)
            store = dist.PrefixStore(f"gloo/{met.number}", store)
            return Gloo(store, self.rank, self.size, limit)

        def late() -> Exception:
            return RuntimeError("not all ranks have connected to each other")

        gloo = call_within(make, limit + _CONNECT_S, late)
        self.meeting.held[self.deadline_s] = met.number, gloo
        return gloo
