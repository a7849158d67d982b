"""Snapshots from gradients, in one process: what a restart finds is the training's state, bit for bit."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import UsageError
from holdfast.live.saving import blocking_saves
from holdfast.live.saving.exactness import Exactness
from holdfast.live.state import copy_timing, snapshot
from holdfast.tiers.memory.decision import exactness_note
from holdfast.tiers.memory.feed import Feed
from holdfast.tiers.memory.twin import Gradient, Twin
from tiers.memory.agents import kill


class Net(nn.Module):
    """With a frozen weight, one that has no gradient at some steps, and buffers that change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(30, 40)
        self.norm = nn.BatchNorm1d(40)
        self.last = nn.Linear(40, 30)
        self.frozen = nn.Linear(30, 30).requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.last(self.norm(self.first(x)))) * self.gain


class Run:
    """A training with a snapshot of every step, fed by gradients."""

    def __init__(
        self,
        folder: Path,
        kind: Any = torch.optim.AdamW,
        model: Net | None = None,
        prove_every: int = 1,
        **options: Any,
    ) -> None:
        self.model = Net() if model is None else model
        options = {"lr": 0.01, **options}
        groups = [
            {"params": [p for n, p in self.model.named_parameters() if n != "first.bias"]},
            {"params": [self.model.first.bias], "lr": 0.1},
        ]
        self.optimizer = kind(groups, **options)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.average = copy.deepcopy(self.model.last).requires_grad_(False)
        state = {
            "model": self.model,
            "optim": self.optimizer,
            "sched": self.scheduler,
            "average": self.average,
        }
        memory = holdfast.Memory("none", feed="gradient", prove_every=prove_every)
        self.ckpt = holdfast.Checkpointer(
            folder / "root", state, every=holdfast.Every(memory=1), memory=memory, deadline_s=120
        )
        self.step = 0
        self.averages = self.schedules = True
        self.events: list[holdfast.events.Event] = []
        self.listening = holdfast.events.listen(self.events.append)
        self.listening.__enter__()

    def train(self, *, closure: bool = False) -> None:
        self.step += 1
        torch.manual_seed(self.step)
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 30)).square().mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        if self.step % 3 == 0:
            self.model.last.bias.grad = None
        self.optimizer.step((lambda: torch.tensor(0.0)) if closure else None)
        if self.schedules:
            self.scheduler.step()
        if self.averages:
            for mean, p in zip(self.average.parameters(), self.model.last.parameters()):
                mean.lerp_(p.detach(), 0.1)

    def save(self, *, wait: bool = True) -> None:
        self.ckpt.step(self.step)
        if wait:
            self.ckpt.wait(120)

    def values(self) -> dict[str, torch.Tensor]:
        found = {k: v.clone() for k, v in self.model.state_dict().items()}
        found |= {f"average.{k}": v.clone() for k, v in self.average.state_dict().items()}
        for name, p in self.model.named_parameters():
            for key, value in self.optimizer.state.get(p, {}).items():
                found[f"{name}.{key}"] = value.clone()
        return found | {"lr": torch.tensor([g["lr"] for g in self.optimizer.param_groups])}

    def restore(self) -> int:
        """What memory has, after all of it here was ruined."""
        with torch.no_grad():
            for module in (self.model, self.average):
                for tensor in module.state_dict().values():
                    tensor.zero_()
        self.optimizer.state.clear()
        return self.ckpt.restore()

    def seen(self, name: str) -> list[Any]:
        return [e.fields for e in self.events if e.name == name]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    wrong = [name for name in a if not torch.equal(a[name], b[name])]
    assert not wrong


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(tmp_path / "node"))
    yield tmp_path
    if (tmp_path / "node" / "agent.json").exists():
        kill(tmp_path / "node")


@pytest.mark.soak_except("SGD-options0", "AdamW-options2", "AdamW-options3")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.Adam, {"weight_decay": 0.1, "foreach": True}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    ],
)
def test_it_is_the_state(folder: Path, kind: Any, options: dict[str, Any]) -> None:
    run = Run(folder, kind, **options)
    for _ in range(8):
        run.train()
        run.save()
    assert [f["step"] for f in run.seen("feed.followed")] == [4, 5, 6, 7, 8]
    expected = run.values()
    assert run.restore() == 8
    (told,) = run.seen("restore.from_replica")
    assert told == {"step": 8, "exactness": "bit-exact, compared last at step 3"}
    same(run.values(), expected)
    for _ in range(4):  # the replica begins anew
        run.train()
        run.save()
    assert run.seen("feed.followed")[-1]["step"] == 12
    expected = run.values()
    assert run.restore() == 12
    same(run.values(), expected)
    run.ckpt.close()


