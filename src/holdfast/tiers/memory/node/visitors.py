"""Connections to an agent from other nodes, of which any stranger may open as many as he likes.

A connection is a *stranger's* until a request on it has had a token.  So long it has little: it is closed
after `FIRST_S`, and where there are too many strangers, of one address or in all, the one that has been
there longest goes.  A rank of another node asks as soon as it is connected, and is none any more; a flood
drives out its own.  Descriptors are left for the processes of this node whatever strangers do.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

FIRST_S = 5.0
"""Seconds for the first request that has a token, TLS included."""
LOOKS = 5
"""Number of times that it is looked within `FIRST_S`: an agent that was held up itself, and has not read
what has come, does not count that time."""
MOST_STRANGERS = 1024
"""Number of strangers at once; of one address half as many.  Never more than a quarter of the files that
the process may open."""
MOST_FILES = 1 << 16
"""Number of files that an agent asks for; the kernel's tables grow with it."""
PAUSE_S = 0.1
"""Seconds until the next try, where the system has no descriptors."""
BACKLOG = 1024
"""Connections that may wait to be taken."""
Serve = Callable[[], asyncio.BaseProtocol]


class Visitors:
    """The connections of other nodes' ranks and agents, and of strangers."""

    def __init__(self, most: int) -> None:
        """`most`: strangers at once."""
        self._most = most
        self._listener = socket.create_server(("0.0.0.0", 0), backlog=BACKLOG)
        self._listener.setblocking(False)
        self._letting_in: asyncio.Task[None] | None = None
        self._strangers: dict[asyncio.Task[None], str] = {}
        """The task that serves each, and its address; the oldest first."""
        self._of_address: Counter[str] = Counter()
        self._unknown: dict[Any, asyncio.Future[None]] = {}
        """The end of its strangeness, by transport."""

    def is_known(self, transport: Any) -> None:
        """A request by this connection had a token."""
        known = self._unknown.get(transport)
        if known is not None and not known.done():
            known.set_result(None)

    def let_in(self, serve: Serve, context: ssl.SSLContext | None) -> int:
        """Take connections from now on, each with a protocol that `serve` makes; return the port."""
        self._letting_in = asyncio.ensure_future(self._let_in(serve, context))
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Take no more."""
        if self._letting_in is not None:
            self._letting_in.cancel()
        self._listener.close()

    async def _let_in(self, serve: Serve, context: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                line, (address, *_) = await loop.sock_accept(self._listener)
            except OSError:  # no descriptors, or it has gone again
                await asyncio.sleep(PAUSE_S)
                continue
            self._make_room(address)
            task = asyncio.ensure_future(self._look_after(line, serve, context))
            self._strangers[task] = address
            self._of_address[address] += 1
            task.add_done_callback(self._forget)
            await asyncio.sleep(0)  # the requests of others have their turn between two connections

    def _make_room(self, address: str) -> None:
        """End the oldest stranger, of this address if it has many, unless there is room for another."""
        is_crowd = self._of_address[address] >= self._most // 2
        if is_crowd or len(self._strangers) >= self._most:
            oldest = next(t for t, of in self._strangers.items() if of == address or not is_crowd)
            oldest.cancel()
            self._forget(oldest)

    def _forget(self, task: asyncio.Task[None]) -> None:
        address = self._strangers.pop(task, None)
        if address is not None:
            self._of_address[address] -= 1
            if not self._of_address[address]:
                del self._of_address[address]

    async def _look_after(
        self, line: socket.socket, serve: Serve, context: ssl.SSLContext | None
    ) -> None:
        """Serve a connection; return when it is known, and close it if it is not in time."""
        served = asyncio.ensure_future(self._served(line, serve, context))
        try:
            for _ in range(LOOKS):
                if served in (await asyncio.wait([served], timeout=FIRST_S / LOOKS))[0]:
                    break
        finally:
            served.cancel()

    async def _served(
        self, line: socket.socket, serve: Serve, context: ssl.SSLContext | None
    ) -> None:
        with suppress(OSError):  # it does not speak TLS, or has gone
            loop = asyncio.get_running_loop()
            transport, _ = await loop.connect_accepted_socket(serve, line, ssl=context)
            self._unknown[transport] = known = loop.create_future()
            try:
                await known
            except asyncio.CancelledError:
                transport.abort()
                raise
            finally:
                del self._unknown[transport]


def most_strangers() -> int:
    """Have this process open as many files as it may; return how many strangers that leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return MOST_STRANGERS if soft == resource.RLIM_INFINITY else min(MOST_STRANGERS, soft // 4)
