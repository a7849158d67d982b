"""The tuner: what it waits for, what it changes, when it does not, and what it says."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.policy.tuning import START, Auto, History, Retuned, Tuner
from holdfast.policy.wasted import Frequencies, wasted

ALL = ("memory", "delta")
COSTS = {
    "durable_stall": 0.2, "durable": 20.0, "memory_stall": 0.2, "memory": 1.0,
    "record_stall": 0.002, "record": 0.01, "batch": 0.05, "replay": 0.1,
}  # fmt: skip


def tuner(auto: Auto, tiers: Any = ALL, **costs: float) -> Tuner:
    made = Tuner(auto, tiers, beyond=0.01)
    made.ran(10, 10.0)
    for what, seconds in (COSTS | costs).items():
        made.measured(what, seconds)
    return made


def settle(made: Tuner, start: int = 0, looks: int = 20) -> list[Retuned]:
    found = [made.decide(start + 100 * i) for i in range(looks)]
    return [change for change in found if change is not None]


def test_it_waits_until_costs_are_known() -> None:
    made = Tuner(Auto(mtbf_hours=1), ALL)
    assert made.frequencies == START
    for what in ("durable_stall", "durable", "memory_stall"):
        made.measured(what, 0.1)
    made.ran(1, 1.0)
    assert made.decide(1000) is None and made.costs is None
    made.measured("record_stall", 0.001)
    assert made.decide(1000) is not None


def test_one_knob_at_a_time_and_then_rest() -> None:
    made = tuner(Auto(mtbf_hours=1))
    changes = settle(made)
    assert changes and changes[-1].step < 1000
    for change in changes:
        fields = ("durable", "memory", "delta", "batch")
        differ = [f for f in fields if getattr(change.before, f) != getattr(change.after, f)]
        assert differ == [change.knob] or set(differ) == {"delta", "batch"}
    assert [c.before for c in changes[1:]] == [c.after for c in changes[:-1]]
    assert made.frequencies == changes[-1].after
    assert "a failure every 1 h (given)" in changes[-1].why
    assert "wasted time goes from" in changes[-1].why


def test_small_gains_change_nothing() -> None:
    """Costs that go up and down a little do not turn the knobs to and fro."""
    made = tuner(Auto(mtbf_hours=1))
    changes = []
    for i in range(200):
        for what in ("durable_stall", "memory_stall"):
            made.measured(what, COSTS[what] * (1.15 if i // 20 % 2 else 0.85))
        changes.append(made.decide(1000 * i))
    assert changes[0] is not None and not any(changes[50:])


def test_what_gets_rarer_comes_first() -> None:
    """Else saving would take more than is allowed in between."""
    made = tuner(Auto(mtbf_hours=1, overhead=0.01), ("memory",))
    made.frequencies = Frequencies(durable=21, memory=500)
    changes = settle(made)
    assert [change.knob for change in changes] == ["durable", "memory"]
    assert made.costs is not None
    for change in changes:
        assert wasted(made.costs, made.rates, change.after).saving <= 0.01


def test_dearer_saves_become_rarer() -> None:
    made = tuner(Auto(mtbf_hours=1), ())
    settle(made)
    before = made.frequencies.durable
    for _ in range(16):
        made.measured("durable_stall", 2.0)
    settle(made, 10_000)
    assert before is not None and made.frequencies.durable is not None
    assert made.frequencies.durable > 2 * before


def test_the_first_of_several_measurements_does_not_count() -> None:
    made = tuner(Auto(mtbf_hours=1), (), durable_stall=4.0)
    assert made.costs is not None and made.costs.durable_stall_s == 4.0
    made.measured("durable_stall", 0.1)
    assert made.costs is not None and made.costs.durable_stall_s == pytest.approx(0.1)


@settings(max_examples=40, deadline=None)
@given(
    st.floats(0.001, 0.2),
    st.lists(st.tuples(st.sampled_from(sorted(COSTS)), st.floats(0.001, 30)), max_size=30),
    st.floats(0.01, 1000),
)
def test_never_above_the_overhead(overhead: float, told: list[Any], hours: float) -> None:
    """Once it has come to rest; on the way there no change goes above what is allowed."""
    made = tuner(Auto(mtbf_hours=hours, overhead=overhead))
    for what, seconds in told:
        made.measured(what, seconds)
    over = inf
    for step in range(0, 2000, 100):
        change = made.decide(step)
        costs = made.costs
        assert costs is not None
        saving = wasted(costs, made.rates, made.frequencies).saving
        assert saving <= max(overhead * (1 + 1e-6), over)
        over = saving if saving > overhead else 0.0
        if change is None and step > 1000:
            break
    assert saving <= overhead * (1 + 1e-6) or made.frequencies.durable == 86400


def test_it_says_when_even_the_rarest_saves_take_too_long() -> None:
    made = tuner(Auto(mtbf_hours=1, overhead=0.001, rarest_hours=1), durable_stall=60.0)
    changes = settle(made)
    assert made.frequencies == Frequencies(durable=3600)
    assert "one durable save in 1 h takes 1.67% of the time, more than the 0.10%" in changes[0].why
    assert settle(made, 10_000) == []


def test_saves_that_overtake_one_another_are_made_rarer() -> None:
    made = tuner(Auto(mtbf_hours=1), (), durable=900.0, durable_stall=1e-6)
    change = made.decide(0)
    assert change is not None and change.after.durable == 900
    assert "durable 100 is too often: one takes as long as 900 steps" in change.why


def test_failures_are_estimated() -> None:
    """Gamma(1, 1/p): one failure in a day before any is seen, and the run's own after many."""
    history = History()
    auto = Auto(node_share=0.25)
    rates = history.rates(auto, 0.5)
    assert (rates.process * 86400, rates.node * 86400) == pytest.approx((0.75, 0.25))
    seen = History(trained_s=1000 * 3600.0, failures={"process": 500, "node": 0}).rates(auto, 0.5)
    assert 1 / seen.process / 3600 == pytest.approx(2.0, rel=0.07)
    assert 1 / seen.node / 3600 == pytest.approx(1000 + 96)


