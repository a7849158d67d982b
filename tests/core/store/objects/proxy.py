"""A faulty network between a client and an object store: an HTTP proxy whose every request meets its fate.

    with Proxy(server.endpoint) as proxy:
        proxy.choose = Shares(seed=1, refused=0.1, cut=0.01, delayed=0.01, delay_s=5.0)
        ...
        proxy.stop()                       # the bucket is gone: connections are refused
        proxy.start()                      # and is back, at the same address
        proxy.counts["PUT"]                # requests that arrived

A fate says what happens to one request:

| fate      | the store sees it | the client sees                                     |
|-----------|-------------------|-----------------------------------------------------|
| `PASSED`  | yes               | the reply                                           |
| `REFUSED` | no                | 503 or 429, in turns                                |
| `CUT`     | yes               | half of the reply, then the end of the connection   |
| `DELAYED` | `delay_s` later   | the reply                                           |
| `DROPPED` | yes               | the end of the connection without a reply           |
| `LOST`    | no                | the end of the connection without a reply           |

`CUT` and `DROPPED` are the hard ones: the work was done, and who asked for it does not know.
Requests and replies are held whole in memory, so it is for parts of some MiB.
"""

from __future__ import annotations

import enum
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeAlias, final
from urllib.parse import urlsplit

from ports import free_port

SILENCE_S = 60.0
"""The longest that the store may take for a reply, and a client between two requests."""

REFUSALS = (503, 429)