def test_snapshots_that_nobody_waits_for(folder: Path) -> None:
    """Training goes on meanwhile; the replica stops at each snapshot's step until it is copied."""
    run = Run(folder)
    at = {}
    while len(run.seen("feed.followed")) < 2 and run.step < 3000:
        run.train()
        at[run.step] = run.values()
        run.save(wait=False)
    run.ckpt.wait(120)
    assert len(run.seen("feed.followed")) >= 2
    step = run.restore()
    assert step > 2
    same(run.values(), at[step])
    run.ckpt.close()


def test_a_snapshot_that_is_left_out_holds_up_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one under way is of the replica, and takes longer than several steps."""
    run = Run(folder)
    for _ in range(4):
        run.train()
        run.save()
    assert run.seen("feed.followed")
    gate, copy_all = threading.Event(), snapshot.Copies.run
    monkeypatch.setattr(snapshot.Copies, "run", lambda *a: (gate.wait(120), copy_all(*a))[1])
    run.train()
    run.save(wait=False)
    with ThreadPoolExecutor(1) as pool:
        try:
            for _ in range(3):
                run.save(wait=False)
                pool.submit(run.train).result(120)
        finally:
            gate.set()
    run.ckpt.wait(120)
    assert run.seen("snapshot.committed")[-1]["step"] == 5
    assert len(run.seen("snapshot.skipped")) == 3
    run.ckpt.close()


@pytest.mark.parametrize("when", ["before the snapshot", "after it"])
def test_weights_that_are_written_elsewhere(folder: Path, when: str) -> None:
    """The next snapshot is of the state itself."""
    run = Run(folder)
    for _ in range(6):
        run.train()
        if run.step == 4 and when == "before the snapshot":
            with torch.no_grad():
                run.model.first.weight.mul_(0.5)
        run.save()
        if run.step == 4 and when == "after it":
            with torch.no_grad():
                run.model.first.weight.mul_(0.5)
    assert [f["why"] for f in run.seen("twins.lost")] == [
        "weights or states were written outside optimizer.step()"
    ]
    expected = run.values()
    assert run.restore() == 6
    same(run.values(), expected)
    run.ckpt.close()


def test_a_step_that_calls_no_hooks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in a device's graph, which writes uncounted: the replica has missed it, and is not copied."""
    monkeypatch.setattr(blocking_saves, "devices_in", lambda live: [torch.device("cpu")])
    run = Run(folder)
    for _ in range(4):
        run.train()
        run.save()
    assert run.seen("feed.followed")
    run.step += 1
    for p in run.model.parameters():
        p.data.mul_(0.5)
    run.save()
    expected = run.values()
    assert run.restore() == 5
    same(run.values(), expected)
    run.ckpt.close()


def test_weights_that_a_hook_after_the_step_writes(folder: Path) -> None:
    """It was there before the replica's own, and begins to when the replica has proved itself."""
    run = Run(folder)

    @torch.no_grad()
    def clamp(*_: Any) -> None:
        if run.step in (6, 7):
            run.model.first.weight.clamp_(-0.01, 0.01)

    run.optimizer.register_step_post_hook(clamp)
    at = {}
    while run.step < 12:
        run.train()
        run.save()
        at[run.step] = run.values()
        if run.step == 7:
            assert run.restore() == 7
            same(run.values(), at[7])
    assert "written outside" in run.seen("twins.lost")[0]["why"]
    followed = [f["step"] for f in run.seen("feed.followed")]
    assert (followed[:2], followed[-1]) == ([4, 5], 12)
    assert not {6, 7} & set(followed)
    assert run.restore() == 12
    same(run.values(), at[12])
    run.ckpt.close()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("what", ["swapped", "given a group", "left out"])
def test_parameters_that_go_to_another_group(folder: Path, kind: Any, what: str) -> None:
    run = Run(folder, kind)
    run.schedules = False  # of two groups alone
    groups, bias = run.optimizer.param_groups, run.model.first.bias
    while run.step < 12:
        if run.step == 5 and what == "swapped":
            groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]
        if run.step == 5 and what != "swapped":
            groups[1]["params"].remove(bias)
        if run.step == 5 and what == "given a group":
            run.optimizer.add_param_group({"params": [bias], "lr": 0.5})
        run.train()
        run.save()
    if what == "left out":
        run.optimizer.state.pop(bias, None)  # nobody saves it any more
    expected = run.values()
    assert run.restore() == 12
    same(run.values(), expected)
    assert run.seen("twins.lost")[0]["why"] == "parameters are in other groups now"
    followed = [f["step"] for f in run.seen("feed.followed")]
    assert (followed[:2], followed[-3:]) == ([4, 5], [10, 11, 12])
    assert 6 not in followed
    assert not run.seen("feed.drift")
    run.ckpt.close()


