"""A gloo process group that is not registered with torch.distributed.

`torch.distributed.new_group` is itself a collective of all ranks, and registers the group for ever.  This
group needs only a store; after a failed operation its connections close at once, so that waiting ranks
notice.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from holdfast.base.errors import need

_EXIT_S = 0.05
"""Seconds between two checks, at exit, whether gloo's threads sleep."""
_LONGEST_EXIT_S = 2.0
"""Seconds in which they must release the last operations' tensors."""

_TASKS = Path("/proc/self/task")
_groups: weakref.WeakSet[Gloo] = weakref.WeakSet()
_has_made_any = False


class Gloo:
    """Collectives on the CPU.  Each blocks; RuntimeError after the group's limit or if a rank is gone."""

    def __init__(self, store: Any, rank: int, size: int, limit_s: float) -> None:
        """Connect to every other rank.  Collective; blocks."""
        need("torch", dist.ProcessGroupGloo, "_allgather_base")
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=limit_s))
        global _has_made_any
        _groups.add(self)
        _has_made_any = True

    # Nobody keeps the `Work` of an operation: it would keep the connections.

    def all_to_all(
        self,
        into: torch.Tensor,
        source: torch.Tensor,
        into_sizes: Sequence[int] = (),
        source_sizes: Sequence[int] = (),
    ) -> None:
        """Send each rank its part of `source`; without sizes, all parts are equally long."""
        options = c10d.AllToAllOptions()
        self._group.alltoall_base(
            into, source, list(into_sizes), list(source_sizes), options
        ).wait()

    def all_gather(self, into: torch.Tensor, mine: torch.Tensor) -> None:
        """Gather every rank's tensor, one after the other, into `into`."""
        self._group._allgather_base(into, mine, c10d.AllgatherOptions()).wait()

    def max(self, tensor: torch.Tensor) -> None:
        """Set every element to its maximum over the ranks."""
        options = c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._group.allreduce([tensor], options).wait()

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Copy the tensor of rank `source` to all ranks."""
        broadcast(self._group, tensor, source).wait()

    def end(self) -> None:
        """Close every connection."""
        self._group = None


def broadcast(group: Any, tensor: torch.Tensor, source: int) -> Any:
    """Begin a broadcast of one rank's tensor over a group of torch's; return its `Work`."""
    options = c10d.BroadcastOptions()
    options.rootRank, options.rootTensor = source, 0
    return group.broadcast([tensor], options)


def gloo_of_torch() -> Any:
    """The gloo backend of the default process group; None if it has none."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    (backend_for,) = need("torch", dist.group.WORLD, "_get_backend")
    try:
        found: Any = backend_for(torch.device("cpu"))
    except (RuntimeError, dist.DistError):
        return None
    return found if isinstance(found, dist.ProcessGroupGloo) else None


def _end_all() -> None:
    """Keep gloo's threads from aborting the process at exit.

    After an operation gloo's thread releases its tensors, for which it needs the interpreter.  If that is
    gone, torch calls `std::terminate`, and a successful run ends with SIGABRT.  So threads of holdfast's
    groups are joined, and those of the job's groups, even of a destroyed one that meshes or DTensors hold,
    get time until they sleep.
    """
    for group in tuple(_groups):
        group.end()
    now = _threads()
    if not (now or _has_made_any or (dist.is_available() and dist.is_initialized())):
        return
    before, until = None, time.monotonic() + _LONGEST_EXIT_S
    while (now != before or any("S (sleeping)" not in t for t in now)) and time.monotonic() < until:
        time.sleep(_EXIT_S)  # lets a thread that waits for the GIL have it
        before, now = now, _threads()


def _threads() -> list[str]:
    """Return the state, and the number of context switches, of each thread that may be gloo's.

    `pt_gloo_runloop` holds the tensors (`gloo_tcp_loop` never sleeps).  A thread that has not run yet has
    the name of the process.
    """
    found, own = [], Path("/proc/self/comm").read_text().strip() if _TASKS.exists() else ""
    of_python = {thread.native_id for thread in threading.enumerate()}
    of_python.add(threading.get_native_id())  # a forked main thread has its parent's number
    for task in _TASKS.glob("*"):
        with suppress(OSError, ValueError):  # the thread may have ended
            name, *lines = (task / "status").read_text().splitlines()
            if int(task.name) not in of_python and ("pt_gloo" in name or name.endswith(f"\t{own}")):
                found.append(" ".join(t for t in lines if t.startswith(("Pid", "State", "vol"))))
    return sorted(found)


atexit.register(_end_all)
os.register_at_fork(after_in_child=_groups.clear)  # a forked child has none of their threads
