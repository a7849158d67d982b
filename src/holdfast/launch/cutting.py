"""Cutting this process's connections to its peers: whatever is blocked in a collective fails at once.

A gloo rank whose neighbours in the ring are alive is never told that another rank died, and neither
`abort()` of the group nor its end changes that: meshes and DTensors hold it.  What does is to shut down its
sockets.  Groups on devices are aborted as torch's `_abort_process_group` does, but that their registers are
left to whoever ends them.

Only connections to other ranks are cut.  The other end of one tells whose it is: on this node by the
process that has it.  On another node it is a rank's if the kernel has chosen both ports, as it does for
gloo and NCCL: an object store or a database that runs there has a port that somebody chose.  The store of
the job is spared as well.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

Address = tuple[str, int]
ABORT_S = 5.0
"""Seconds for which aborts are waited for; after twice that the launcher ends a rank."""
LISTENS = "0A"
"""The state of a socket that listens, as the kernel lists it."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A TCP connection as the kernel lists it."""

    local: Address
    remote: Address
    inode: int


def cut(pids: Iterable[int], hosts: Iterable[str], store_port: int) -> int:
    """Shut down the connections to ranks: processes `pids` of this node, and those on other `hosts`.

    Returns how many there were.  Thread-safe; what waits for them fails within milliseconds.
    """
    with suppress(Exception):  # whatever it says, the connections are to be gone
        abort_on_devices()
    known = {(c.local, c.remote): c.inode for c in connections()}
    of_ranks = {inode for pid in pids for _, inode in sockets(pid)}
    others = set(hosts)
    mine = dict((inode, fd) for fd, inode in sockets(os.getpid()))
    first_free, count = first_free_port(), 0
    for (local, remote), inode in known.items():
        if inode not in mine:
            continue
        peer = known.get((remote, local))
        is_rank = peer in of_ranks
        if peer is None:
            is_rank = remote[0] in others and min(local[1], remote[1]) >= first_free
        if is_rank and remote[1] != store_port:
            count += _shut(mine[inode])
    return count


def cut_store(port: int) -> int:
    """Shut down the connections to the store of the job: whoever waits for a key there fails.

    For a rank that does not leave otherwise.  The next attempt has another store.  Returns their number.
    """
    known = {c.inode: c.remote for c in connections()}
    mine = ((fd, known.get(inode)) for fd, inode in sockets(os.getpid()))
    return sum(_shut(fd) for fd, remote in mine if remote is not None and remote[1] == port)


def on_devices() -> list[Any]:
    """Return the NCCL backends, or others for devices, of all process groups.

    The name of a group's backend does not tell: it may be "undefined", or "cpu:gloo,cuda:nccl".
    """
    found = []
    names = dict(c10d._world.pg_names) if dist.is_available() else {}
    for group in sorted(names, key=lambda group: str(names[group]), reverse=True):
        for device in getattr(group, "_device_types", ()):
            with suppress(RuntimeError):
                if (
                    device.type != "cpu"
                    and (backend := group._get_backend(device)).name() != "gloo"
                ):
                    found.append(backend)
    return found


def abort_on_devices() -> None:
    """Abort what runs there: kernels of collectives end, and a thread that waits for them goes on.

    All at once, each on a thread of its own: one may not end before the others have begun to, and what
    torch has to group NCCL's is of the calling thread, not of those that abort.  Blocks for `ABORT_S`.
    """
    threads = [
        threading.Thread(target=_abort, args=(backend,), name="holdfast-abort", daemon=True)
        for backend in on_devices()
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + ABORT_S
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0.0))


def _abort(backend: Any) -> None:
    with suppress(Exception):  # whatever it says, there is nothing else to be done
        backend.abort()


def first_free_port() -> int:
    """Return the lowest port that the kernel gives to who does not ask for one."""
    with suppress(OSError, ValueError):
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return 0


def _shut(fd: int) -> bool:
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as mine:
        mine.shutdown(socket.SHUT_RDWR)
        return True
    return False


def sockets(pid: int) -> Iterator[tuple[int, int]]:
    """Yield descriptor and inode of every socket of a process; none if it is gone or somebody else's."""
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    yield int(name), int(target[8:-1])


def connections() -> Iterator[Connection]:
    """Yield every TCP connection in this network namespace; sockets that listen are none."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError), open(f"/proc/self/net/{table}") as lines:
            next(lines)
            for line in lines:
                fields = line.split()
                if fields[3] != LISTENS:
                    yield Connection(_address(fields[1]), _address(fields[2]), int(fields[9]))


def _address(text: str) -> Address:
    """Return host and port of `0100007F:1F90`; an IPv4 address within IPv6 as the former."""
    host, _, port = text.partition(":")
    data = b"".join(bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8))
    if len(data) == 16 and data.startswith(bytes(10) + b"\xff\xff"):
        data = data[12:]
    family = socket.AF_INET if len(data) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, data), int(port, 16)
