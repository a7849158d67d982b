"""Cutting this process's connections to its peers: whatever is blocked in a collective fails at once.

A gloo rank whose neighbours in the ring are alive never learns that another rank died.  Neither `abort()`
of the group nor its deletion helps, since meshes and DTensors hold it; shutting down its sockets does.
Groups on devices are aborted as by torch's `_abort_process_group`, but their registries stay (`registries`
empties them).

Only connections to other ranks are cut, found by their other end.  On this node: a process that is a rank
has it.  On another node: the kernel has chosen both ports, as it does for gloo and NCCL; an object store or
a database has a port that somebody chose.  The connection to the job's store is left alone.
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

from holdfast.base.errors import need

need("torch", c10d, "_world")
need("torch", dist.ProcessGroup, "_device_types", "_get_backend")

_Address = tuple[str, int]
ABORT_S = 5.0
"""Seconds to wait for aborts; after twice that time the launcher kills the rank."""
LISTENS = "0A"
"""The kernel's code for a listening socket."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A TCP connection as the kernel lists it."""

    local: _Address
    remote: _Address
    inode: int


def cut_connections(pids: Iterable[int], hosts: Iterable[str], store_port: int) -> int:
    """Shut down the connections to ranks: processes `pids` of this node, and ranks on other `hosts`.

    Returns their number.  Thread-safe; calls that wait for these connections fail within milliseconds.
    """
    with suppress(Exception):  # the connections must be cut even if an abort fails
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
    """Shut down the connections to the store of the job, so that waits for its keys fail.

    For a rank that does not leave otherwise.  The next attempt has another store.  Returns their number.
    """
    known = {c.inode: c.remote for c in connections()}
    mine = ((fd, known.get(inode)) for fd, inode in sockets(os.getpid()))
    return sum(_shut(fd) for fd, remote in mine if remote is not None and remote[1] == port)


def on_devices() -> list[Any]:
    """Return the backends of all process groups that work on devices, such as NCCL's.

    The name of a group's backend does not say: it may be "undefined" or "cpu:gloo,cuda:nccl".
    """
    found = []
    names = dict(c10d._world.pg_names) if dist.is_available() else {}
    for group in sorted(names, key=lambda group: str(names[group]), reverse=True):
        for device in group._device_types:
            with suppress(RuntimeError):
                if (
                    device.type != "cpu"
                    and (backend := group._get_backend(device)).name() != "gloo"
                ):
                    found.append(backend)
    return found


def abort_on_devices() -> None:
    """Abort the collectives on devices: their kernels end, and threads that wait for them go on.

    Each backend is aborted on its own thread, all at the same time: an abort may not end before the others
    have begun, and NCCL's group calls work for the calling thread only.  Blocks for up to `ABORT_S`.
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
    with suppress(Exception):  # nothing else can be done about a failed abort
        backend.abort()


def first_free_port() -> int:
    """Return the lowest port that the kernel chooses by itself."""
    with suppress(OSError, ValueError):
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return 0


def _shut(fd: int) -> bool:
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as mine:
        mine.shutdown(socket.SHUT_RDWR)
        return True
    return False


def sockets(pid: int) -> Iterator[tuple[int, int]]:
    """Yield descriptor and inode of every socket of a process; none if it is gone or of another user."""
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    yield int(name), int(target[8:-1])


def connections() -> Iterator[Connection]:
    """Yield every TCP connection in this network namespace, without listening sockets."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError), open(f"/proc/self/net/{table}") as lines:
            next(lines)
            for line in lines:
                fields = line.split()
                if fields[3] != LISTENS:
                    yield Connection(_address(fields[1]), _address(fields[2]), int(fields[9]))


def _address(text: str) -> _Address:
    """Return host and port of `0100007F:1F90`; an IPv4 address mapped into IPv6 as IPv4."""
    host, _, port = text.partition(":")
    data = b"".join(bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8))
    if len(data) == 16 and data.startswith(bytes(10) + b"\xff\xff"):
        data = data[12:]
    family = socket.AF_INET if len(data) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, data), int(port, 16)
