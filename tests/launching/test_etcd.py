"""A rendezvous on etcd whose server fails for a while: nobody stands still, and no word is lost.

etcd is a real one.  Launchers reach it through a proxy that it advertises as its own address.
"""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    registry,
)

from holdfast.launch.nodes import EndOfRound, Introduction
from holdfast.launch.rendezvous import Rendezvous
from holdfast.launch.torch_rendezvous import as_lost_connection
from ports import free_port

from .test_joining import TRAINS
from .test_run import environment, until

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd-server, of Debian"),
    pytest.mark.skipif(find_spec("etcd") is None, reason="no python-etcd"),
]

STORE, STATE = "/v2/keys/torch/elastic/store", "/v2/keys/torch/elastic/rendezvous"


class Etcd:
    """One member of etcd, and a proxy that refuses the requests that `refuses` names, does not tell what
    came of those that `loses` names, and answers others only after `holds_s`."""

    def __init__(self, folder: Path) -> None:
        self.port, self._behind, self._folder = free_port(), free_port(), folder
        self.refuses: Callable[[str, str], bool] = lambda method, path: False
        self.loses: Callable[[str, str], bool] = lambda method, path: False
        self.holds_s: Callable[[str, str], float] = lambda method, path: 0.0
        self.num_refused = 0
        self.begin()
        self._proxy = ThreadingHTTPServer(("127.0.0.1", self.port), self._requests())
        Thread(target=self._proxy.serve_forever, daemon=True).start()

    def begin(self) -> None:
        """Start it, on the data that it has."""
        urls = [f"http://127.0.0.1:{port}" for port in (self._behind, self.port, free_port())]
        command = ["etcd", "--enable-v2", f"--data-dir={self._folder}"]
        command += [f"--listen-client-urls={urls[0]}", f"--advertise-client-urls={urls[1]}"]
        command += [f"--listen-peer-urls={urls[2]}", f"--initial-advertise-peer-urls={urls[2]}"]
        command += [f"--initial-cluster=default={urls[2]}"]
        with self._folder.with_suffix(".log").open("a") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until(self._is_well)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        self._proxy.shutdown()
        self._proxy.server_close()
        self.kill()

    def forget(self, run_id: str) -> None:
        """Do what etcd does when the time of a rendezvous' state is over."""
        url = f"http://127.0.0.1:{self._behind}{STATE}/{run_id}"
        urllib.request.urlopen(urllib.request.Request(url, method="DELETE")).read()

    def _is_well(self) -> bool:
        with suppress(OSError):
            url = f"http://127.0.0.1:{self._behind}/health"
            return b"true" in urllib.request.urlopen(url).read()
        return False

    def _requests(etcd) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Request(BaseHTTPRequestHandler):
            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                self.close_connection = True
                if etcd.refuses(self.command, self.path):
                    etcd.num_refused += 1
                    return
                time.sleep(etcd.holds_s(self.command, self.path))
                behind = http.client.HTTPConnection("127.0.0.1", etcd._behind)
                try:
                    behind.request(self.command, self.path, body, dict(self.headers))
                    answer = behind.getresponse()
                    status, fields, content = answer.status, answer.getheaders(), answer.read()
                except (OSError, http.client.HTTPException):
                    return
                finally:
                    behind.close()
                if not etcd.loses(self.command, self.path):
                    self._answer(status, content, dict(fields))

            def _answer(self, status: int, content: bytes, fields: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in fields.items():
                    if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                        self.send_header(name, value)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                with suppress(OSError):
                    self.wfile.write(content)

            def log_message(self, *of: Any) -> None:
                pass

            do_GET = do_PUT = do_POST = do_DELETE = _pass_on  # noqa: N815

        return Request


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    server = Etcd(tmp_path / "etcd")
    yield server
    server.end()


class Nodes:
    """Two nodes of one run, as their launchers see them."""

    def __init__(self, port: int, backend: str = "etcd-v2") -> None:
        self.said: list[str] = []
        self.handlers: list[Rendezvous] = []
        self._of = backend, port
        for _ in range(2):
            self.add()

    def add(self) -> Rendezvous:
        """Return one more node."""
        (backend, port), number = self._of, len(self.handlers)
        config = {"join_timeout": 60, "last_call_timeout": 1, "is_host": int(number == 0)}
        config |= {"keep_alive_interval": 1, "keep_alive_max_attempt": 10}
        given = RendezvousParameters(
            backend, f"127.0.0.1:{port}", "run", 2, 2, local_addr="127.0.0.1", **config
        )
        create = registry.get_rendezvous_handler
        self.handlers.append(Rendezvous(create, given, self.said.append))
        self.handlers[-1].introduction = Introduction(f"node{number}", 1, [])
        return self.handlers[-1]

    def meet(self) -> None:
        """Have both meet; raise what one of them raises."""
        with ThreadPoolExecutor(2) as pool:
            for met in [pool.submit(node.next_rendezvous) for node in self.handlers]:
                met.result(300)

    @property
    def have_complained(self) -> bool:
        return sum("does not answer" in text for text in self.said) >= 2

    def are_all(self, what: str) -> bool:
        return all([node.are_all(what) for node in self.handlers])

    def look(self) -> None:
        """Wait until both have looked once more."""
        now = time.monotonic()
        until(lambda: all(node.view.at_s > now + 0.2 for node in self.handlers), 30)

    def end(self) -> None:
        for node in self.handlers:
            node.shutdown()


@pytest.fixture
def nodes(etcd: Etcd) -> Iterator[Nodes]:
    both = Nodes(etcd.port)
    yield both
    etcd.refuses = lambda method, path: False
    both.end()


def test_the_store_fails_while_the_state_is_read(etcd: Etcd, nodes: Nodes) -> None:
    """Launchers look again, and hear the end of the run."""
    nodes.meet()
    etcd.refuses = lambda method, path: path.startswith(STORE)
    until(lambda: etcd.num_refused >= 8, 30)
    etcd.refuses = lambda method, path: False
    until(lambda: nodes.are_all("done"), 30)
    until(lambda: nodes.are_all("out"), 30)
    assert nodes.have_complained


def test_what_is_said_while_nothing_can_be_written_is_heard_later(etcd: Etcd, nodes: Nodes) -> None:
    nodes.meet()
    etcd.refuses = lambda method, path: method == "PUT" and path.startswith(STORE)
    first, second = nodes.handlers
    first.end_round(is_calm=True)
    card = msgspec.json.encode(EndOfRound([]))
    first.say("card", card)
    until(lambda: etcd.num_refused >= 4, 30)
    etcd.refuses = lambda method, path: False
    until(lambda: second.view.ends and second.view.is_calm, 30)
    second.say("card", card)
    for node in nodes.handlers:
        cards, lost = node.cards()
        assert sorted(cards) == [0, 1] and not lost


def test_the_store_fails_while_nodes_meet(etcd: Etcd, nodes: Nodes) -> None:
    etcd.refuses = lambda method, path: path.startswith(STORE)

    def lets_through() -> None:
        until(lambda: etcd.num_refused >= 8, 30)
        etcd.refuses = lambda method, path: False

    Thread(target=lets_through).start()
    nodes.meet()
    until(lambda: nodes.are_all("done"), 30)


def test_a_rendezvous_is_closed_though_the_first_try_fails(etcd: Etcd, nodes: Nodes) -> None:
    """Nodes that wait would begin to train alone."""
    nodes.meet()
    until(lambda: nodes.are_all("done") and nodes.are_all("out"), 30)
    first, second = nodes.handlers
    first.say_it_ended_well()
    etcd.refuses = lambda method, path: path.startswith(STATE)
    closing = Thread(target=first.shutdown)
    closing.start()
    until(lambda: etcd.num_refused >= 16, 30)
    etcd.refuses = lambda method, path: False
    closing.join()
    nodes.handlers.remove(first)
    assert second.is_closed()


def test_a_later_run_of_the_same_name_hears_nothing_of_an_earlier_one(etcd: Etcd) -> None:
    """The state is forgotten after two hours, and its rounds begin with 0 again."""
    for _ in range(2):
        nodes = Nodes(etcd.port)
        nodes.meet()
        first, second = nodes.handlers
        until(lambda: first.view.at_s and second.view.at_s, 30)
        assert not first.view.ends and not second.view.ends
        first.say("done")
        nodes.look()
        assert not first.view.are_done
        until(lambda: nodes.are_all("done"), 30)
        assert first.is_new("a cause")
        first.end_round(is_calm=False)
        until(lambda: second.view.ends, 30)
        nodes.end()
        etcd.forget("run")


def test_an_earlier_run_that_was_killed_is_another_one(etcd: Etcd) -> None:
    """Though its state is there."""
    for _ in range(2):
        nodes = Nodes(etcd.port)
        nodes.meet()
        assert nodes.handlers[0].is_new("a cause") and not nodes.handlers[1].is_new("a cause")
        for node in nodes.handlers:
            node._end()


def test_words_stay_in_their_round(etcd: Etcd, nodes: Nodes) -> None:
    """Nodes that gave no sign of life were struck off, so the next round has begun."""
    nodes.meet()
    nodes.look()
    first, second = nodes.handlers
    for node in nodes.handlers:
        node._torchs.renew_heartbeats(begin=False)
    before = first.current
    until(lambda: not first.view.members, 60)
    etcd.refuses = lambda method, path: method == "PUT" and path.startswith(STORE)
    first.end_round(is_calm=False)
    until(lambda: etcd.num_refused >= 8, 30)
    etcd.refuses = lambda method, path: False
    until(lambda: before.is_first, 30)
    nodes.meet()
    nodes.look()
    assert not first.view.ends and not second.view.ends


def test_an_answer_that_is_lost_is_asked_for_again(etcd: Etcd, nodes: Nodes) -> None:
    """The client repeats a request that the server has seen to."""
    nodes.meet()
    first, second = nodes.handlers
    num_lost = 0

    def loses(method: str, path: str) -> bool:
        nonlocal num_lost
        is_lost = method == "PUT" and path.startswith(STORE) and num_lost < 6
        num_lost += is_lost
        return is_lost

    etcd.loses = loses
    is_first = first.end_round(is_calm=False)
    until(is_first, 30)
    until(lambda: second.view.ends, 30)
    assert not second.end_round(is_calm=False)()
    num_lost = 0
    assert first.is_new("a cause") and not second.is_new("a cause")


def test_a_thread_that_was_given_up_does_not_go_on(etcd: Etcd) -> None:
    """It would take its node out of the round in which that trains."""
    nodes = Nodes(etcd.port)
    first, second = nodes.handlers
    held: list[float] = []

    def holds_s(method: str, path: str) -> float:
        if method == "GET" and path.startswith(STATE) and not held:
            held.append(14.0)
            return held[0]
        return 0.0

    etcd.holds_s = holds_s
    thread = first._calls.thread
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(first.next_rendezvous)
        until(lambda: bool(held), 30)
        other = pool.submit(second.next_rendezvous)
        late.result(300), other.result(300)
    assert first._calls.thread is not thread
    until(lambda: not thread.is_alive(), 30)
    nodes.look()
    assert not first.current.lost(first.view) and not second.current.lost(second.view)
    nodes.end()


def test_a_node_that_leaves_while_it_waits_for_others_is_gone_at_once(etcd: Etcd) -> None:
    """Nobody meets it."""
    nodes = Nodes(etcd.port)
    first, second = nodes.handlers
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.next_rendezvous)
        until(lambda: first._torchs.node in first._torchs.state.participants, 30)
        thread = first._calls.thread
        first.leave()
        with pytest.raises(RendezvousConnectionError):
            waiting.result(300)
    assert not thread.is_alive()
    second._torchs.handler.num_nodes_waiting()
    assert not second._torchs.state.participants
    second.shutdown()


