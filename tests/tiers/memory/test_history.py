"""What trainings with `every=Auto` learn, and keep over lives that end by SIGKILL."""

import json
from typing import Any

import pytest

from tiers.memory.zygote import KILLED, Lives, Told, lose, train

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SMALL = {"width": 40, "auto": {}}


def kept(lives: Lives) -> Any:
    return json.loads((lives.place / "root" / "tuning.json").read_text())


def newest(told: Told, name: str) -> Any:
    return [x[name] for x in told.lines if name in x][-1]


def steps_s(told: Told) -> float:
    """How long all steps took, by the life's own clock.  The time that was trained in a life lies within:
    it begins and ends with calls of `step`, and what the life tells of a step follows the call."""
    return sum(float(x["took"]) for x in told.lines if "took" in x)


def test_each_killed_life_is_a_failure(lives: Lives) -> None:
    """Of the process, and the time that was trained in it counts from life to life, once.  How much of it
    was written before a kill depends on storage: `test_steering.py` has when it is written."""
    script = {**SMALL, "memory": 0, "pause": 0.04, "kill": [0], "until": 99}
    trained = known = 0.0
    for number, steps in enumerate((90, 5, 5)):
        (told,) = lives.live(nodes=[0], kill_at=steps, **script)
        assert told.status == KILLED, lives.errors()
        trained += steps_s(told)
        found = kept(lives)
        assert (found["process"], found["node"]) == (number, 0)
        assert known <= found["trained_s"] <= trained
        known = found["trained_s"]
    assert known > 0


@pytest.mark.soak
def test_the_loss_of_a_node_is_one_of_a_node(lives: Lives) -> None:
    """A later life that finds the same images missing does not count them again."""
    script = {**SMALL, "options": {"redundancy": "parity"}}
    nodes = [0, 1, 2]
    train(lives, 12, nodes, **script)
    lose(lives, 1)
    told = lives.live(nodes=nodes, until=99, kill_restored=nodes, **script)
    assert [t.status for t in told] == [KILLED] * 3, lives.errors()
    assert (kept(lives)["process"], kept(lives)["node"]) == (0, 1)
    told = lives.live(nodes=nodes, until=13, **script)
    assert [t.status for t in told] == [0, 0, 0], lives.errors()
    assert [t.restored for t in told] == [10, 10, 10]
    assert (kept(lives)["process"], kept(lives)["node"]) == (1, 1)
    assert newest(told[0], "learned")["memory_load"] > 0


@pytest.mark.soak
def test_frequencies_and_costs_are_kept_by_a_killed_run(lives: Lives) -> None:
    """The next life begins where this one had come to, with what is dear made as rarely as was learned."""
    script = {**SMALL, "memory": 0, "delta": {"batch": 2}}
    script["auto"] = {
        "mtbf_hours": 1.0,
        "overhead": 0.0005,
    }  # no record of every step takes so little
    (told,) = lives.live(nodes=[0], until=999, kill=[0], kill_at=150, **script)
    assert told.status == KILLED, lives.errors()
    assert told.events("retuned"), told.lines[-3:]
    learned, every = newest(told, "learned"), newest(told, "every")
    assert every["delta"] is None
    assert kept(lives)["frequencies"][:3] == [every["durable"], None, None]
    (again,) = lives.live(nodes=[0], until=140, **script)
    assert again.status == 0, lives.errors()
    first = next(x["every"] for x in again.lines if "every" in x)
    assert first == every
    assert kept(lives)["costs"].keys() >= {"record", "batch", "record_stall", "durable_stall"}
    assert learned.keys() >= {"record", "batch", "record_stall", "durable_stall"}
    assert newest(again, "learned").keys() >= {"open", "durable_load"}