def test_a_parameter_that_is_in_two_groups(folder: Path) -> None:
    """Torch bears that, where it is appended; no optimizer can be made so.  Snapshots go on."""
    run = Run(folder)
    run.schedules = False
    while run.step < 9:
        if run.step == 5:
            run.optimizer.param_groups[0]["params"].append(run.model.first.bias)
        run.train()
        run.save()
    run.ckpt.wait()
    assert "more than one parameter group" in run.seen("twins.ended")[0]["why"]
    assert run.seen("snapshot.committed")[-1]["step"] == 9
    run.ckpt.close()


@pytest.mark.parametrize("where", ["a group of its own", "a group that is there"])
def test_a_parameter_that_a_second_optimizer_comes_to_train(folder: Path, where: str) -> None:
    """Nothing follows that: each of the two has a weight of its own beside the training."""
    model = nn.Linear(6, 3)
    a, b = torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)
    memory = holdfast.Memory("none", feed="gradient")
    every, state = holdfast.Every(memory=1), {"model": model, "a": a, "b": b}
    events: list[holdfast.events.Event] = []
    with (
        holdfast.events.listen(events.append),
        holdfast.Checkpointer(folder / "root", state, every=every, memory=memory) as ckpt,
    ):
        for step in range(1, 11):
            if step == 6 and where == "a group of its own":
                b.add_param_group({"params": [model.weight]})
            elif step == 6:
                b.param_groups[0]["params"].append(model.weight)
            model(torch.randn(4, 6)).square().mean().backward()
            a.step()
            b.step()
            model.zero_grad()
            ckpt.step(step)
            ckpt.wait(120)
        expected = {k: v.clone() for k, v in model.state_dict().items()}
        assert ckpt.restore() == 10
        same(dict(model.state_dict()), expected)
    assert [e.fields["step"] for e in events if e.name == "feed.followed"] == [4, 5]
    (ended,) = (e.fields["why"] for e in events if e.name == "twins.ended")
    assert "'a' and 'b' train the same parameter" in ended


@pytest.mark.parametrize("what", ["loaded", "written"])
def test_states_that_are_set_elsewhere(folder: Path, what: str) -> None:
    run = Run(folder)
    while run.step < 8 or [e["step"] for e in run.seen("feed.followed")][-1:] != [run.step]:
        assert run.step < 30
        run.train()
        if run.step == 4 and what == "loaded":
            run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
            for state in run.optimizer.state.values():
                state["exp_avg"] = torch.zeros_like(state["exp_avg"])
        if run.step == 4 and what == "written":
            run.optimizer.state[run.model.gain]["exp_avg"].zero_()
        if run.step == 5:  # the replica learns from this one, or from the one before
            run.ckpt._tiers.get("memory")._feed.twins.forget("a test")
        run.save()
    assert "written outside" in run.seen("twins.lost")[0]["why"]
    assert not run.seen("feed.drift")
    expected = run.values()
    assert run.restore() == run.step
    same(run.values(), expected)
    run.ckpt.close()


def test_what_the_replica_has_not_is_of_the_same_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An average of the weights, while the training goes on before the snapshot is copied."""
    run, going_on = Run(folder), threading.Event()
    moment = Feed.moment

    def late(feed: Feed, op: Any, plan: Any) -> Any:
        assert going_on.wait(120)
        return moment(feed, op, plan)

    for _ in range(4):
        run.train()
        run.save()
    monkeypatch.setattr(Feed, "moment", late)
    run.train()
    run.save(wait=False)
    expected = run.values()
    run.train()
    run.train()
    going_on.set()
    run.ckpt.wait(120)
    assert run.seen("feed.followed")[-1]["step"] == 5
    assert run.restore() == 5
    same(run.values(), expected)
    run.ckpt.close()


def test_an_average_that_begins_while_a_snapshot_waits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That nobody had set it aside is found; the snapshot before stays."""
    monkeypatch.setattr(copy_timing, "COPIED_AT_CALL_BYTES", 0)
    run, going_on = Run(folder), threading.Event()
    run.averages = False
    moment = Feed.moment

    def late(feed: Feed, op: Any, plan: Any) -> Any:
        assert going_on.wait(120)
        return moment(feed, op, plan)

    for _ in range(4):
        run.train()
        run.save()
    expected = run.values()
    monkeypatch.setattr(Feed, "moment", late)
    run.train()
    run.save(wait=False)
    run.averages = True
    run.train()
    going_on.set()
    with pytest.warns(holdfast.HoldfastWarning, match="written outside"):
        run.ckpt.wait(120)
    assert run.restore() == 4
    same(run.values(), expected)
    run.ckpt.close()


