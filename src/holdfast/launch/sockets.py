"""Sockets and file descriptors of a launcher, safe against strangers who connect to its ports.

A socket whose clients get a loopback address listens at loopback only, since these clients are on this
node.  A socket for other nodes listens at every address.  A stranger who opens thousands of connections
there uses up the descriptors of the process.  So their limit is as high as the system allows, some are held
back for a recovery, and sockets are polled with `poll`, since `select` knows no descriptor above 1,023.
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
"""Descriptors held back: for the sockets of new workers, and for a store and its clients."""


class HasFileno(Protocol):
    def fileno(self) -> int: ...


def wait_readable(sockets: Iterable[int | HasFileno], limit_s: float | None = 0.0) -> set[int]:
    """Wait until a socket can be read or has ended, for at most `limit_s` seconds (None: no limit); return
    the descriptors of those sockets."""
    poll = select.poll()
    for each in sockets:
        poll.register(each, select.POLLIN)
    return {number for number, _ in poll.poll(None if limit_s is None else 1000 * limit_s)}


def loopback_of(host: str | None) -> str:
    """Return the loopback address of a host, or an empty text if it is not certainly loopback: a name may
    mean loopback on this node and something else on others."""
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
    """Return a socket that listens at loopback if `host` is loopback, else at every address.  OSError."""
    place = loopback_of(host)
    if place:
        family = socket.AF_INET6 if ":" in place else socket.AF_INET
        return socket.create_server((place, port), family=family)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both)


def store_at(host: str, port: int, is_master: bool = False, **known: Any) -> TCPStore:
    """Return torch's store.  If this process serves it and `host` is loopback, it listens at loopback
    only, where torch's store takes a listening socket."""
    from torch.distributed import TCPStore

    from holdfast.core.group.listening import TAKES_LISTENER

    if is_master and loopback_of(host) and TAKES_LISTENER:
        with suppress(OSError):  # the port is taken, maybe by this process: torch handles that
            listening = listener(host, port)
            port = listening.getsockname()[1]
            known["master_listen_fd"] = listening.detach()
    return TCPStore(host, port, is_master=is_master, **known)


def raise_limit() -> None:
    """Raise this process's limit of descriptors as far as the system allows."""
    with suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class SpareFiles:
    """Descriptors held back until a recovery needs them."""

    def __init__(self) -> None:
        self._held: list[int] = []

    def hold(self) -> None:
        """Hold back up to `NUM_SPARE` descriptors."""
        with suppress(OSError):
            while len(self._held) < NUM_SPARE:
                self._held.append(os.open(os.devnull, os.O_RDONLY))

    def free(self) -> None:
        while self._held:
            os.close(self._held.pop())