def test_a_node_that_leaves_while_others_train_is_gone_at_once(etcd: Etcd, nodes: Nodes) -> None:
    """Nobody begins anew for it."""
    nodes.meet()
    third, first = nodes.add(), nodes.handlers[0]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(third.next_rendezvous)
        until(lambda: first._torchs.state.redundancy_list | first._torchs.state.wait_list, 30)
        third.leave()
        with pytest.raises(RendezvousConnectionError):
            waiting.result(300)
    nodes.handlers.remove(third)
    nodes.look()
    state = first._torchs.state
    assert not state.redundancy_list and not state.wait_list and len(state.participants) == 2


def test_a_short_loss_does_not_end_a_run_of_which_one_node_is_done(
    etcd: Etcd, nodes: Nodes
) -> None:
    nodes.meet()
    first, second = nodes.handlers
    assert not first.are_all("done")
    nodes.look()
    first.current.last_said_at -= 3600
    etcd.refuses = lambda method, path: path.startswith(STORE)
    until(lambda: nodes.have_complained, 30)
    assert not first.are_all("done")
    etcd.refuses = lambda method, path: False
    nodes.look()
    assert not first.are_all("done")
    until(lambda: second.are_all("done"), 30)


def test_a_node_that_ends_alone_does_not_close_the_rendezvous(etcd: Etcd, nodes: Nodes) -> None:
    nodes.meet()
    first, second = nodes.handlers
    first.are_all("done")
    etcd.refuses = lambda method, path: True
    until(lambda: nodes.have_complained, 30)
    first._lost_since = first.current.last_said_at = time.monotonic() - 3600
    assert first.are_all("done") and first.are_all("out") is False
    first.say_it_ended_well()
    etcd.refuses = lambda method, path: False
    assert first.shutdown()
    nodes.handlers.remove(first)
    nodes.look()
    assert not second.is_closed()


