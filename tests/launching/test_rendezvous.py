"""The thread that asks the rendezvous of several nodes: it is given up once, and ends once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

from holdfast.base.calls import result_of
from holdfast.launch.rendezvous import Rendezvous
from ports import free_port

from .test_run import until

MAX_NODES = 200
"""At so many a thread that has just begun asks nothing for 0.2 s."""


class Node:
    """A node that has met all there are, itself, and what it has said."""

    def __init__(self) -> None:
        given = RendezvousParameters(
            "c10d", f"127.0.0.1:{free_port()}", "one", 1, MAX_NODES, local_addr="127.0.0.1",
            last_call_timeout=1,
        )  # fmt: skip
        self.said: list[str] = []
        self.handler = Rendezvous(registry.get_rendezvous_handler, given, self.said.append)
        self.handler.next_rendezvous()


@pytest.fixture
def node() -> Iterator[Node]:
    met = Node()
    yield met
    met.handler.shutdown()


def test_a_silent_rendezvous_of_several_endpoints_is_given_up_once(node: Node) -> None:
    """Its new thread is not given up before it has asked."""
    torchs, gate = node.handler._torchs, threading.Event()
    torchs.renew_heartbeats(begin=False)
    torchs._endpoints *= 2
    first = node.handler._calls.thread
    node.handler._asked(gate.wait)
    until(lambda: torchs.is_silent)
    threads = set()
    while "the rendezvous answers again" not in node.said and len(threads) < 9:
        node.handler.check()
        threads.add(node.handler._calls.thread)
        time.sleep(0.01)
    gate.set()
    assert len(threads) == 1 and first not in threads


def test_a_rendezvous_is_silent_from_the_question_on(node: Node) -> None:
    """Its thread may have had nothing to ask for long before."""
    torchs = node.handler._torchs
    torchs.turned_at = torchs.answered_at = -3600.0
    silent_s = node.handler._asked(lambda: torchs.silent_s)
    assert result_of(silent_s, 60.0, TimeoutError) < 60.0


@pytest.mark.parametrize("end", ["leave", "shutdown"])
def test_a_node_that_has_ended_its_rendezvous_leaves_without_a_word(node: Node, end: str) -> None:
    """The launcher leaves when its workers stop, and at a signal that comes then."""
    getattr(node.handler, end)()
    thread = node.handler._calls.thread
    node.handler.leave()
    assert node.handler._calls.thread is thread and not thread.is_alive()
