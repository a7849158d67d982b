"""Ports for ranks to meet at, which nobody takes between their choice and their use.

A port that was free a moment ago may be another process's when a rank listens there seconds later: the
kernel gives the ports of its own range to whoever asks for any.  These are below that range, and handed
out in turn to all processes of the machine that run tests.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

NUM_PORTS = 10_000
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Of the ports that the kernel chooses from."""


def free_port() -> int:
    """A port on which nobody listens, and that no other test is given for thousands of calls."""
    first = int(RANGE.read_text().split()[0]) - NUM_PORTS
    while True:
        port = first + _next_number() % NUM_PORTS
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(("", port))
                return port
            except OSError:
                continue  # of a service of this machine


def _next_number() -> int:
    """How often this was called before on this machine."""
    path = Path(tempfile.gettempdir()) / f"holdfast-test-ports-{os.getuid()}"
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        number = int(file.read() or b"0")
        file.truncate(0)
        file.write(b"%d" % (number + 1))
    return number
