"""The ranks of a job: the one module that calls torch.distributed.

Two ways to talk, both apart from the training's own collectives:

* the *board*: a TCP key-value store of our own, hosted by rank 0, for the small messages of a save
  (who is ready, who failed, is it committed).  A wait on it has a deadline and names who is missing;
  it works from background threads and does not disturb a collective under way.
* the *exchange*: collectives over a gloo group of our own, for loads.  It is made when first needed
  and used by every `Group` after that, since to end one takes 20 ms.

Without torch.distributed there is one rank, and nothing is sent.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from holdfast.errors import (
    AgentError,
    Corrupt,
    Deadline,
    FormatError,
    HoldfastError,
    NotFound,
    NotRecoverable,
    Unavailable,
    UnsupportedVersion,
    UsageError,
)

POLL_S = 0.002
LEAVE_S = 15.0
ANSWER_S = 10.0
"""Beyond the deadline for the ranks' answers: how long rank 0 may take to decide."""
NONCE_BYTES = 16
SHARE_BYTES = 1 << 10
BROADCAST_BYTES = 16 << 10
"""What goes along with the sizes."""
_SIZE = struct.Struct("<q")

_gloos: dict[float, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}
"""By deadline: the default process group, and the gloo group made in it; torch.distributed owns both."""


def _nothing() -> None:
    return None


