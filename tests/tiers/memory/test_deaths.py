"""An agent dies in mid-work: what is half made never counts, and its successor has the rest."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

import holdfast
from holdfast.errors import AgentUnreachable
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.client import Client
from tiers.memory.agents import await_gone, kill_together, pid_of, trainers
from tiers.memory.zygote import KILLED, Lives, Told, check, lose, train

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def report(lives: Lives, node: int) -> w.AgentReport | None:
    """What an agent says of itself; None where there is none yet."""
    with suppress(AgentUnreachable):
        found: w.AgentReport = Client(lives.node(node), deadline_s=120.0).ask(
            w.Status(), w.AgentReport
        )
        return found
    return None


def headers(lives: Lives, node: int) -> list[dict[str, object]]:
    """Of the slots there, as the next agent will find them."""
    found = []
    for path in lives.node(node).glob("jobs/*/*-*.json"):
        with suppress(FileNotFoundError):  # the agent has just removed it
            found.append(json.loads(path.read_bytes()))
    return found


def phases(lives: Lives, node: int, kind: str) -> dict[object, object]:
    """By step."""
    return {h["step"]: h["phase"] for h in headers(lives, node) if h["kind"] == kind}


def die_when(
    lives: Lives, condition: Callable[[], bool], *, agent: int, nodes: list[int], **script: object
) -> list[Told]:
    """A life of which one agent and all ranks get SIGKILL in that moment."""
    with ThreadPoolExecutor(1) as pool:
        living = pool.submit(lives.live, nodes=nodes, until=99, **script)
        while not condition():
            assert not living.done(), lives.errors()
            time.sleep(0.002)
        dying = pid_of(lives.node(agent))
        kill_together([dying, *(pid for n in nodes for pid in trainers(lives.node(n)))])
        await_gone(dying)
        told = living.result()
    assert [one.status for one in told] == [KILLED] * len(nodes), lives.errors()
    return told


@pytest.mark.soak
def test_an_agent_dies_while_it_makes_parity(lives: Lives) -> None:
    """The guard of the newest snapshot has some of its bytes.  The one before it counts, and what the agent
    keeps for that serves to rebuild a lost node."""
    seen = [0, 0]

    def in_mid_guard() -> bool:
        now = report(lives, 1)
        fetched = now.fetched if now is not None else 0
        guards = phases(lives, 1, "guard")
        step = max((int(str(s)) for s in guards), default=0)
        if step < 3 or guards[step] != "filling" or step != seen[0]:
            seen[:] = step, fetched
            return False
        return fetched > seen[1] + 300_000

    slow = {"redundancy": "parity", "bandwidth": "1MB"}
    told = die_when(lives, in_mid_guard, agent=1, nodes=[0, 1, 2], options=slow)
    step = seen[0]
    assert phases(lives, 1, "guard") == {step - 1: "ready", step: "filling"}
    assert phases(lives, 1, "share") == {step - 1: "ready", step: "ready"}
    lose(lives, 2)
    again = lives.live(nodes=[0, 1, 2], until=step, options={"redundancy": "parity"})
    check(lives, again, step - 1, told[0].digests)
    assert sum(one.moved.get("memory.rebuilt.bytes", 0) for one in again) > 0


@pytest.mark.soak
def test_an_agent_dies_while_it_writes_to_storage(lives: Lives) -> None:
    """Half of a file is there, under no name of its own, so storage has no such step.  Memory has it,
    and what a restart takes from there is saved at once."""
    root = lives.place / "root"

    def half_written() -> bool:
        with suppress(FileNotFoundError):
            for path in root.glob(f"steps/*/*/.tmp-*-{pid_of(lives.node(1))}-*"):
                with path.open("rb") as file:
                    return file.read(8) != bytes(8)
        return False

    slow = {"redundancy": "none", "bandwidth": "16MB"}
    script = {"width": 1200, "durable": 3}
    quick = {"redundancy": "none"}
    told = die_when(lives, half_written, agent=1, nodes=[0, 1], options=slow, **script)
    assert not list(root.glob("steps/*/*/r00001*"))
    assert holdfast.steps(str(root)) == []
    again = lives.live(nodes=[0, 1], until=4, options=quick, **script)
    check(lives, again, 3, {3: reference(lives, 3)})
    assert told[0].digests.keys() == {1, 2}
    assert holdfast.steps(str(root)) == [3]
    assert not list(root.glob("steps/**/.tmp-*"))
    lose(lives, 0, 1)
    (last,) = lives.live(nodes=[2], until=3, options=quick, **script)
    assert (last.restored, last.start) == (3, again[0].start)


def reference(lives: Lives, step: int) -> str:
    """The digest after that step without holdfast."""
    told = lives.live(nodes=[0, 1], until=step, width=1200, reference=True)
    return told[0].digests[step]


@pytest.mark.soak
def test_an_agent_dies_while_a_restart_rebuilds_from_it(lives: Lives) -> None:
    """Its successor serves what it held, and the rest is rebuilt from that."""
    options = {"redundancy": "parity"}
    digests = train(lives, 3, [0, 1, 2], options=options)
    lose(lives, 2)
    before = pid_of(lives.node(1))
    told = lives.live(
        nodes=[0, 1, 2], until=4, options=options, reader_kills=[2, str(lives.node(1))]
    )
    assert pid_of(lives.node(1)) != before
    check(lives, told, 3, digests)
    assert len(told[2].events("memory.rebuilt")) > 1  # tried, and tried again


def test_an_agent_dies_while_a_restart_reads_from_it_and_nobody_starts_another(
    lives: Lives,
) -> None:
    """Its node is no longer part of the job: the newest durable step, and the reason why."""
    options = {"redundancy": "none"}
    digests = train(lives, 3, [0, 1], options=options, durable=2)
    told = lives.live(nodes=[0, 2], until=3, options=options, reader_kills=[1, str(lives.node(1))])
    assert [(one.restored, one.start) for one in told] == [(2, digests[2])] * 2
    reasons = [x["error"] for x in told[0].events("restore.passed_over")]
    assert any("the image of rank 1 is in no node's memory" in text for text in reasons), reasons
