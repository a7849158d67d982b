"""Frequencies that are tuned while a training runs."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import events
from holdfast.base import memory_limit
from holdfast.core.checkpoint.recorded import parse_segment, segments
from holdfast.core.group import meet
from holdfast.errors import UsageError
from holdfast.session import steering
from holdfast.session.tuning_store import TuningState, TuningStore
from holdfast.store import LocalStore, MemoryStore
from holdfast.testing import Slow
from holdfast.tiers.records import capture, copying

pytestmark = pytest.mark.slow

RARELY_FAILS = holdfast.Auto(mtbf_hours=500, overhead=0.9)


@dataclass
class SlowToRead:
    """A save waits for it, longer than steps scatter: what that takes is found on a busy machine too."""

    seconds: float

    def state_dict(self) -> dict[str, int]:
        time.sleep(self.seconds)
        return {"x": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"x": 1}


class Training:
    def __init__(self, size: int = 64) -> None:
        self.model = torch.nn.Linear(size, size)
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = {"model": self.model, "optim": self.optim}

    def step(self) -> None:
        time.sleep(0.002)
        self.model(torch.randn(4, self.model.in_features)).square().mean().backward()
        self.optim.step()
        self.optim.zero_grad()


def train(root: Path, auto: Any, steps: int, *, save_s: float = 0.15) -> list[events.Event]:
    """Events of the tuning."""
    told: list[events.Event] = []
    one = Training()
    state = one.state | {"slow": SlowToRead(save_s)}
    with (
        events.listen(lambda e: told.append(e) if e.name == "retuned" else None),
        holdfast.Checkpointer(root, state, every=auto) as ckpt,
    ):
        step = ckpt.restore()
        while step < steps:
            one.step()
            step += 1
            ckpt.step(step)
        train.every = ckpt.every  # type: ignore[attr-defined]
    return told


def test_costs_are_measured_and_change_the_frequencies(tmp_path: Path) -> None:
    """A failure every few weeks, a save that takes many steps: thousands of them pay for it."""
    told = train(tmp_path, RARELY_FAILS, 250)
    assert told, "nothing was tuned"
    first = told[0].fields
    assert first["knob"] == "durable"
    assert first["before"] == "durable 100"
    assert int(first["after"].removeprefix("durable ")) > 100
    assert "wasted time goes from" in first["why"]
    assert "a failure every 500 h (given)" in first["why"]


def test_it_is_never_above_the_overhead(tmp_path: Path) -> None:
    """Where a save takes many steps, it is made less often, whatever fails."""
    told = train(tmp_path, holdfast.Auto(mtbf_hours=1 / 60, overhead=0.0001), 250, save_s=1.0)
    assert told
    assert "allowed" in told[0].fields["why"]
    assert train.every.durable > 100  # type: ignore[attr-defined]


def kept(root: Path) -> Any:
    return json.loads((root / "tuning.json").read_text())


def test_what_is_learned_is_kept(tmp_path: Path) -> None:
    """A run that closes is no failure; the next one goes on where it was."""
    train(tmp_path, RARELY_FAILS, 250)
    first = kept(tmp_path)
    assert (first["process"], first["node"]) == (0, 0)
    assert first["trained_s"] > 0.4
    last = train.every  # type: ignore[attr-defined]
    assert last.durable not in (None, 100)
    one = Training()
    with holdfast.Checkpointer(tmp_path, one.state, every=RARELY_FAILS) as ckpt:
        assert ckpt.every == last
    with holdfast.Checkpointer(
        tmp_path, one.state, every=RARELY_FAILS, delta=holdfast.Delta()
    ) as ckpt:
        assert (ckpt.every.durable, ckpt.every.delta) == (100, 1)  # other tiers, other frequencies
    assert kept(tmp_path)["trained_s"] >= first["trained_s"]


@pytest.mark.parametrize(
    ("error", "failures"),
    [(RuntimeError("a peer is gone"), 1), (KeyboardInterrupt(), 0), (SystemExit(143), 0)],
)
def test_a_run_that_ends_by_an_error_has_failed(
    tmp_path: Path, error: BaseException, failures: int
) -> None:
    """Though it closes its root on the way out, as those do whose peers were killed."""
    one = Training()

    def run() -> None:
        with holdfast.Checkpointer(tmp_path, one.state, every=holdfast.Auto()) as ckpt:
            for step in range(1, 6):
                one.step()
                ckpt.step(step)
            raise error

    with pytest.raises(type(error)):
        run()
    for _ in range(2):  # counted once
        holdfast.Checkpointer(tmp_path, one.state, every=holdfast.Auto()).close()
        assert kept(tmp_path)["process"] == failures


@pytest.mark.parametrize("damaged", ["", "{", '{"frequencies":[0,1,2,3],"costs":{"x":1}}', "[]"])
def test_a_history_that_cannot_be_used(tmp_path: Path, damaged: str) -> None:
    tmp_path.joinpath("tuning.json").write_text(damaged)
    with holdfast.Checkpointer(tmp_path, Training().state, every=holdfast.Auto()) as ckpt:
        assert ckpt.every.durable == 100


def test_the_copy_of_gradients_is_a_cost_of_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no part of what a step takes: without records it takes as long."""
    copied = copying._copy_part

    def slowly(*args: Any) -> None:
        time.sleep(0.3)
        copied(*args)

    monkeypatch.setattr(copying, "_copy_part", slowly)
    one, delta = Training(), holdfast.Delta(queue=40)
    with holdfast.Checkpointer(tmp_path, one.state, every=holdfast.Auto(), delta=delta) as ckpt:
        ckpt.step(1)
        ckpt.wait()
        for step in range(2, 12):
            one.step()
            ckpt.step(step)
        tuner = ckpt._steering._tuner  # type: ignore[union-attr]
        stall_s = tuner.learned["record_stall"]
        step_s = sum(s for _, s in tuner._step_s) / len(tuner._step_s)
    assert stall_s > 0.3 and step_s < stall_s / 2


