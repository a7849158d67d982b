"""Ranges of images on other nodes, asked of their agents."""

from __future__ import annotations

import http.client
import socket
import time
from contextlib import suppress
from typing import Any

from holdfast.base.errors import AgentUnreachable, Corrupt, HoldfastError, NotFound
from holdfast.base.events import count
from holdfast.tiers.memory.node.messages import Card
from holdfast.tiers.memory.node.tls import PinnedConnection

PATIENCE_S = 30.0
"""Seconds to wait for each part of an answer: a peer that says nothing for so long counts as
gone."""


SLOWEST = 1e6
"""Bytes per second that a peer must send, in the long run, to count as there."""


class Peer:
    """Another node's agent.  Thread-safe: it has as many connections as threads have asked at once."""

    def __init__(self, card: Card, patience_s: float = PATIENCE_S) -> None:
        self.address = card.address
        self._fingerprint = card.fingerprint
        self._headers = {"Authorization": f"Bearer {card.token}"}
        self._patience_s = patience_s
        self._open: set[http.client.HTTPConnection] = set()
        self._idle: list[http.client.HTTPConnection] = []
        """The open connections that no thread is using."""

    def get(self, path: str) -> bytes:
        """Return the whole answer to a request."""
        return self._asked(path, self._headers, None)

    def tell(self, path: str) -> None:
        """Send a message that has no answer."""
        self._asked(path, self._headers, None, "POST")

    def read(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on.  NotFound, Corrupt, AgentUnreachable."""
        if len(into):
            span = f"bytes={offset}-{offset + len(into) - 1}"
            self._asked(path, {**self._headers, "Range": span}, into)
            count("memory.peer.bytes", len(into))

    def hang_up(self) -> None:
        """End every wait for an answer with AgentUnreachable; from any thread."""
        for line in list(self._open):
            sock = line.sock
            if sock is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _asked(
        self, path: str, headers: dict[str, str], into: memoryview | None, verb: str = "GET"
    ) -> bytes:
        kept = None
        with suppress(IndexError):
            kept = self._idle.pop()
        try:
            return self._ask(kept or self._line(), path, headers, into, verb)
        except (OSError, http.client.HTTPException) as error:
            if kept is None or isinstance(error, TimeoutError | http.client.IncompleteRead):
                raise self._unreachable(error) from None
        try:  # a connection that was kept may have been closed at the other end
            return self._ask(self._line(), path, headers, into, verb)
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None

    def _ask(self, line: http.client.HTTPConnection, *asked: Any) -> bytes:
        """Ask by a connection.  If all went well, it is kept for the next request of any thread."""
        self._open.add(line)
        try:
            answer = self._answer(line, *asked)
        except BaseException:
            self._open.discard(line)
            with suppress(OSError):
                line.close()
            raise
        self._idle.append(line)
        return answer

    def _answer(
        self,
        line: http.client.HTTPConnection,
        path: str,
        headers: dict[str, str],
        into: memoryview | None,
        verb: str,
    ) -> bytes:
        line.request(verb, path, headers=headers)
        response = line.getresponse()
        if response.status not in (200, 206):
            response.read()
            raise self._refused(path, response.status)
        if into is None:
            return response.read()
        at, until = 0, time.monotonic() + self._patience_s + len(into) / SLOWEST
        while at < len(into):
            if time.monotonic() > until:
                raise TimeoutError(f"{at} of {len(into)} bytes came in time")
            n = response.readinto(into[at:])
            if not n and response.length:  # it broke off: the agent may have died in mid-answer
                raise http.client.IncompleteRead(b"", response.length)
            if not n:
                raise Corrupt(f"{path} at {self.address} ends early", start=at, stop=len(into))
            at += n
        response.read()
        return b""

    def _line(self) -> http.client.HTTPConnection:
        if self._fingerprint:
            return PinnedConnection(self.address, self._fingerprint, self._patience_s)
        return http.client.HTTPConnection(self.address, timeout=self._patience_s)

    def _refused(self, path: str, status: int) -> HoldfastError:
        where = f"agent at {self.address}"
        if status in (404, 416):
            return NotFound(f"{where} has no such bytes of {path}")
        return AgentUnreachable(f"{where} refused {path}: {status}")

    def _unreachable(self, error: BaseException) -> AgentUnreachable:
        return AgentUnreachable(
            f"agent at {self.address} does not answer: {type(error).__name__}: {error}",
            hint="is that node up, and its port open to this one?",
        )
