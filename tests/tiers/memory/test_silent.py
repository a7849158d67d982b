"""An agent that hangs: it runs, takes connections and says nothing.  Training must not wait for it again
and again."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.base.threads import in_threads
from holdfast.errors import AgentUnreachable
from holdfast.events import Event, listen
from holdfast.tiers.memory.node import client as c
from holdfast.tiers.memory.node import messages as w
from tiers.memory.agents import JOB, agent, hello, kill, pid_of, put
from tiers.memory.zygote import Lives

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

PATIENCE = {"LOOK_S": 0.5, "SILENT_S": 0.5, "START_S": 1.0}
"""Shorter than in earnest."""
ENOUGH = {"SILENT_S": 60.0, "START_S": 120.0}
"""For an agent that answers, on a busy machine."""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[c.Client]:
    """A line to an agent, with less patience."""
    with agent(tmp_path / "node") as client, pytest.MonkeyPatch.context() as patch:
        for name, value in PATIENCE.items():
            patch.setattr(c, name, value)
        yield client


@contextmanager
def stopped(root: Path) -> Iterator[int]:
    """The agent hangs during the block."""
    pid = pid_of(root)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_who_waits_for_a_silent_agent_is_told(
    client: c.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before the deadline of what was asked; then at once, until it is time to ask again."""
    hello(client)
    events: list[Event] = []
    with stopped(client.root) as pid:

        def ask(_: int) -> None:
            with pytest.raises(AgentUnreachable, match=f"process {pid}, does not answer"):
                client.ask(w.Ask(JOB), timeout_s=600.0)

        with listen(events.append):
            in_threads(ask, [1, 2, 3], 3)
        assert [(e.name, e.fields["again_s"]) for e in events] == [("agent.silent", c.AGAIN_S)]
        with monkeypatch.context() as patch:
            patch.setattr(client, "look", lambda: pytest.fail("it looked"))
            with pytest.raises(AgentUnreachable, match="does not answer"):
                client.start()
        assert client.look() == "silent"
    await_there(client)
    client.ask_again()
    client.start()
    assert client.ask(w.Ask(JOB), w.Held).card


def test_an_agent_that_falls_silent_between_two_snapshots_is_given_up_at_once(
    client: c.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training would wait for another one to begin, which cannot while this one runs."""
    client.start()
    monkeypatch.setattr(client, "_spawn", lambda _: pytest.fail("it began another"))
    pid = client.pid
    silent = pytest.raises(AgentUnreachable, match=f"process {pid}, does not answer")
    with stopped(client.root), silent:
        client.start()
    await_there(client)
    client.ask_again()


def test_a_silent_agent_is_looked_at_less_and_less(client: c.Client) -> None:
    waits = []
    with stopped(client.root):
        for _ in range(3):
            with pytest.raises(AgentUnreachable):
                client.start()
            waits.append(client._silent_s)
            client._again_at = 1.0  # long ago
    assert waits == [c.AGAIN_S, 2 * c.AGAIN_S, 4 * c.AGAIN_S]
    await_there(client)
    client.start()
    assert client._silent_s == 0.0


def test_a_silent_agent_that_is_killed_has_a_successor(
    client: c.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, as its error advises, and with what it held."""
    hello(client)
    put(client, "0001-000001", b"x" * 1000)
    with stopped(client.root) as pid:
        with pytest.raises(AgentUnreachable, match=f"process {pid}, does not answer"):
            client.start()
        kill(client.root)
        for name, value in ENOUGH.items():
            monkeypatch.setattr(c, name, value)
        client.start("127.0.0.1")
    assert pid_of(client.root) != pid
    assert len(client.ask(w.Ask(JOB), w.Held).images) == 1


def await_there(client: c.Client) -> None:
    for name, value in ENOUGH.items():
        setattr(c, name, value)  # until the end of the test, as PATIENCE
    until = time.monotonic() + 120
    while client.look() != "there":
        assert time.monotonic() < until
        time.sleep(0.02)


def test_one_that_takes_no_more_connections_is_silent(tmp_path: Path) -> None:
    with agent(tmp_path / "node") as client:
        lines = []
        with stopped(client.root):
            with suppress(BlockingIOError):
                while True:
                    line = c._Connection(client.root / "agent.sock", 1.0)
                    lines.append(line)
                    line.connect()
            assert client.look() == "silent"
        for line in lines:
            line.close()
        await_there(client)


@pytest.mark.soak
def test_training_goes_on_beside_a_silent_agent(lives: Lives) -> None:
    """Snapshots fail, all but a few of them at once, and durable saves do without it.  When it answers
    again, snapshots are made again."""
    script: dict[str, Any] = {"settle": False, "pause": 0.02, "durable": 20}
    script["patience"] = PATIENCE | {"AGAIN_S": 4.0}
    root = str(lives.place / "root")
    options = {"redundancy": "none"}
    path = lives.place / f"life{lives.number + 1}" / "r1.jsonl"
    with ThreadPoolExecutor(1) as pool:
        living = pool.submit(lives.live, nodes=[0, 1], until=10**6, options=options, **script)

        def lines() -> list[dict[str, Any]]:
            text = path.read_text() if path.exists() else ""
            return [json.loads(x) for x in text.splitlines(keepends=True) if x.endswith("\n")]

        def events(name: str) -> int:
            return max((x["events"].get(name, 0) for x in lines() if "events" in x), default=0)

        def await_(condition: Callable[[], object]) -> None:
            until = time.monotonic() + 120
            while not condition():
                assert time.monotonic() < until, lines()[-3:]
                assert not living.done(), lives.errors()
                time.sleep(0.05)

        try:
            await_(lambda: events("snapshot.committed") >= 3)
            with stopped(lives.node(1)):
                await_(lambda: events("agent.silent") >= 2)
                failed, looked = events("snapshot.failed"), events("agent.silent")
                begun = max((x["step"] for x in lines() if "events" in x), default=0)
                await_(lambda: events("snapshot.failed") >= failed + 20)
                assert events("agent.silent") <= looked + 2
                await_(lambda: max(holdfast.steps(root), default=0) > begun)
            committed = events("snapshot.committed")
            await_(lambda: events("snapshot.committed") >= committed + 3)
        finally:
            (note,) = lives.node(1).glob("jobs/*/job.json")
            trainers = json.loads(note.read_bytes())["trainers"]
            for pid in trainers:
                os.kill(int(pid), signal.SIGKILL)
            living.result()