def test_what_a_batch_takes_is_shared_by_its_records(tmp_path: Path) -> None:
    told: list[events.Event] = []
    one, delta = Training(256), holdfast.Delta(batch=4)
    with (
        events.listen(lambda e: told.append(e) if e.name == "delta.wrote" else None),
        holdfast.Checkpointer(tmp_path, one.state, every=holdfast.Auto(), delta=delta) as ckpt,
    ):
        for step in range(1, 50):
            one.step()
            ckpt.step(step)
            if step == 1:
                ckpt.wait()
        ckpt._tiers.get("delta").flush()
        learned = ckpt._steering._tuner.learned  # type: ignore[union-attr]
    batches = [e.fields for e in told][1:]
    assert {b["records"] for b in batches} == {4}
    assert all(0 < b["fixed_s"] < b["seconds"] for b in batches)
    each = [(b["seconds"] - b["fixed_s"]) / 4 for b in batches]
    assert learned["record"] == pytest.approx(sum(each) / len(each))
    fixed = [b["fixed_s"] for b in batches]
    assert learned["batch"] == pytest.approx(sum(fixed) / len(fixed))
    assert learned["batch_stall"] >= 0


def test_where_requests_have_a_price_bytes_go_with_the_records() -> None:
    """A bucket is sent a file when it is finished: all seems to be the price of a file."""
    fields = {"records": 4, "seconds": 0.5, "fixed_s": 0.48}
    event = events.Event("delta.wrote", 0.0, None, fields)
    assert dict(steering.costs_of(event)) == {"record": pytest.approx(0.005), "batch": 0.48}
    priced = {"record": pytest.approx(0.11), "batch": 0.06}
    assert dict(steering.costs_of(event, 0.06)) == priced
    assert dict(steering.costs_of(event, 2.0)) == dict(steering.costs_of(event))


def test_the_price_of_a_request_is_that_of_a_small_object() -> None:
    keeper = TuningStore(Slow(MemoryStore(uuid.uuid4().hex), 0.05))
    assert keeper.put_s is None
    for _ in range(3):
        keeper.write(TuningState())
    keeper.close()
    assert keeper.put_s is not None and 0.05 <= keeper.put_s < 5


@pytest.mark.parametrize("is_local", [False, True])
def test_a_run_takes_the_price_where_storage_answers_requests(
    tmp_path: Path, is_local: bool
) -> None:
    store = LocalStore(tmp_path) if is_local else MemoryStore(uuid.uuid4().hex)
    group = meet()
    one = steering.Steering(holdfast.Auto(), ("delta",), group, store, crashed=False)
    while one._store.busy:
        time.sleep(0.001)
    events.emit("delta.wrote", records=4, seconds=0.5, fixed_s=0.48)
    put_s = one._store.put_s
    one.close()
    group.close()
    assert (put_s is None) == is_local
    assert one._tuner.learned["batch"] == (0.48 if put_s is None else min(put_s, 0.48))


