"""The exchange: collectives over a gloo group of our own, for loads.

The gloo group is made when first needed and used by every `Group` after that: to end one takes 20 ms.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from holdfast.group.errors import learnt, told, translated

SHARE_BYTES = 1 << 10
BROADCAST_BYTES = 16 << 10
"""What goes along with the sizes."""
_SIZE = struct.Struct("<q")

_gloos: dict[float, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}
"""By deadline: the default process group, and the gloo group made in it; torch.distributed owns both."""


def _nothing() -> None:
    return None


class Exchange:
    """Collectives among all ranks; with one rank, nothing is sent."""

    rank: int
    size: int
    deadline_s: float

    def exchange(self, payloads: Sequence[bytes]) -> list[memoryview]:
        """Send `payloads[r]` to each rank r; returns what each sent here.  Collective."""
        return self.exchange_parts([[p] for p in payloads])

    def exchange_parts(self, parts: Sequence[Sequence[bytes | memoryview]]) -> list[memoryview]:
        """Send the parts of `parts[r]`, joined, to each rank r; returns what each sent.  Collective."""
        out = bytearray().join(p for to in parts for p in to)
        if self.size == 1:
            return [memoryview(out)]
        with self._talking("exchange") as group:
            sizes = torch.tensor([sum(map(len, to)) for to in parts], dtype=torch.int64)
            theirs = torch.empty_like(sizes)
            dist.all_to_all_single(theirs, sizes, group=group)
            into = torch.empty(int(theirs.sum()), dtype=torch.uint8)
            source = torch.frombuffer(out, dtype=torch.uint8) if out else into[:0]
            dist.all_to_all_single(into, source, theirs.tolist(), sizes.tolist(), group=group)
        data, at, answers = memoryview(into.numpy()), 0, []
        for n in theirs.tolist():
            answers.append(data[at : at + n])
            at += n
        return answers

    def share(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, on every rank; one round trip if all are short.  Collective."""
        if self.size == 1:
            return [data]
        with self._talking("share") as group:
            heads = self._all_gather(_SIZE.pack(len(data)) + data, SHARE_BYTES, group)
            sizes = [_SIZE.unpack(h[: _SIZE.size])[0] for h in heads]
            rest = max(sizes) - (SHARE_BYTES - _SIZE.size)
            tails = [b""] * self.size
            if rest > 0:
                tails = self._all_gather(data[SHARE_BYTES - _SIZE.size :], rest, group)
        return [(h[_SIZE.size :] + t)[:n] for h, t, n in zip(heads, tails, sizes)]

    def _all_gather(self, data: bytes, width: int, group: Any) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data[:width].ljust(width, b"\0")), dtype=torch.uint8)
        into = torch.empty(self.size * width, dtype=torch.uint8)
        dist.all_gather_into_tensor(into, mine, group=group)
        found = into.numpy().tobytes()
        return [found[r * width : (r + 1) * width] for r in range(self.size)]

    def any(self, flag: bool) -> bool:
        """Whether any rank says so; returns when all have said.  Collective."""
        return bool(self.most(int(flag)))

    def most(self, number: int) -> int:
        """The largest number that any rank says; returns when all have said.  Collective."""
        if self.size == 1:
            return number
        said = torch.tensor([number], dtype=torch.int64)
        with self._talking("agree") as group:
            dist.all_reduce(said, dist.ReduceOp.MAX, group=group)
        return int(said)

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        """One rank's bytes, on every rank; one round trip if they are few.  Collective."""
        data = data or b""
        if self.size == 1:
            return data
        with self._talking("broadcast") as group:
            head = bytearray((_SIZE.pack(len(data)) + data)[:BROADCAST_BYTES])
            into = torch.frombuffer(head.ljust(BROADCAST_BYTES, b"\0"), dtype=torch.uint8)
            dist.broadcast(into, source, group=group)
            found: bytes = into.numpy().tobytes()
            (size,) = _SIZE.unpack(found[: _SIZE.size])
            found = found[_SIZE.size : _SIZE.size + size]
            if len(found) < size:
                rest = bytearray(data[len(found) :]) or bytearray(size - len(found))
                dist.broadcast(torch.frombuffer(rest, dtype=torch.uint8), source, group=group)
                found += rest
        return found

    def from_rank0(self, work: Callable[[], bytes]) -> bytes:
        """What `work` returns or raises on rank 0, the only one to call it, on every rank.  Collective.

        Errors that tell a caller what to do next keep their class; others become AgentError.
        """
        if self.size == 1:
            return work()
        if self.rank == 0:
            try:
                answer = work()
            except Exception as error:
                self.broadcast(b"\1" + told(error))
                raise
            self.broadcast(b"\0" + answer)
            return answer
        answer = self.broadcast(None)
        if answer[:1] == b"\1":
            raise learnt(answer[1:])
        return answer[1:]

    @contextmanager
    def _talking(self, what: str) -> Iterator[Any]:
        """The gloo group, for collectives.  One that failed is of no more use, here or elsewhere."""
        gloo = self._gloo_group()
        try:
            with translated(what):
                yield gloo
        except BaseException:
            _gloos.pop(self.deadline_s, None)
            with suppress(RuntimeError, ValueError, AssertionError, dist.DistError):
                dist.destroy_process_group(gloo)  # so that the others learn it, too
            raise

    def _gloo_group(self) -> Any:
        world = dist.group.WORLD
        made_in, kept = (ref() for ref in _gloos.get(self.deadline_s, (_nothing, _nothing)))
        if kept is not None and made_in is world:
            return kept
        timeout = timedelta(seconds=max(self.deadline_s, 1.0))
        gloo = dist.new_group(backend="gloo", timeout=timeout)
        _gloos[self.deadline_s] = weakref.ref(world), weakref.ref(gloo)
        return gloo
