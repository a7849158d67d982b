"""The ranks of a job: the one module that calls torch.distributed.

Two ways to talk, both apart from the training's own collectives:

* the *board*: a TCP key-value store of our own, hosted by rank 0, for the small messages of a save
  (who is ready, who failed, is it committed).  A wait on it has a deadline and names who is missing;
  it works from background threads and does not disturb a collective under way.
* the *exchange*: an all-to-all over a gloo group of our own, made when first needed, for loads.

Without torch.distributed there is one rank, and nothing is sent.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from holdfast.errors import AgentError, Deadline

POLL_S = 0.002
LEAVE_S = 15.0


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
        self._gloo: Any = None
        self._board: Any = self._open_board() if self.size > 1 else None
        self._local: dict[str, bytes] = {}
        self._answered: dict[str, str] = {}

    def _open_board(self) -> Any:
        timeout = timedelta(seconds=self.deadline_s)
        place: list[Any] = [None]
        if self.rank == 0:
            host = os.environ.get("HOLDFAST_HOST") or _address()
            board = dist.TCPStore(
                host, 0, None, True, timeout=timeout, wait_for_workers=False, use_libuv=True
            )
            place = [(host, board.port)]
        dist.broadcast_object_list(place, src=0)
        if self.rank != 0:
            host, port = place[0]
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

    def wait(self, key: str, who: str, deadline_s: float | None = None) -> bytes:
        """The message under `key` as soon as it is there.  Deadline names `who` after that long."""
        if self.size == 1:
            return self._local.pop(key)
        until = time.monotonic() + (self.deadline_s if deadline_s is None else deadline_s)
        pause = POLL_S / 4
        while True:
            with _translated(f"wait for {who} ({key})"):
                if self._board.check([key]):
                    return bytes(self._board.get(key))
            if time.monotonic() > until:
                raise Deadline(
                    f"{who} did not answer within {deadline_s or self.deadline_s:g} s",
                    hint="look at the log of that rank; it may have died or never made this call",
                )
            time.sleep(pause)
            pause = min(pause * 1.5, POLL_S * 5)

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
        until = time.monotonic() + (self.deadline_s if deadline_s is None else deadline_s)
        pause = POLL_S / 4
        while len(answers) < self.size:
            found = self._collect(key, answers)
            if not found and time.monotonic() > until:
                missing = [r for r in range(self.size) if r not in answers]
                raise Deadline(
                    f"rank {_ranks(missing)} did not answer within "
                    f"{self.deadline_s if deadline_s is None else deadline_s:g} s",
                    rank=missing[0],
                    hint="look at the log of that rank; it may have died or never made this call",
                )
            if not found:
                time.sleep(pause)
                pause = min(pause * 1.5, POLL_S * 5)
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
        answer = self.wait(f"{key}/answer", "rank 0", limit + 10)
        if answer[:1] != b"\0":
            kind = Deadline if answer[:1] == b"\1" else AgentError
            raise kind(answer[1:].decode())
        return answer[1:]

    def _decide(
        self, key: str, value: bytes, decide: Callable[[list[bytes]], bytes], limit: float
    ) -> bytes:
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
        old, self._answered[family] = self._answered.get(family), f"{key}/answer"
        if old is not None and number:
            self._board.delete_key(old)

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

    def exchange(self, payloads: list[bytes]) -> list[bytes]:
        """Send `payloads[r]` to each rank r; returns what each sent here.  Collective."""
        if self.size == 1:
            return payloads
        group = self._gloo_group()
        with _translated("exchange"):
            sizes = torch.tensor([len(p) for p in payloads], dtype=torch.int64)
            theirs = torch.empty_like(sizes)
            dist.all_to_all_single(theirs, sizes, group=group)
            out = torch.frombuffer(bytearray(b"".join(payloads)) or bytearray(1), dtype=torch.uint8)
            out = out[: int(sizes.sum())]
            into = torch.empty(int(theirs.sum()), dtype=torch.uint8)
            dist.all_to_all_single(into, out, theirs.tolist(), sizes.tolist(), group=group)
        data, at, answers = into.numpy(), 0, []
        for n in theirs.tolist():
            answers.append(data[at : at + n].tobytes())
            at += n
        return answers

    def any(self, flag: bool) -> bool:
        """Whether any rank says so; returns when all have said.  Collective."""
        if self.size == 1:
            return flag
        said = torch.tensor([int(flag)])
        with _translated("agree"):
            dist.all_reduce(said, dist.ReduceOp.MAX, group=self._gloo_group())
        return bool(said)

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank.  Collective."""
        if self.size == 1:
            return data or b""
        group = self._gloo_group()
        with _translated("broadcast"):
            size = torch.tensor([len(data or b"")], dtype=torch.int64)
            dist.broadcast(size, 0, group=group)
            into = torch.empty(int(size), dtype=torch.uint8)
            if self.rank == 0 and data:
                into = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if len(into):
                dist.broadcast(into, 0, group=group)
        return into.numpy().tobytes()

    def arrive(self, what: str) -> None:
        """Wait until every rank is here; Deadline names those that are not.  Collective."""
        if self.size == 1:
            return
        group = self._gloo_group()
        try:
            dist.monitored_barrier(
                group, timeout=timedelta(seconds=self.deadline_s), wait_all_ranks=True
            )
        except RuntimeError as error:
            raise Deadline(f"{what}: not every rank arrived: {error}") from error

    def _gloo_group(self) -> Any:
        if self._gloo is None:
            self._gloo = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=max(self.deadline_s, 1.0))
            )
        return self._gloo

    def window(self, size: int) -> HostWindow:
        """Memory of this rank that the ranks on its host can see.  Collective."""
        return HostWindow(self, size)


class HostWindow:
    """A memory file per rank, mapped by every rank of the host.  Leaves nothing behind on a crash."""

    def __init__(self, group: Group, size: int) -> None:
        fd = os.memfd_create("holdfast-window")
        try:
            os.ftruncate(fd, size)
            self._maps = [mmap.mmap(fd, size)]
            self.mine = memoryview(self._maps[0])
            card = msgspec.msgpack.encode((_host(), os.getpid(), fd))
            cards = group.exchange([card] * group.size)
            self.theirs: dict[int, memoryview] = {}
            for rank, data in enumerate(cards):
                if rank != group.rank:
                    self._map(rank, msgspec.msgpack.decode(data), size)
            seen = [bytes([r in self.theirs or r == group.rank]) for r in range(group.size)]
            for rank, answer in enumerate(group.exchange(seen)):  # both ways, or not at all
                if answer == b"\0":
                    self.theirs.pop(rank, None)
        finally:
            os.close(fd)

    def _map(self, rank: int, card: tuple[str, int, int], size: int) -> None:
        host, pid, fd = card
        if host != _host():
            return
        try:
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        except OSError:
            return  # another container: its bytes are sent instead
        try:
            mapped = mmap.mmap(opened, size, prot=mmap.PROT_READ)
        finally:
            os.close(opened)
        self._maps.append(mapped)
        self.theirs[rank] = memoryview(mapped)

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


def _host() -> str:
    with open("/proc/sys/kernel/random/boot_id") as f:
        return f.read().strip() + os.environ.get("HOLDFAST_TEST_HOST", "")


def _address() -> str:
    """An address of this host that the other ranks can reach: the one they rendezvous at, if ours."""
    name = os.environ.get("MASTER_ADDR", "")
    if name in ("localhost", "127.0.0.1", "::1"):
        return name
    try:
        return socket.gethostbyname(socket.getfqdn())
    except OSError:
        return name or "127.0.0.1"


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
