"""Strangers at the ports of a launcher: they run nothing in it, and take nothing that it needs."""

from __future__ import annotations

import base64
import fcntl
import os
import pickle
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousParameters,
    RendezvousStateError,
    registry,
)

from capabilities import LISTENERS
from holdfast.launch.neighbours import NUM_SILENT, Door, Neighbour, knock
from holdfast.launch.nodes import Introduction
from holdfast.launch.rendezvous import quick
from holdfast.launch.rendezvous_state import as_pickle
from holdfast.launch.sockets import wait_readable
from ports import free_port

from .test_run import until


class Touches:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@contextmanager
def met(max_nodes: int, port: int, said: list[str], local_addr: str | None = None) -> Iterator[Any]:
    """The rendezvous of a node that has met all there are: itself."""
    given = RendezvousParameters(
        "c10d", f"127.0.0.1:{port}", "one", 1, max_nodes, local_addr=local_addr, last_call_timeout=1
    )  # fmt: skip
    with quick(said.append):
        handler = registry.get_rendezvous_handler(given)
        try:
            yield handler.next_rendezvous()
        finally:
            handler.shutdown()


def test_a_pickle_in_the_state_of_the_rendezvous_is_not_unpickled(tmp_path: Path) -> None:
    said, port, made = list[str](), free_port(), tmp_path / "made"
    with met(2, port, said):
        stranger = dist.TCPStore(
            "127.0.0.1", port, None, False, timeout=timedelta(seconds=60), wait_for_workers=False
        )
        state = stranger.get("torch.rendezvous.one")
        evil = base64.b64encode(pickle.dumps(Touches(made))).decode()
        while not said:  # a sign of life of the node, on its way, may have been later
            stranger.set("torch.rendezvous.one", evil)
        assert "the state of the rendezvous is not of `holdfast run`" in said[0]
        stranger.set("torch.rendezvous.one", state.decode())
        until(lambda: said[-1] == "the rendezvous answers again")
    assert not made.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"round": 1}',
        pickle.dumps({}),
        b'{"__class__": "os"}',
    ],
)
def test_what_is_no_state_is_refused(data: bytes) -> None:
    with pytest.raises(RendezvousStateError, match="torchrun, another version of holdfast or a"):
        as_pickle(data)


def listening() -> set[str]:
    """The addresses at which this process listens, as the kernel writes them."""
    fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    ours = {os.readlink(fd) for fd in fds if os.path.islink(fd)}
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in ours}


@pytest.mark.parametrize("max_nodes", [1, 2])
def test_who_meets_at_loopback_listens_nowhere_else(
    max_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    LISTENERS.require()
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    before = listening()
    local_addr = None if max_nodes == 1 else "127.0.0.1"  # by default several have a name
    with met(max_nodes, free_port(), [], local_addr) as info:
        found = listening() - before
        of_ranks = info.bootstrap_store_info
        assert of_ranks.master_addr == "127.0.0.1"
        assert f"0100007F:{of_ranks.master_port:04X}" in found
        assert {place.rpartition(":")[0] for place in found} == {"0100007F"}
        assert len(found) == (1 if max_nodes == 1 else 3)


def test_a_door_keeps_one_visitor_for_each_node_and_few_that_say_nothing() -> None:
    with ExitStack() as stack:
        door = stack.enter_context(closing(Door(3)))
        place = ("127.0.0.1", door.port)
        first = stack.enter_context(knock(place, door.secret, 1))
        until(lambda: len(door.visitors()) == 1)
        open_before = len(os.listdir("/proc/self/fd"))
        silent = [
            stack.enter_context(socket.create_connection(place)) for _ in range(3 * NUM_SILENT)
        ]
        liars = [
            stack.enter_context(knock(place, *said))
            for said in (("0" * 32, 1), (door.secret, 3), ("", 0), ("x" * 1000, 0))
        ]
        while not all(wait_readable([liar]) for liar in liars):  # each is let go
            assert len(door.visitors()) == 1
            num_kept = len(os.listdir("/proc/self/fd")) - open_before - len(silent) - len(liars)
            assert num_kept <= NUM_SILENT
        assert not wait_readable([first])
        second = stack.enter_context(knock(place, door.secret, 1))
        until(lambda: bool(door.visitors() and wait_readable([first])))
        assert not wait_readable([second]) and len(door.visitors()) == 1


def test_a_door_lets_go_who_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.launch.neighbours.INTRODUCTION_S", 0.0)
    with closing(Door(2)) as door, socket.create_connection(("127.0.0.1", door.port)) as stranger:
        until(lambda: bool(door.visitors() or wait_readable([stranger])))
        assert not door.visitors()


def test_a_neighbour_is_seen_above_the_descriptors_that_select_knows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("the system allows too few descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    door = Door(2)
    nodes = [
        Introduction("a", 1, [], 0),
        Introduction("b", 1, ["127.0.0.1"], door.port, door.secret),
    ]
    neighbour = Neighbour.of(nodes, 0)
    assert neighbour is not None and neighbour._connection is not None
    low, high = neighbour._connection, fcntl.fcntl(neighbour._connection, fcntl.F_DUPFD, 2000)
    neighbour._connection = socket.socket(fileno=high)
    low.close()
    until(lambda: len(door.visitors()) == 1)
    assert not neighbour.is_gone()
    door.close()
    assert neighbour.is_gone()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


EXHAUSTED = """
import os, resource
from holdfast.launch.channel import LauncherEnd
from holdfast.launch.sockets import SpareFiles, raise_limit

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
raise_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
spare = SpareFiles()
spare.hold()
try:
    while True:
        os.dup(0)
except OSError:
    pass
spare.hold()
try:
    LauncherEnd()
    raise AssertionError
except OSError:
    spare.free()
ends = [LauncherEnd() for _ in range(16)]
for end in ends:
    end.other.close()
    end.close()
spare.hold()
"""


def test_descriptors_are_held_back_for_new_workers() -> None:
    done = subprocess.run([sys.executable, "-c", EXHAUSTED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
