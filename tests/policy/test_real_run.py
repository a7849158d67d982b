"""The simulator beside real trainings that were killed: the record of bench/claims/goodput.py.

It is given what was measured before and apart (a step alone, what a save takes) or is not the tiers' doing
(when processes died, and how long it took until they trained again), and has to find how far the training
came and what it lost.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from holdfast.policy.cluster import Cluster, Failure
from holdfast.policy.simulate import Fixed, Outcome, Strategy, simulate
from holdfast.policy.wasted import Costs, Frequencies

RECORD = Path(__file__).parents[2] / "bench" / "results" / "goodput.json"
NEAR = 0.05
"""Of the steps: records' own costs are left out, and no two steps of a real training take the same time."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return json.loads(RECORD.read_text())["found"]  # type: ignore[no-any-return]


def simulated(found: dict[str, Any], who: str, costs: Costs, often: Frequencies) -> Outcome:
    log = found[f"2 {who}"]["log"]
    began = next(x["time"] for x in log if x["event"] == "restored")
    killed = [x["time"] for x in log if x["event"] == "killed"]
    again = [x["time"] for x in log if x["event"] == "restored"][1:]
    cluster = Cluster(
        devices=2, devices_per_node=2, restart_s=mean(b - a for a, b in zip(killed, again))
    )
    ended = next(x["time"] for x in log if x["event"] == "end")
    failures = [Failure(time - began) for time in killed]
    return simulate(Strategy(who, costs, Fixed(often)), cluster, failures, ended - began)


def step_s(found: dict[str, Any], who: str) -> float:
    """Of the training alone, measured before each of its lives and at the end."""
    return float(found[f"2 {who}"]["step_s"])


def test_asynchronous_saves(found: dict[str, Any]) -> None:
    """As many steps, and as many lost, but for the one under way."""
    before = found["2 before"]
    save_s = before["dcp_cost_s"]
    costs = Costs(
        step_s(found, "dcp"), durable_stall_s=save_s, durable_s=save_s, durable_load_s=0.0
    )
    outcome = simulated(found, "dcp", costs, Frequencies(durable=before["dcp_every"]))
    real = found["2 dcp"]
    steps = outcome.training_s / costs.step_s
    assert outcome.failures == real["failures"] > 0
    assert steps == pytest.approx(before["steps"], rel=NEAR)
    assert outcome.lost_steps == pytest.approx(sum(real["lost_steps"]), abs=2 * real["failures"])


def test_a_record_of_every_step(found: dict[str, Any]) -> None:
    """Nothing is lost but the step under way, in both."""
    costs = Costs(step_s(found, "holdfast"), durable_stall_s=0.0, durable_s=1.0, durable_load_s=0.0)
    outcome = simulated(found, "holdfast", costs, Frequencies(durable=100, delta=1, batch=1))
    real, steps = found["2 holdfast"], outcome.training_s / costs.step_s
    assert outcome.lost_steps == sum(real["lost_steps"]) == 0
    assert steps == pytest.approx(found["2 before"]["steps"], rel=NEAR)
    assert outcome.failures == real["failures"] > 0
