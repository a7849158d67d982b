"""Sockets of a launcher, and its descriptors: strangers who knock find little, and take nothing.

Who is told an address of loopback is on this node: a socket for him listens at loopback alone.  What other
nodes have to reach listens everywhere.  A stranger who opens connections there by the thousand takes the
descriptors of the process: so the limit on these is as high as the system allows, some are held back for
what a recovery needs, and sockets are looked at by `poll`, since `select` knows no descriptor above 1,023.
"""

from __future__ import annotations

import ipaddress
import os
import resource
import select
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch.distributed import TCPStore

NUM_SPARE = 128
"""Descriptors that are held back: for sockets of workers that are forked, and a store and its clients."""


class HasFileno(Protocol):
    def fileno(self) -> int: ...


def readable(sockets: Iterable[int | HasFileno], limit_s: float | None = 0.0) -> set[int]:
    """Wait until one of these can be read, or has ended, but no longer than `limit_s`, if it is given;
    return the descriptors of those that can, or have."""
    poll = select.poll()
    for one in sockets:
        poll.register(one, select.POLLIN)
    return {number for number, _ in poll.poll(None if limit_s is None else 1000 * limit_s)}


def loopback_of(host: str | None) -> str:
    """Return the address of loopback that a host is said to have, if it is one for certain; else nothing: a
    name may be of loopback here, and of something else on other nodes."""
    if host == "localhost":
        with suppress(OSError), socket.socket(socket.AF_INET6) as trial:
            found = {str(one[4][0]) for one in socket.getaddrinfo(host, 0, socket.AF_INET6)}
            trial.bind(("::1", 0))
            return "::1" if "::1" in found else "127.0.0.1"  # torch's clients take IPv6 first
        return "127.0.0.1"
    with suppress(ValueError):
        return str(host) if ipaddress.ip_address(str(host)).is_loopback else ""
    return ""


def listener(host: str | None, port: int = 0) -> socket.socket:
    """Return a socket that listens at loopback if `host` is of it, else at every address.  OSError."""
    place = loopback_of(host)
    if place:
        family = socket.AF_INET6 if ":" in place else socket.AF_INET
        return socket.create_server((place, port), family=family)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both)


def store_at(host: str, port: int, is_master: bool = False, **known: Any) -> TCPStore:
    """Return torch's store.  One that is served from here, and reached at loopback, listens there alone."""
    from torch.distributed import TCPStore

    if is_master and loopback_of(host):
        with suppress(OSError):  # this process serves one there, or another: torch finds out
            listening = listener(host, port)
            port = listening.getsockname()[1]
            known["master_listen_fd"] = listening.detach()
    return TCPStore(host, port, is_master=is_master, **known)


def raise_limit() -> None:
    """Let this process have as many descriptors as the system allows it."""
    with suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class SpareFiles:
    """Descriptors that are held back until something needs them."""

    def __init__(self) -> None:
        self._held: list[int] = []

    def hold(self) -> None:
        """Hold back as many as there are, up to the number."""
        with suppress(OSError):
            while len(self._held) < NUM_SPARE:
                self._held.append(os.open(os.devnull, os.O_RDONLY))

    def free(self) -> None:
        while self._held:
            os.close(self._held.pop())