def test_history_goes_on() -> None:
    made = tuner(Auto())
    made.failed("node", 2)
    made.failed("process")
    again = Tuner(Auto(), ALL, history=made.history)
    assert again.history == History(10.0, {"process": 1, "node": 2})
    assert again.rates.node == pytest.approx(made.rates.node / 0.01 * 0.01)


def test_more_failures_more_saves() -> None:
    made = tuner(Auto(), ())
    settle(made)
    before = made.frequencies.durable
    made.ran(3600, 3600.0)
    made.failed("process", 20)
    changes = settle(made, 10_000)
    assert before is not None and changes and changes[0].after.durable is not None
    assert changes[0].after.durable < before
    assert "(estimated)" in str(changes[0])


def test_batches_are_as_large_as_memory_holds() -> None:
    """Where a batch is dear and a failure rare, they would be much larger."""
    dear = {"batch_stall": 0.3, "record_stall": 0.0001, "durable_stall": 50.0, "durable": 5000.0}
    free, bound = (tuner(Auto(mtbf_hours=10, overhead=0.1), ("delta",), **dear) for _ in range(2))
    bound.most_batch = 7
    settle(free)
    settle(bound)
    assert free.frequencies.batch is not None and free.frequencies.batch > 20
    assert bound.frequencies.batch == 7
    bound.most_batch = 3  # on another machine
    change = settle(bound, 10_000)[0]
    assert change.after.batch != 7
    assert "batch 7 is too large: memory holds 3 records" in change.why


def test_what_was_learned_is_known_from_the_first_step() -> None:
    made = tuner(Auto(mtbf_hours=1))
    settle(made)
    again = Tuner(Auto(mtbf_hours=1), ALL, beyond=0.01, start=made.frequencies, known=made.learned)
    again.ran(10, 10.0)
    assert again.costs == made.costs
    assert again.decide(0) is None  # it is the best already
    again.measured("durable_stall", 9.0)  # memory that is touched for the first time
    assert again.costs == made.costs
    again.measured("durable_stall", 0.4)
    assert again.costs is not None and again.costs.durable_stall_s == 0.4


def test_a_batch_to_begin_with_lies_between_two_bases() -> None:
    long = Frequencies(durable=100, memory=10, delta=1, batch=64)
    assert Tuner(Auto(), ALL, start=long).frequencies == Frequencies(100, 10, 1, 10)
    assert Tuner(Auto(), ("delta",), start=long).frequencies == Frequencies(100, None, 1, 64)
    assert Tuner(Auto(), ("memory",), start=long).frequencies == Frequencies(100, 10)
    made = Tuner(Auto(), ALL, start=long, known=COSTS)
    made.ran(1, 1.0)
    assert made.costs is not None


def test_what_is_not_measured_is_guessed() -> None:
    costs = tuner(Auto(), memory_load=3.0).costs
    assert costs is not None
    assert (costs.memory_load_s, costs.durable_load_s, costs.open_s) == (3.0, 20.0, 0.05)
    guessed = tuner(Auto()).costs
    assert guessed is not None and guessed.memory_load_s == COSTS["memory"]


def test_a_failure_that_proves_to_be_of_another_kind() -> None:
    made = tuner(Auto())
    made.failed("process")
    made.failed("process", -1)
    made.failed("node")
    assert dict(made.history.failures) == {"process": 0, "node": 1}
    made.failed("process", -1)
    assert made.history.failures["process"] == 0


def test_the_same_calls_give_the_same_decisions() -> None:
    assert settle(tuner(Auto())) == settle(tuner(Auto()))


@pytest.mark.parametrize(
    "options",
    [
        {"mtbf_hours": 0}, {"mtbf_hours": "4"}, {"mtbf_hours": float("nan")}, {"overhead": 0},
        {"overhead": 3}, {"node_share": 1.5}, {"gain": 1}, {"rarest_hours": None},
        {"mtbf_hours": True},
    ],
)  # fmt: skip
def test_usage(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(UsageError, match=rf"Auto\({name}="):
        Auto(**options)


def test_usage_of_the_tuner() -> None:
    with pytest.raises(UsageError, match="'durable' is no tier to tune"):
        Tuner(Auto(), ("durable",))
    with pytest.raises(UsageError, match="did you mean 'durable_stall'"):
        Tuner(Auto()).measured("durable_stal", 1.0)
