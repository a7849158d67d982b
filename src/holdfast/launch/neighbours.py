"""Connections between neighbouring launchers, by which one notices at once that the other has ended.

The rendezvous strikes off a node only after some seconds without a sign of life.  The kernel is quicker:
when a process ends, its connections break and new ones are refused.  So in a round each launcher keeps a
connection to the *door* of the next launcher of the ring, a port for this.

A visitor introduces itself by the secret of the door and its number among the nodes.

    launcher 1                          door of launcher 2
      secret of door 2, node 1 ───────►   one connection is kept for each node, the newest
    stranger
      anything else ──────────────────►   closed at once
      nothing ────────────────────────►   closed after `INTRODUCTION_S`, or when `NUM_SILENT` others wait

The secret is in the introduction of a node, in the store where the nodes meet.  So it keeps out strangers
who find the port, but not those who read the store or the network.

The door does not notice a node that is cut off from the network.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from holdfast.launch.nodes import Introduction
from holdfast.launch.sockets import listener, wait_readable

KNOCK_S = 0.5
INTRODUCTION_S = 5.0
"""Seconds that a visitor may take to introduce itself."""
NUM_SILENT = 32
"""Visitors that may be silent at a time; beyond that, the oldest are closed."""
NUMBER_BYTES = 4


class Door:
    """A listening port, to which the launcher before this one in the ring connects."""

    def __init__(self, num_nodes: int, host: str | None = None) -> None:
        """`num_nodes`: the largest number of nodes; `host`: this node's name for the others."""
        self._num_nodes = num_nodes
        self.secret = secrets.token_hex(16)
        self._socket = listener(host)
        self._socket.setblocking(False)
        self._visitors: dict[int, socket.socket] = {}
        """The connection of each node, by the node's number."""
        self._silent: dict[socket.socket, float] = {}
        """Visitors that have not introduced themselves yet, and when they came, oldest first."""

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def visitors(self) -> list[socket.socket]:
        """Accept visitors, close those that are late or gone, and return the visitors inside."""
        with suppress(OSError):
            for _ in range(NUM_SILENT):
                visitor = self._socket.accept()[0]
                visitor.setblocking(False)
                self._silent[visitor] = time.monotonic()
        for visitor in list(self._silent):
            self._hear(visitor)
        oldest = list(self._silent)[: max(len(self._silent) - NUM_SILENT, 0)]
        late = [v for v, at in self._silent.items() if time.monotonic() - at > INTRODUCTION_S]
        for visitor in {*oldest, *late}:
            del self._silent[visitor]
            visitor.close()
        gone = wait_readable(self._visitors.values())
        for number, visitor in list(self._visitors.items()):
            if visitor.fileno() in gone:
                self._visitors.pop(number).close()
        return list(self._visitors.values())

    def _hear(self, visitor: socket.socket) -> None:
        """Admit or close a visitor by its introduction; do nothing if that has not arrived yet."""
        try:
            said = visitor.recv(len(self.secret) + NUMBER_BYTES)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        del self._silent[visitor]
        secret, number = said[:-NUMBER_BYTES], int.from_bytes(said[-NUMBER_BYTES:], "big")
        if not hmac.compare_digest(secret, self.secret.encode()) or number >= self._num_nodes:
            visitor.close()
            return
        if number in self._visitors:
            self._visitors[number].close()
        self._visitors[number] = visitor

    def close(self) -> None:
        for one in (self._socket, *self._visitors.values(), *self._silent):
            one.close()


def knock(place: tuple[str, int], secret: str, number: int) -> socket.socket:
    """Return a connection to a door, on which this node has introduced itself.  OSError."""
    connection = socket.create_connection(place, KNOCK_S)
    try:
        connection.sendall(secret.encode() + number.to_bytes(NUMBER_BYTES, "big"))
    except OSError:
        connection.close()
        raise
    return connection


@dataclass
class Neighbour:
    """The connection to the door of the next node of the round."""

    number: int
    _me: int
    _place: tuple[str, int]
    _secret: str
    _connection: socket.socket | None

    @classmethod
    def of(cls, nodes: Sequence[Introduction], me: int) -> Neighbour | None:
        """Return the neighbour of node `me`; None if there is none or its door cannot be reached."""
        number = (me + 1) % len(nodes)
        neighbour = nodes[number]
        own = set(nodes[me].addresses)
        addresses = [a for a in neighbour.addresses if a not in own]
        for address in sorted(addresses, key=lambda a: ipaddress.ip_address(a).version)[:2]:
            place, secret = (address, neighbour.door), neighbour.secret
            with suppress(OSError):
                if number != me:
                    return cls(number, me, place, secret, knock(place, secret, me))
        return None

    def is_gone(self) -> bool:
        """Tell whether the neighbour has ended.  A connection that broke for another reason is renewed."""
        if self._connection is None or not wait_readable([self._connection]):
            return False
        self.close()
        try:
            self._connection = knock(self._place, self._secret, self._me)
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