class Group:
    """All ranks of the default process group, or the one process there is.

    Construction is collective.  `deadline_s` bounds every wait.
    """

    def __init__(self, deadline_s: float = 600.0) -> None:
        self.deadline_s = deadline_s
        on = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if on else 0
        self.size = dist.get_world_size() if on else 1
        self.asked = 0
        """Number of collective questions so far that have no number of their own."""
        self._board: Any = self._open_board() if self.size > 1 else None
        self._local: dict[str, bytes] = {}
        self._answered: dict[str, str] = {}

    def _open_board(self) -> Any:
        timeout = timedelta(seconds=self.deadline_s)
        place: list[Any] = [None, 0, ""]
        board, failed = None, None
        if self.rank == 0:
            try:
                place[0] = os.environ.get("HOLDFAST_HOST") or _address()
                board = dist.TCPStore(
                    place[0], 0, None, True, timeout=timeout, wait_for_workers=False, use_libuv=True
                )
                place[1] = board.port
            except Exception as error:
                failed, place[2] = error, f"{type(error).__name__}: {error}"
        dist.broadcast_object_list(place, src=0)
        host, port, problem = place
        if problem:
            raise AgentError(
                f"rank 0 cannot open a port for messages on {host!r}: {problem}",
                hint="set HOLDFAST_HOST on rank 0 to an address that the other ranks can reach",
            ) from failed
        if self.rank != 0:
            with _translated(f"connect to rank 0 at {host}:{port}"):
                board = dist.TCPStore(
                    host, port, None, False, timeout=timeout, wait_for_workers=False, use_libuv=True
                )
        return board

    # -- the board --------------------------------------------------------------------------------

    def post(self, key: str, value: bytes) -> None:
        """Pin a message to the board."""
        if self.size == 1:
            self._local[key] = value
            return
        with _translated(f"post {key}"):
            self._board.set(key, value)

    def _wait(self, key: str, limit: float) -> bytes:
        """Rank 0's answer to `key`, as soon as it is there.

        A rank may ask long before rank 0 does: who finds that rank 0 has begun waits once more as long.
        """
        until, alive = time.monotonic() + limit, False
        for pause in self._pauses():
            with _translated(f"wait for rank 0 ({key})"):
                if self._board.check([f"{key}/answer"]):
                    return bytes(self._board.get(f"{key}/answer"))
                late = time.monotonic() > until
                if late and not alive and self._board.check([f"{key}/alive"]):
                    until, alive, late = time.monotonic() + limit, True, False
            if late:
                raise Deadline(
                    f"rank 0 did not answer within {limit:g} s",
                    rank=0,
                    hint="look at the log of that rank; it may have died or never made this call",
                )
            time.sleep(pause)
        raise AssertionError

    def _pauses(self) -> Iterator[float]:
        """Seconds between looks at the board: longer and longer, and the more so the more ranks look."""
        pause, most = POLL_S / 4, max(0.01, 0.01 * self.size / 8)
        while True:
            yield pause
            pause = min(pause * 1.5, most)

    def peek(self, key: str) -> bytes | None:
        """The message under `key`, or None if there is none now."""
        if self.size == 1:
            return self._local.get(key)
        with _translated(f"look for {key}"):
            return bytes(self._board.get(key)) if self._board.check([key]) else None

    def gather(self, key: str, value: bytes, deadline_s: float | None = None) -> list[bytes]:
        """On rank 0 every rank's value, in rank order; elsewhere an empty list, at once.

        Deadline names every rank that did not answer in time.
        """
        if self.size == 1:
            return [value]
        if self.rank != 0:
            self.post(f"{key}/{self.rank}", value)
            return []
        answers = {0: value}
        limit = self.deadline_s if deadline_s is None else deadline_s
        until, pauses = time.monotonic() + limit, self._pauses()
        while len(answers) < self.size:
            if self._collect(key, answers):
                continue
            if time.monotonic() > until:
                missing = [r for r in range(self.size) if r not in answers]
                raise Deadline(
                    f"rank {_ranks(missing)} did not answer within {limit:g} s",
                    rank=missing[0],
                    hint="look at the log of that rank; it may have died or never made this call",
                )
            time.sleep(next(pauses))
        return [answers[r] for r in range(self.size)]

    def _collect(self, key: str, answers: dict[int, bytes]) -> bool:
        found = False
        with _translated(f"gather {key}"):
            for rank in range(self.size):
                name = f"{key}/{rank}"
                if rank not in answers and self._board.check([name]):
                    answers[rank] = bytes(self._board.get(name))
                    self._board.delete_key(name)
                    found = True
        return found

    def ask(
        self,
        key: str,
        value: bytes,
        decide: Callable[[list[bytes]], bytes],
        deadline_s: float | None = None,
    ) -> bytes:
        """Every rank gives a value, rank 0 decides from all of them, everybody learns the answer.

        If rank 0 finds ranks missing, the others learn that too.
        """
        limit = self.deadline_s if deadline_s is None else deadline_s
        if self.size == 1:
            return decide([value])
        if self.rank == 0:
            return self._decide(key, value, decide, limit)
        self.post(f"{key}/{self.rank}", value)
        answer = self._wait(key, limit + ANSWER_S)
        if answer[:1] != b"\0":
            kind = Deadline if answer[:1] == b"\1" else AgentError
            raise kind(answer[1:].decode())
        return answer[1:]

    def _decide(
        self, key: str, value: bytes, decide: Callable[[list[bytes]], bytes], limit: float
    ) -> bytes:
        self.post(f"{key}/alive", b"")
        try:
            answer = decide(self.gather(key, value, limit))
        except Exception as error:
            kind = b"\1" if isinstance(error, Deadline) else b"\2"
            text = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
            self.post(f"{key}/answer", kind + f"rank 0: {text}".encode())
            raise
        self.post(f"{key}/answer", b"\0" + answer)
        self._forget(key)
        return answer

    def _forget(self, key: str) -> None:
        """Everybody who answered `family/n` has read the answer to `family/n-1`."""
        family, _, number = key.rpartition("/")
        old, self._answered[family] = self._answered.get(family), key
        if old is not None and number:
            with _translated(f"forget {old}"):
                self._board.delete_key(f"{old}/answer")
                self._board.delete_key(f"{old}/alive")

    def close(self) -> None:
        """Leave.  Rank 0 hosts the board and stays until all have left, but no longer than a while."""
        if self._board is None:
            return
        try:
            if self.rank == 0:
                self.gather("bye", b"", min(self.deadline_s, LEAVE_S))
            else:
                self.post(f"bye/{self.rank}", b"")
        except AgentError:
            pass  # whoever is gone does not need the board
        self._board = None

    # -- the exchange -----------------------------------------------------------------------------

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

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank; one round trip if they are few.  Collective."""
        data = data or b""
        if self.size == 1:
            return data
        with self._talking("broadcast") as group:
            head = bytearray((_SIZE.pack(len(data)) + data)[:BROADCAST_BYTES])
            into = torch.frombuffer(head.ljust(BROADCAST_BYTES, b"\0"), dtype=torch.uint8)
            dist.broadcast(into, 0, group=group)
            found = into.numpy().tobytes()
            (size,) = _SIZE.unpack(found[: _SIZE.size])
            found = found[_SIZE.size : _SIZE.size + size]
            if len(found) < size:
                rest = bytearray(data[len(found) :]) or bytearray(size - len(found))
                dist.broadcast(torch.frombuffer(rest, dtype=torch.uint8), 0, group=group)
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
                self.broadcast(b"\1" + _told(error))
                raise
            self.broadcast(b"\0" + answer)
            return answer
        answer = self.broadcast(None)
        if answer[:1] == b"\1":
            raise _learnt(answer[1:])
        return answer[1:]

    @contextmanager
    def _talking(self, what: str) -> Iterator[Any]:
        """The gloo group, for collectives.  One that failed is of no more use, here or elsewhere."""
        gloo = self._gloo_group()
        try:
            with _translated(what):
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

    def window(self, size: int) -> HostWindow:
        """Memory of this rank that the ranks on its host can see.  Collective."""
        return HostWindow(self, size)


class HostWindow:
    """A memory file per rank, mapped by every rank of the host.  Leaves nothing behind on a crash.

    A rank finds another's file under /proc by process and descriptor number.  These may mean another
    file in another container, so a number drawn at random, sent and found behind the window's bytes,
    must agree; if not, or if memory cannot be shared at all, the rank counts as remote.
    """

    def __init__(self, group: Group, size: int) -> None:
        self.theirs: dict[int, memoryview] = {}
        self._maps: list[mmap.mmap] = []
        nonce, fd = secrets.token_bytes(NONCE_BYTES), -1
        try:
            try:
                fd = os.memfd_create("holdfast-window")
                os.ftruncate(fd, size + NONCE_BYTES)
                self._maps.append(mmap.mmap(fd, size + NONCE_BYTES))
                self._maps[0][size:] = nonce
                self.mine = memoryview(self._maps[0])[:size]
            except OSError:
                self.mine = memoryview(bytearray(size))
            card = msgspec.msgpack.encode((_host() if self._maps else "", os.getpid(), fd, nonce))
            for rank, data in enumerate(group.share(card)):
                if rank != group.rank and self._maps:
                    self._map(rank, msgspec.msgpack.decode(data), size)
            seen = msgspec.msgpack.encode(list(self.theirs))
            for rank, data in enumerate(group.share(seen)):  # both ways, or not at all
                if group.rank not in msgspec.msgpack.decode(data):
                    self.theirs.pop(rank, None)
        finally:
            if fd >= 0:
                os.close(fd)

    def _map(self, rank: int, card: tuple[str, int, int, bytes], size: int) -> None:
        host, pid, fd, nonce = card
        if not host or host != _host():
            return
        try:
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY)
            try:
                if os.fstat(opened).st_size != size + NONCE_BYTES:
                    return
                mapped = mmap.mmap(opened, size + NONCE_BYTES, prot=mmap.PROT_READ)
            finally:
                os.close(opened)
        except OSError:
            return  # another container: its bytes are sent instead
        if mapped[size:] != nonce:
            mapped.close()
            return
        self._maps.append(mapped)
        self.theirs[rank] = memoryview(mapped)[:size]

    def close(self) -> None:
        """Give the memory back; the views must no longer be used."""
        self.mine.release()
        for view in self.theirs.values():
            view.release()
        for mapped in self._maps:
            try:
                mapped.close()
            except BufferError:
                pass  # an error in flight still holds a view; the map goes with it


@cache
def _host() -> str:
    """Ranks that say the same are on one host and see each other's processes; empty: nobody knows."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot = f.read().strip()
        processes = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return ""
    return f"{boot} {processes} {os.environ.get('HOLDFAST_TEST_HOST', '')}"


