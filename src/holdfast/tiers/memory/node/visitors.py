"""Connections to an agent from other nodes, of which anybody can open as many as he likes.

A connection is a *stranger* until a request on it has had a token.  A stranger is closed after `FIRST_S`;
if there are too many, from one address or in all, the oldest of them is closed.  A rank of another node
sends its token as soon as it is connected, so it is no stranger for long; a flood from one address drives
out its own connections.  Whatever strangers do, descriptors are left for the processes of this node.
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
"""Number of looks within `FIRST_S`: time for which the agent itself was held up, and did not read what had
come, counts as one look at most."""
MOST_STRANGERS = 1024
"""Most strangers at once; half as many from one address.  Never more than a quarter of the files that the
process may open."""
MOST_FILES = 1 << 16
"""Number of files that an agent asks for; the kernel's tables grow with it."""
PAUSE_S = 0.1
"""Seconds until the next try, if the system has no descriptors left."""
BACKLOG = 1024
"""Connections that may wait to be taken."""
Serve = Callable[[], asyncio.BaseProtocol]


class Visitors:
    """The connections of other nodes' ranks and agents, and of strangers."""

    def __init__(self, most: int) -> None:
        """`most`: number of strangers at once."""
        self._most = most
        self._listener = socket.create_server(("0.0.0.0", 0), backlog=BACKLOG)
        self._listener.setblocking(False)
        self._letting_in: asyncio.Task[None] | None = None
        self._strangers: dict[asyncio.Task[None], str] = {}
        """Address of each stranger by the task that serves it; the oldest first."""
        self._of_address: Counter[str] = Counter()
        self._unknown: dict[Any, asyncio.Future[None]] = {}
        """A future for each stranger's transport, which is done once a token has come."""

    def is_known(self, transport: Any) -> None:
        """Note that a request by this connection had a token."""
        known = self._unknown.get(transport)
        if known is not None and not known.done():
            known.set_result(None)

    def let_in(self, serve: Serve, context: ssl.SSLContext | None) -> int:
        """Take connections from now on, each with a protocol that `serve` makes; return the port."""
        self._letting_in = asyncio.ensure_future(self._let_in(serve, context))
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Take no more connections."""
        if self._letting_in is not None:
            self._letting_in.cancel()
        self._listener.close()

    async def _let_in(self, serve: Serve, context: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                line, (address, *_) = await loop.sock_accept(self._listener)
            except OSError:  # no descriptors, or the connection is closed already
                await asyncio.sleep(PAUSE_S)
                continue
            self._make_room(address)
            task = asyncio.ensure_future(self._look_after(line, serve, context))
            self._strangers[task] = address
            self._of_address[address] += 1
            task.add_done_callback(self._forget)
            await asyncio.sleep(0)  # let other requests have their turn between two connections

    def _make_room(self, address: str) -> None:
        """Close the oldest stranger, of this address if it has many, unless there is room for another."""
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
        """Serve a connection until it has had a token; close it if none comes in time."""
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
        with suppress(OSError):  # it does not speak TLS, or is closed
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