class Fate(enum.Enum):
    """What happens to a request; see the head of this module."""

    PASSED = enum.auto()
    REFUSED = enum.auto()
    CUT = enum.auto()
    DELAYED = enum.auto()
    DROPPED = enum.auto()
    LOST = enum.auto()


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the client made it; `number` counts from 1 in the order of arrival."""

    number: int
    method: str
    path: str
    headers: dict[str, str]
    num_bytes: int

    @property
    def changes(self) -> bool:
        """Whether it changes what the store holds."""
        return self.method in ("PUT", "POST", "DELETE")


Choice: TypeAlias = Callable[[Request], Fate]


def passes(request: Request) -> Fate:
    """The choice of a network without faults."""
    return Fate.PASSED


@final
class Shares:
    """Draws the fates of requests by their shares: the same draws for the same seed and order."""

    def __init__(
        self,
        *,
        seed: int,
        refused: float = 0.0,
        cut: float = 0.0,
        delayed: float = 0.0,
        dropped: float = 0.0,
        lost: float = 0.0,
    ) -> None:
        self._shares = (
            (Fate.REFUSED, refused),
            (Fate.CUT, cut),
            (Fate.DELAYED, delayed),
            (Fate.DROPPED, dropped),
            (Fate.LOST, lost),
        )
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> Fate:
        with self._lock:
            drawn = self._random.random()
        for fate, share in self._shares:
            if drawn < share:
                return fate
            drawn -= share
        return Fate.PASSED


@dataclass
class Proxy:
    """The proxy; `choose`, `delay_s` and `stripped` may be set at any time."""

    target: str
    """The endpoint of the store: `http://host:port`."""

    choose: Choice = passes
    delay_s: float = 5.0
    stripped: frozenset[str] = frozenset()
    """Names of headers, in lower case, that the store never sees."""

    counts: Counter[str] = field(default_factory=Counter)
    """Requests that arrived, by method."""

    fates: Counter[Fate] = field(default_factory=Counter)
    on_reply: Callable[[Request], object] | None = None
    """Called when the store has done the work and the client does not know yet."""

    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self._server: ThreadingHTTPServer | None = None
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._number = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Proxy:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self.stop()

    def start(self) -> None:
        """Listen, at the port that it always had."""
        assert self._server is None, "the proxy runs already"
        proxy = self

        class Bound(_Handler):
            owner = proxy

        self._server = _Listener(("127.0.0.1", self.port), Bound)
        threading.Thread(target=self._server.serve_forever, args=[0.02], daemon=True).start()

    def stop(self) -> None:
        """Refuse new connections and end those that there are, in mid-reply too."""
        server, self._server = self._server, None
        assert server is not None, "the proxy does not run"
        server.shutdown()
        server.server_close()
        with self._lock:
            connections, self._connections = self._connections, set()
        for connection in connections:
            _end(connection)

    def reset(self) -> None:
        """Count from nothing."""
        with self._lock:
            self.counts.clear()
            self.fates.clear()
            self._number = 0

    def _opened(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.add(connection)

    def _closed(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)

    def _arrived(self, method: str, path: str, headers: dict[str, str], num: int) -> Request:
        with self._lock:
            self._number += 1
            self.counts[method] += 1
            return Request(self._number, method, path, headers, num)

    def _fate(self, request: Request) -> Fate:
        fate = self.choose(request)
        with self._lock:
            self.fates[fate] += 1
        return fate


class _Listener(ThreadingHTTPServer):
    """A thread for each connection; what a client breaks off is no news."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        pass


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client, and one to the store for it."""

    owner: Proxy
    protocol_version = "HTTP/1.1"
    timeout = SILENCE_S
    disable_nagle_algorithm = True
    wbufsize = -1

    def setup(self) -> None:
        super().setup()
        self.owner._opened(self.connection)
        self._store: HTTPConnection | None = None

    def finish(self) -> None:
        self.owner._closed(self.connection)
        if self._store is not None:
            self._store.close()
        super().finish()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _any(self) -> None:
        body = self._body()
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = self.owner._arrived(self.command, self.path, headers, len(body))
        fate = self.owner._fate(request)
        if fate is Fate.LOST:
            return self._hang_up()
        if fate is Fate.REFUSED:
            return self._refuse(request)
        if fate is Fate.DELAYED:
            time.sleep(self.owner.delay_s)
        try:
            reply = self._ask(body)
        except (OSError, HTTPException):  # the store is away: so is the connection
            return self._hang_up()
        if self.owner.on_reply is not None:
            self.owner.on_reply(request)
        if fate is Fate.DROPPED:
            return self._hang_up()
        return self._answer(*reply, cut=fate is Fate.CUT)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _any  # noqa: N815

    def _body(self) -> bytes:
        if "chunked" not in (self.headers.get("Transfer-Encoding") or "").lower():
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while num_bytes := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(num_bytes))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(parts)

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """The store's status, headers and body.  A connection that it has let go is made again once."""
        for fresh in (False, True):
            if self._store is None or fresh:
                self._store = HTTPConnection(urlsplit(self.owner.target).netloc, timeout=SILENCE_S)
            used = self._store.sock is not None
            try:
                self._send(self._store, body)
                reply = self._store.getresponse()
                return reply.status, reply.getheaders(), reply.read()
            except (OSError, HTTPException):
                self._store.close()
                if not used:
                    raise
        raise AssertionError("a fresh connection either answers or raises")

    def _send(self, store: HTTPConnection, body: bytes) -> None:
        store.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        left_out = {
            *self.owner.stripped,
            "connection",
            "transfer-encoding",
            "content-length",
            "expect",
        }
        for name, value in self.headers.items():
            if name.lower() not in left_out:
                store.putheader(name, value)
        if body or self.command in ("PUT", "POST"):
            store.putheader("Content-Length", str(len(body)))
        store.endheaders(body or None)

    def _answer(
        self, status: int, headers: list[tuple[str, str]], body: bytes, *, cut: bool
    ) -> None:
        hops = ("transfer-encoding", "connection", "date", "server")
        headers = [(name, value) for name, value in headers if name.lower() not in hops]
        if not any(name.lower() == "content-length" for name, _ in headers) and status != 204:
            headers.append(("Content-Length", str(len(body))))
        head = f"HTTP/1.1 {status} {self.responses.get(status, ('',))[0]}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers) + "\r\n"
        reply = head.encode("latin-1") + body
        self.wfile.write(reply[: len(reply) // 2] if cut else reply)
        self.wfile.flush()
        if cut:
            self._hang_up()

    def _refuse(self, request: Request) -> None:
        status = REFUSALS[request.number % len(REFUSALS)]
        body = b"" if self.command == "HEAD" else b"<Error><Code>SlowDown</Code></Error>"
        self._answer(status, [("Content-Type", "application/xml")], body, cut=False)

    def _hang_up(self) -> None:
        self.close_connection = True
        _end(self.connection)


def _end(connection: socket.socket) -> None:
    """Shut a connection at once, whoever waits for it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has ended already