def test_sharded_modules_are_left_to_the_training_thread(folder: Path) -> None:
    """`reshard`, as FSDP2 has it, in the middle of a forward pass would be its end."""

    class Sharded(Net):
        threads: ClassVar[set[str]] = set()

        def reshard(self) -> None:
            self.threads.add(threading.current_thread().name)

        def unshard(self) -> None: ...

    run = Run(folder, model=Sharded())
    for _ in range(4):
        run.train()
        run.save()
    assert run.seen("feed.followed")
    assert Sharded.threads == {threading.main_thread().name}
    run.ckpt.close()


def test_no_save_fails_by_the_replica(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(Feed, "_make", fail)
    run = Run(folder)
    run.train()
    run.ckpt.save(1).wait(120)
    assert run.seen("twins.ended") == [{"why": "MemoryError: no more"}]
    run.ckpt.close()


def test_a_replica_that_differs_is_found_by_a_durable_save(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(folder)
    apply = Twin.apply

    def inexactly(twin: Twin, gradient: Gradient) -> None:
        apply(twin, gradient)
        with torch.no_grad():
            twin.weights[0].add_(1e-3)

    for _ in range(7):
        run.train()
        run.save()
        if run.step == 4:
            monkeypatch.setattr(Twin, "apply", inexactly)
    monkeypatch.setattr(Twin, "apply", apply)
    run.ckpt.save(7).wait(120)
    (drift,) = run.seen("feed.drift")
    assert 2.5e-3 < drift["most"] < 3.5e-3
    assert drift["tensor"] == "model.gain"
    for _ in range(2):
        run.train()
        run.save()
    followed = len(run.seen("feed.followed"))
    run.train()
    run.save()
    assert len(run.seen("feed.followed")) == followed + 1
    expected = run.values()
    assert run.restore() == 10
    same(run.values(), expected)
    run.ckpt.close()


def test_durable_saves_of_the_replica(folder: Path) -> None:
    """Two of three, once it is proved; what storage has is the state, and says of what it was made."""
    run = Run(folder, prove_every=3)
    durable = {}
    for _ in range(12):
        run.train()
        if run.step > 3:
            run.ckpt.save(run.step).wait(120)
            durable[run.step] = run.values()
        else:
            run.save()
    followed = [f["step"] for f in run.seen("feed.followed")]
    assert followed == [4, 5, 7, 8, 10, 11]
    assert not run.seen("feed.drift")
    run.ckpt.close()
    kill(folder / "node")  # storage is what is left
    for step in (7, 9):
        again = Run(folder, prove_every=3)
        assert again.ckpt.restore(step) == step
        same(again.values(), durable[step])
        told = [f["exactness"] for f in again.seen("restore.from_replica")]
        assert told == ["bit-exact, compared last at step 6"] * (step in followed)
        again.ckpt.close()


def test_a_durable_step_that_is_not_exact(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a run on a device: a restart from storage says so."""
    monkeypatch.setattr(Feed, "exactness", Exactness(False, 1e-7, 3))
    run = Run(folder, prove_every=2)
    for _ in range(3):
        run.train()
        run.save()
    run.train()
    run.ckpt.save(run.step).wait(120)
    run.ckpt.close()
    kill(folder / "node")
    again = Run(folder)
    with pytest.warns(holdfast.HoldfastWarning, match=r"step 4 was made from gradients.*1e-07"):
        assert again.ckpt.restore() == 4
    again.ckpt.close()


def test_a_state_that_is_loaded_in_between_is_learned_anew(folder: Path) -> None:
    run = Run(folder)
    for _ in range(6):
        run.train()
        run.save()
        if run.step == 2:
            holdfast.save(folder / "other", {"model": run.model}, step=2)
    holdfast.load(folder / "other", {"model": run.model})
    for _ in range(3):
        run.train()
        run.save()
    assert run.seen("twins.lost")
    expected = run.values()
    assert run.restore() == 9
    same(run.values(), expected)
    run.ckpt.close()


def test_a_proof_that_is_left_out_is_made_up_for(folder: Path) -> None:
    """A save that others lean on is of the live state, too, and proves as much."""
    run = Run(folder, prove_every=3)
    feed = run.ckpt._tiers.get("memory")._feed
    for _ in range(3):
        run.train()
        run.save()
    for _ in range(3):
        feed.proof.count_durable(
            must_prove=False
        )  # as of saves that were skipped: the proof among them
    run.train()
    run.ckpt.save(run.step).wait(120)
    assert not run.seen("feed.followed")  # the proof that is owed
    run.train()
    run.ckpt.save(run.step).wait(120)
    assert [f["step"] for f in run.seen("feed.followed")] == [5]
    run.train()
    run.ckpt._begin(run.step, must=True, live=True).wait(120)
    assert [f["step"] for f in run.seen("feed.followed")] == [5]
    run.ckpt.close()


def test_a_proof_that_ends_meanwhile_is_another_one_s(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier save is compared just when a later one is described, which proves all the same."""
    run = Run(folder)
    for _ in range(3):
        run.train()
        run.save()
    feed, arranged = run.ckpt._tiers.get("memory")._feed, Feed.arranged

    def compared(feed: Feed, live: Any) -> Any:
        feed.proof.is_owed = False
        return arranged(feed, live)

    monkeypatch.setattr(Feed, "arranged", compared)
    run.train()
    run.ckpt.save(run.step).wait(120)
    assert not run.seen("feed.followed")
    assert feed.proof.compared == 4
    run.ckpt.close()


def test_what_ranks_know_of_exactness_is_put_together() -> None:
    exact, rough = Exactness(True, 0.0, 40), Exactness(False, 2e-7, 50)
    assert exactness_note([None, None]) == {}
    assert exactness_note([None, exact]) == {"replica": "bit-exact, compared last at step 40"}
    (text,) = exactness_note([exact, None, rough]).values()
    assert text.startswith("numerically equal, within 2e-07") and text.endswith("step 40")


def test_a_durable_save_whose_replica_is_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails and says so; the next one is of the live state."""
    run = Run(folder, prove_every=100)
    for _ in range(4):
        run.train()
        run.save()
    moment = Feed.moment

    def lost(feed: Feed, op: Any, plan: Any) -> Any:
        feed.twins.forget("a test")
        return moment(feed, op, plan)

    monkeypatch.setattr(Feed, "moment", lost)
    run.train()
    with pytest.raises(holdfast.HoldfastError, match="the replica was lost"):
        run.ckpt.save(run.step).wait(120)
    run.train()
    run.ckpt.save(run.step).wait(120)
    expected = run.values()
    assert holdfast.steps(folder / "root") == [6]
    assert run.restore() == 6
    same(run.values(), expected)
    run.ckpt.close()


def test_a_closure_cannot_be_followed(folder: Path) -> None:
    run = Run(folder, torch.optim.SGD)
    for _ in range(6):
        run.train(closure=True)
        run.save()
    assert not run.seen("feed.followed")
    expected = run.values()
    assert run.restore() == 6
    same(run.values(), expected)
    run.ckpt.close()


def test_what_cannot_be_followed_is_refused(folder: Path) -> None:
    model = nn.Linear(4, 4)
    memory = holdfast.Memory(feed="gradient")
    for optimizer, text in (
        (torch.optim.LBFGS(model.parameters()), "not known to treat each element"),
        (torch.optim.SGD([nn.Parameter(torch.ones(2))]), "that no module of the state has"),
    ):
        with pytest.raises(UsageError, match=text):
            holdfast.Checkpointer(folder / "r", {"m": model, "o": optimizer}, memory=memory)
    both = {"a": torch.optim.SGD(model.parameters()), "b": torch.optim.SGD([model.weight])}
    with pytest.raises(UsageError, match="'a' and 'b' train the same parameter"):
        holdfast.Checkpointer(folder / "r", {"m": model, **both}, memory=memory)
    with pytest.raises(UsageError, match="needs an optimizer"):
        holdfast.Checkpointer(folder / "r", {"m": model}, memory=memory)
    with pytest.raises(UsageError, match="must be state or gradient"):
        holdfast.Memory(feed="gradients")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"prove_every=0.*must be 1 or more"):
        holdfast.Memory(feed="gradient", prove_every=0)
    with pytest.raises(UsageError, match='needs feed="gradient": without it there is no replica'):
        holdfast.Memory(prove_every=2)
