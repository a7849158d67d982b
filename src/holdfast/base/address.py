"""The address by which other hosts reach this one."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def own_address() -> str:
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
    """True if a name is of an address that can be bound on this host."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as s:
                s.bind(address)
                return True
    return False
