"""The door of a launcher: a port whose connections end with it, so that its neighbour knows at once.

A node whose processes are gone is struck off only after some seconds without a sign of life.  But its
kernel tells sooner: the connection to a process that has ended breaks, and the next one is refused.  In a
round each launcher keeps one connection, to the next one of the ring.

A node that is cut off says nothing, here as elsewhere.
"""

from __future__ import annotations

import ipaddress
import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from holdfast.run.nodes import Introduction

KNOCK_S = 0.5


class Door:
    """A listening port, to which the launcher before this one in the ring connects."""

    def __init__(self) -> None:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        self._socket.setblocking(False)
        self._visitors: list[socket.socket] = []

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def visitors(self) -> list[socket.socket]:
        """Let in who has knocked, let go who has left; return who is there."""
        with suppress(OSError):
            while True:
                self._visitors.append(self._socket.accept()[0])
        gone = select.select(self._visitors, [], [], 0)[0] if self._visitors else []
        for visitor in gone:
            visitor.close()
            self._visitors.remove(visitor)
        return self._visitors

    def close(self) -> None:
        for one in (self._socket, *self._visitors):
            one.close()


@dataclass
class Neighbour:
    """The connection to the door of the next node of the round."""

    number: int
    _place: tuple[str, int]
    _connection: socket.socket | None

    @classmethod
    def of(cls, nodes: Sequence[Introduction], me: int) -> Neighbour | None:
        """Return the neighbour of node `me`; None if its door cannot be reached, or if there is none."""
        number = (me + 1) % len(nodes)
        next_one = nodes[number]
        own = set(nodes[me].addresses)
        addresses = [a for a in next_one.addresses if a not in own]
        for address in sorted(addresses, key=lambda a: ipaddress.ip_address(a).version)[:2]:
            place = (address, next_one.door)
            with suppress(OSError):
                if number != me:
                    return cls(number, place, socket.create_connection(place, KNOCK_S))
        return None

    def is_gone(self) -> bool:
        """Tell whether that launcher has ended.  A connection that broke for another reason is renewed."""
        if self._connection is None or not select.select([self._connection], [], [], 0)[0]:
            return False
        self.close()
        try:
            self._connection = socket.create_connection(self._place, KNOCK_S)
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
