"""The address by which other hosts reach this one."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def own_address() -> str:
    """An address of this host that the other ranks can reach.

    In this order: MASTER_ADDR, if it is an address of this host; the address of the host's own name, unless
    that is loopback, which other hosts cannot use; the source address of outgoing packets.
    """
    master = os.environ.get("MASTER_ADDR", "")
    if master and _is_ours(master):
        return master
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127.") and _is_ours(address):
            return address
    for outside in (master, "192.0.2.1"):  # a connected UDP socket sends nothing
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect((outside, 9))
            return str(s.getsockname()[0])
    return "127.0.0.1"


def _is_ours(name: str) -> bool:
    """True if the name resolves to an address that can be bound on this host."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as s:
                s.bind(address)
                return True
    return False