def test_a_signal_is_no_lost_connection() -> None:
    with pytest.raises(SignalException), as_lost_connection():
        raise SignalException("a signal", signal.SIGTERM)


def test_a_word_that_cannot_be_read_does_not_end_the_looks() -> None:
    """Also where the rendezvous is not on etcd."""
    nodes = Nodes(free_port(), "c10d")
    nodes.meet()
    first, second = nodes.handlers
    first.current.store.set("holdfast/card/1", b"no card")
    card = msgspec.json.encode(EndOfRound([]))
    first.say("card", card)
    until(lambda: any("does not answer" in text for text in nodes.said), 30)
    second.say("card", card)
    until(lambda: sorted(first.view.cards) == [0, 1], 30)
    second.shutdown()
    first.shutdown()


@contextmanager
def launched(
    etcd: Etcd, folder: Path
) -> Iterator[tuple[Callable[[], subprocess.Popen[bytes]], Callable[[], list[str]]]]:
    """Return what starts a launcher of a run on two nodes, and what reads their logs."""
    script = folder / "script.py"
    script.write_text(TRAINS)
    command = [sys.executable, "-W", "ignore", "-m", "holdfast", "run", "--local-addr=127.0.0.1"]
    command += ["--rdzv-backend=etcd-v2", f"--rdzv-endpoint=127.0.0.1:{etcd.port}", "--rdzv-id=run"]
    command += ["--nnodes=2", "--rdzv-conf=keep_alive_max_attempt=20", str(script), str(folder)]
    launchers: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        with (folder / f"log{len(launchers)}").open("w") as log:
            launcher = subprocess.Popen(
                command, env=environment(), stdout=log, stderr=log, start_new_session=True
            )
        launchers.append(launcher)
        return launcher

    try:
        yield start, lambda: [(folder / f"log{n}").read_text() for n in range(len(launchers))]
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
                launcher.wait()


def test_a_run_goes_on_and_ends_well_when_etcd_has_begun_anew(etcd: Etcd, tmp_path: Path) -> None:
    with launched(etcd, tmp_path) as (start, logs):
        launchers = [start(), start()]
        until((tmp_path / "trains on 2").exists)
        etcd.kill()
        until(lambda: all("does not answer" in log for log in logs()), 30)
        etcd.begin()
        until(lambda: all("answers again" in log for log in logs()), 30)
        (tmp_path / "stop").touch()
        assert [launcher.wait(300) for launcher in launchers] == [0, 0]
        said = "\n".join(logs())
    assert "Traceback" not in said and "failed after step" not in said