@pytest.mark.parametrize(
    ("known_s", "due_s"), [(0.0, 1.0), (40.0, 41.0), (1000.0, 1020.4), (10_000.0, 10_060.0)]
)
def test_what_was_trained_is_written_when_a_crash_would_forget_too_much(
    known_s: float, due_s: float
) -> None:
    """A second of a short training, 2 % of a longer one, a minute of any."""
    group = meet()
    store = MemoryStore(uuid.uuid4().hex)
    one = steering.Steering(holdfast.Auto(), ("memory",), group, store, crashed=False)
    one._written_s = known_s
    for trained_s, is_written in ((due_s - 0.01, False), (due_s + 0.01, True)):
        while one._store.busy:
            time.sleep(0.001)
        one._tuner.history = replace(one._tuner.history, trained_s=trained_s)
        one._decide(1)
        assert (one._written_s == trained_s) is is_written
    one.close()
    group.close()
    assert json.loads(store.get("tuning.json"))["trained_s"] == due_s + 0.01


@pytest.mark.parametrize(
    ("ranks", "limit", "bound"),
    [("1", None, False), ("1000000000", None, True), ("1", 1 << 16, True)],
)
def test_memory_bounds_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: str, limit: int | None, bound: bool
) -> None:
    """Where many ranks share the node's memory, or a container has little of it, there is none but for what
    the user asked for."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert capture.memory_bytes is memory_limit.memory_bytes  # which knows of containers
    if limit is not None:
        monkeypatch.setattr(capture, "memory_bytes", lambda: limit)
    one, delta = Training(), holdfast.Delta(batch=5)
    with holdfast.Checkpointer(tmp_path, one.state, every=holdfast.Auto(), delta=delta) as ckpt:
        for step in range(1, 5):
            one.step()
            ckpt.step(step)
        most = ckpt._steering._tuner.most_batch  # type: ignore[union-attr]
    assert most == 5 if bound else most > 1000


def test_node_losses_are_beyond_what_is_not_protected(tmp_path: Path) -> None:
    """As the memory tier tells it."""
    with holdfast.Checkpointer(tmp_path, Training().state, every=holdfast.Auto()) as ckpt:
        tuner = ckpt._steering._tuner  # type: ignore[union-attr]
        for kept, nodes, beyond in (("parity", 3, 0.01), ("parity", 1, 1.0), ("none", 3, 1.0)):
            events.emit("memory.redundancy", wanted="auto", kept=kept, nodes=nodes)
            assert tuner.rates.beyond == beyond


@pytest.mark.parametrize("batch", [1, 3])
def test_batches_begin_as_the_user_says(tmp_path: Path, batch: int) -> None:
    """Until costs are known."""
    one, delta = Training(), holdfast.Delta(batch=batch)
    with holdfast.Checkpointer(tmp_path, one.state, every=holdfast.Auto(), delta=delta) as ckpt:
        for step in range(1, 9):
            one.step()
            ckpt.step(step)
    keys = [parse_segment(key) for key in segments(LocalStore(tmp_path), 0)]
    spans = [last - first + 1 for _, first, last, _ in filter(None, keys)]
    assert spans[0] == batch and sum(spans) == 7


def test_records_and_their_batches_are_tuned_too(tmp_path: Path) -> None:
    """Whatever is chosen, what is restored is what was trained."""
    one = Training()
    auto = holdfast.Auto(mtbf_hours=0.001, overhead=0.9)
    with holdfast.Checkpointer(tmp_path, one.state, every=auto, delta=holdfast.Delta()) as ckpt:
        for step in range(1, 231):
            one.step()
            ckpt.step(step)
        reached = one.model.weight.detach().clone()
        records = ckpt.every.delta
    again = Training()
    with holdfast.Checkpointer(tmp_path, again.state, delta=holdfast.Delta()) as ckpt:
        found = ckpt.restore()
    assert found <= 230
    if records:
        assert found == 230
        assert torch.equal(again.model.weight, reached)


def test_what_is_neither(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"must be a number of steps, holdfast\.Every"):
        holdfast.Checkpointer(tmp_path, Training().state, every="10")  # type: ignore[arg-type]