def _address() -> str:
    """An address of this host that the other ranks can reach.

    First the one they rendezvous at, if it is ours; a host's own name often means loopback, which is
    of no use to other hosts; then the address that outward packets would carry.
    """
    master = os.environ.get("MASTER_ADDR", "")
    if master and _is_ours(master):
        return master
    with suppress(OSError):
        found = socket.gethostbyname(socket.gethostname())
        if not found.startswith("127.") and _is_ours(found):
            return found
    for outside in (master, "192.0.2.1"):  # a connected UDP socket sends nothing
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect((outside, 9))
            return str(s.getsockname()[0])
    return "127.0.0.1"


def _is_ours(name: str) -> bool:
    """Whether a name is of an address that can be bound here."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as s:
                s.bind(address)
                return True
    return False


_KEPT = {
    kind.__name__: kind
    for kind in (
        UsageError, NotFound, NotRecoverable, Unavailable, Corrupt, FormatError, UnsupportedVersion,
    )
}  # fmt: skip
"""Errors that every rank raises as rank 0 does."""


def _told(error: Exception) -> bytes:
    """An error of rank 0 for the others."""
    kind = next((k.__name__ for k in type(error).__mro__ if k.__name__ in _KEPT), "")
    if isinstance(error, HoldfastError):
        card = (kind, error.message, error.step, error.key, error.hint)
    else:
        card = ("", f"{type(error).__name__}: {error}", None, None, None)
    return msgspec.msgpack.encode(card)


def _learnt(data: bytes) -> HoldfastError:
    kind, message, step, key, hint = msgspec.msgpack.decode(data)
    if kind not in _KEPT:
        return AgentError(f"rank 0: {message}", step=step, key=key, hint=hint)
    return _KEPT[kind](message, step=step, key=key, hint=hint)


def _ranks(ranks: list[int], most: int = 8) -> str:
    return ", ".join(map(str, ranks[:most])) + (
        f" and {len(ranks) - most} more" * (len(ranks) > most)
    )


class _translated:  # noqa: N801
    """The border for torch.distributed's errors."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, at: Any) -> None:
        if isinstance(error, (RuntimeError, dist.DistError)) and not isinstance(error, AgentError):
            raise AgentError(
                f"{self.what}: {error}",
                hint="a rank is gone or the network is; the other ranks' logs say more",
            ) from error
