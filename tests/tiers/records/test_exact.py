"""A training that is taken up from its records equals the uninterrupted one, bit for bit."""

from __future__ import annotations

import copy
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import holdfast
from holdfast.errors import UsageError
from holdfast.live.state import blockwise
from holdfast.tiers.records.replay import Replay
from live.state.test_optimizers import Counted

pytestmark = pytest.mark.slow

STEPS = 9
BASE = 4
"""The last full save before the end."""

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@pytest.fixture
def root() -> Iterator[Path]:
    """In memory: it is about values, not about disks."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="holdfast-test-") as folder:
        yield Path(folder)


class Net(nn.Module):
    """A bit of everything: batch norm, a frozen parameter, one without gradient, one now and then."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.sometimes = nn.Linear(16, 16)
        self.last = nn.Linear(16, 2, bias=False)
        self.register_buffer("large", torch.zeros(600, 600))
        self.large_at = 0
        """When a buffer that is too large for every record changes, which takes a full save."""
        self.to(dtype)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        y = self.frozen(torch.relu(self.norm(self.first(x))))
        if step % 3 == 0:
            y = y + self.sometimes(y)
        if step == self.large_at and hasattr(self, "large"):
            self.large[step] += 1
        return self.last(torch.dropout(y, 0.2, self.training))


class Run:
    """A training; `self.state` is all that must come back."""

    def __init__(self, make: Make, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(3)
        self.model = Net(dtype)
        self.optim = make(list(self.model.parameters()))
        self.sched = lr_scheduler.ExponentialLR(self.optim, 0.8)
        self.told: dict[str, Any] = {"seen": 0, "mean": torch.zeros(3)}
        self.dtype = dtype
        self.accumulate, self.clip = 1, 0.3
        self.in_place = True
        """Gradients stay and are zeroed, at every other step; what is left of them no checkpoint has."""
        self.state = {
            "model": self.model,
            "optim": self.optim,
            "sched": self.sched,
            "told": self.told,
        }
        torch.manual_seed(17)

    def step(self, number: int) -> None:
        self.optim.zero_grad(set_to_none=not self.in_place or number % 2 == 0)
        for _ in range(self.accumulate):
            x = torch.randn(8, 6).to(self.dtype)
            self.model(x, number).square().mean().backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optim.step()
        self.sched.step()
        self.told["seen"] += 8
        self.told["mean"] += x.float().mean()

    def everything(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            f"model.{k}": v.clone() for k, v in self.model.state_dict().items()
        }
        for name, p in self.model.named_parameters():
            for key, value in self.optim.state.get(p, {}).items():
                found[f"optim.{name}.{key}"] = copy.deepcopy(value)
        found |= {
            "groups": [
                {k: v for k, v in g.items() if k != "params"} for g in self.optim.param_groups
            ]
        }
        found |= {"sched": self.sched.state_dict(), "told": copy.deepcopy(self.told)}
        return found | {"rng": torch.get_rng_state()}


class Mastered(Run):
    """The optimizer has float32 masters, which are nowhere else in the state."""

    def __init__(self, make: Make, dtype: torch.dtype) -> None:
        self.masters: list[torch.Tensor] = []
        super().__init__(lambda p: make(self._copies(p)), dtype)

    def _copies(self, params: list[nn.Parameter]) -> list[nn.Parameter]:
        self.masters = [nn.Parameter(p.detach().float()) for p in params]
        return self.masters  # type: ignore[return-value]

    def step(self, number: int) -> None:
        self.model.zero_grad()
        self.model(torch.randn(8, 6).to(self.dtype), number).square().mean().backward()
        for p, master in zip(self.model.parameters(), self.masters):
            master.grad = None if p.grad is None else p.grad.float()
        self.optim.step()
        self.sched.step()
        with torch.no_grad():
            for p, master in zip(self.model.parameters(), self.masters):
                p.copy_(master)

    def everything(self) -> dict[str, Any]:
        found = super().everything()
        for number, master in enumerate(self.masters):
            found[f"master{number}"] = master.detach().clone()
            found[f"states{number}"] = copy.deepcopy(dict(self.optim.state.get(master, {})))
        return found


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def check_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    assert [k for k in a if not equal(a[k], b[k])] == []


def checkpointer(root: Path, run: Run, **options: Any) -> holdfast.Checkpointer:
    return holdfast.Checkpointer(
        root,
        run.state,
        every=holdfast.Every(durable=BASE, delta=1),
        delta=holdfast.Delta(**options),
        on_error="raise",
    )


def recorded(
    root: Path, new: Callable[[], Run], until: int = STEPS, **options: Any
) -> dict[str, Any]:
    """Train with records; everything after the last step."""
    run = new()
    with checkpointer(root, run, **options) as ckpt:
        assert ckpt.restore() == 0
        for number in range(1, until + 1):
            run.step(number)
            if number % BASE == 0:
                ckpt.wait()  # a full save is left out while another one is in flight
            ckpt.step(number)
        return run.everything()


def forget(root: Path, step: int) -> None:
    """As if a full save had not been made."""
    for file in (root / "steps" / f"{step:010d}").rglob("manifest.json"):
        file.unlink()


def check_restored(root: Path, new: Callable[[], Run], expected: dict[str, Any]) -> None:
    """The end is reached from the full save at BASE, by its records alone."""
    forget(root, 2 * BASE)
    run, replayed = new(), []
    with (
        checkpointer(root, run) as ckpt,
        holdfast.events.listen(
            lambda e: replayed.append(e.fields["steps"]) if e.name == "replay" else None
        ),
    ):
        assert ckpt.restore() == STEPS
        check_equal(run.everything(), expected)
    assert replayed == [STEPS - BASE]
    assert all(p.grad is None for p in run.model.parameters())


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "momentum": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "adamw-two-groups": lambda p: torch.optim.AdamW(
        [{"params": p[:3], "weight_decay": 0.0}, {"params": p[3:], "lr": 0.02}], lr=0.01
    ),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adagrad-foreach": lambda p: torch.optim.Adagrad(p, lr=0.05, foreach=True),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "rmsprop-foreach": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=True),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["muon"] = lambda p: torch.optim.Muon([x for x in p if x.ndim == 2], lr=0.02)


def test_a_rate_that_has_become_a_tensor_stays_that_tensor(root: Path) -> None:
    """A scheduler or a captured graph may hold it.  What is replayed has the recorded number."""
    at_the_end = recorded(root, lambda: Run(OPTIMIZERS["adamw-loop"]))
    forget(root, 2 * BASE)
    run = Run(OPTIMIZERS["adamw-tensor-lr"])
    held = run.optim.param_groups[0]["lr"]
    with checkpointer(root, run) as ckpt:
        assert ckpt.restore() == STEPS
    assert run.optim.param_groups[0]["lr"] is held
    assert held.item() == pytest.approx(0.01 * 0.8**STEPS)
    found = run.everything()
    for key in ("groups", "sched"):  # which have tensors for numbers
        del found[key], at_the_end[key]
    check_equal(found, at_the_end)


@pytest.mark.soak_except("momentum", "adamw", "rmsprop")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(root: Path, name: str) -> None:
    def new() -> Run:
        return Run(OPTIMIZERS[name])

    at_the_end = recorded(root, new)
    check_restored(root, new, at_the_end)
    plain = new()
    for number in range(1, STEPS + 1):
        plain.step(number)
    check_equal(plain.everything(), at_the_end)


def test_state_that_belongs_to_no_parameter(root: Path) -> None:
    """Steps that are made again carry it on."""

    class Counting(Run):
        def everything(self) -> dict[str, Any]:
            own = {k: copy.deepcopy(v) for k, v in self.optim.state.items() if isinstance(k, str)}
            return super().everything() | {"own": own}

    def new() -> Run:
        return Counting(Counted)

    at_the_end = recorded(root, new)
    check_restored(root, new, at_the_end)
    assert at_the_end["own"]["k"] == STEPS


class Ticks:
    """An object with a state of its own."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def test_values_of_all_kinds_in_parameter_groups(root: Path) -> None:
    """A dtype, a quantised tensor, one that is too large to go into a full save's extras, an object."""

    class Odd(Run):
        def __init__(self) -> None:
            super().__init__(OPTIMIZERS["adamw"])
            (self.group,) = self.optim.param_groups
            self.group |= {"store": torch.bfloat16, "ticks": Ticks(), "many": torch.zeros(20_000)}

        def step(self, number: int) -> None:
            self.group["ticks"].number += 1
            self.group["many"] += number
            scale = 0.1 * number
            self.group["few"] = torch.quantize_per_tensor(torch.ones(3), scale, 1, torch.qint8)
            super().step(number)

        def everything(self) -> dict[str, Any]:
            found = super().everything()
            (group,) = found["groups"]
            few, many = group.pop("few"), group["many"].clone()
            ticks = group["ticks"].state_dict()
            group |= {"ticks": ticks, "many": many, "few": few.dequantize(), "scale": few.q_scale()}
            return found

    check_restored(root, Odd, recorded(root, Odd))


class Face(torch.optim.Optimizer):
    """Shows an optimizer's states and groups as its own, and never was made as one (as accelerate's)."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults)  # type: ignore[assignment]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


def test_an_optimizer_that_only_shows_another_one(root: Path) -> None:
    """It is the inner one whose steps are recorded and made again."""

    def new() -> Run:
        return Run(lambda p: Face(OPTIMIZERS["adamw"](p)))

    at_the_end = recorded(root, new)
    check_restored(root, new, at_the_end)
    plain = Run(OPTIMIZERS["adamw"])
    for number in range(1, STEPS + 1):
        plain.step(number)
    check_equal(plain.everything(), at_the_end)


def test_an_optimizer_whose_steps_cannot_be_seen_is_refused(root: Path) -> None:
    class Blind(Face):
        """What is inside has other states."""

        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.optimizer, self.own = inner, {}  # type: ignore[var-annotated]

        state = property(lambda self: self.own)  # type: ignore[assignment]

    with pytest.raises(UsageError, match="cannot see the steps of 'optim', a Blind") as caught:
        checkpointer(root, Run(lambda p: Blind(OPTIMIZERS["adamw"](p))))
    assert "hand that over" in str(caught.value)


@pytest.mark.soak_except("rmsprop")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replayed_in_blocks(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters here are smaller than a block is, so blocks are made smaller."""
    monkeypatch.setattr(blockwise, "CACHED_BYTES", 200)
    made = 0

    def step(one: blockwise.Blockwise) -> None:
        nonlocal made
        made += 1
        original(one)

    original = blockwise.Blockwise.step
    monkeypatch.setattr(blockwise.Blockwise, "step", step)

    hooked = []

    def new() -> Run:
        run = Run(OPTIMIZERS[name])
        run.optim.register_step_post_hook(lambda *given: hooked.append(given))
        return run

    check_restored(root, new, recorded(root, new))
    assert all(args == (optim,) and not kwargs for optim, args, kwargs in hooked)
    assert len(hooked) == STEPS + (STEPS - BASE)
    assert bool(made) == (name not in ("sgd", "muon") and "fused" not in name)


def test_the_next_record_is_read_while_one_is_applied(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is not applied before the second is read, which nobody would wait for otherwise."""

    def new() -> Run:
        return Run(OPTIMIZERS["adamw"])

    expected = recorded(root, new)
    read, apply = Replay._read, Replay._apply
    done: list[int] = []
    another = threading.Condition()

    def reading(replay: Replay, step: Any, into: Any) -> None:
        read(replay, step, into)
        with another:
            done.append(step.step)
            another.notify()

    def applying(replay: Replay, step: Any, grads: Any) -> None:
        with another:
            assert another.wait_for(lambda: step.step == STEPS or step.step + 1 in done, 20)
        apply(replay, step, grads)

    monkeypatch.setattr(Replay, "_read", reading)
    monkeypatch.setattr(Replay, "_apply", applying)
    check_restored(root, new, expected)
    assert done == list(range(BASE + 1, STEPS + 1))


@pytest.mark.soak_except("pure-sgd", "masters-adamw")
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw", "adagrad", "rmsprop"])
@pytest.mark.parametrize("masters", [False, True], ids=["pure", "masters"])
def test_bfloat16(root: Path, name: str, masters: bool) -> None:
    def new() -> Run:
        return (Mastered if masters else Run)(OPTIMIZERS[name], torch.bfloat16)

    check_restored(root, new, recorded(root, new))


@pytest.mark.soak_except("sgd", "adam")
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw-fused", "adagrad", "rmsprop"])
def test_accumulated_gradients(root: Path, name: str) -> None:
    def new() -> Run:
        run = Run(OPTIMIZERS[name])
        run.accumulate = 3
        return run

    check_restored(root, new, recorded(root, new))


def test_a_large_buffer_that_changes_takes_a_full_save(root: Path) -> None:
    def new() -> Run:
        run = Run(OPTIMIZERS["adamw"])
        run.model.large_at = 6
        return run

    at_the_end = recorded(root, new)
    forget(root, 2 * BASE)
    assert holdfast.steps(root)[-1] == 6
    run = new()
    with checkpointer(root, run) as ckpt:
        assert ckpt.restore() == STEPS
        check_equal(run.everything(), at_the_end)


@pytest.mark.parametrize("size", [3, 40_000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_value_of_another_dtype_takes_a_full_save(
    root: Path, size: int, dtype: torch.dtype
) -> None:
    """Records have a place for the one that it had."""

    class Retyped(Run):
        def __init__(self) -> None:
            super().__init__(OPTIMIZERS["adamw"])
            self.told["mean"] = torch.zeros(size)

        def step(self, number: int) -> None:
            super().step(number)
            if number == 6:
                self.told["mean"] = (self.told["mean"] * 100).to(dtype)
            self.told["mean"] = self.told["mean"] + number

    at_the_end = recorded(root, Retyped)
    forget(root, 2 * BASE)
    assert holdfast.steps(root)[-1] == 6
    run = Retyped()
    run.told["mean"] = run.told["mean"].to(dtype)
    with checkpointer(root, run) as ckpt:
        assert ckpt.restore() == STEPS
        check_equal(run.everything(), at_the_end)


def test_it_goes_on_from_there(root: Path) -> None:
    """Over several restarts, each of which leads on from what the one before replayed."""

    def new() -> Run:
        run = Run(OPTIMIZERS["adamw"])
        run.in_place = False
        return run

    plain = new()
    for number in range(1, 16):
        plain.step(number)
    recorded(root, new, 3)
    for until in (6, 7, 11, 15):
        run = new()
        with checkpointer(root, run) as ckpt:
            step = ckpt.restore()
            while step < until:
                step += 1
                run.step(step)
                ckpt.step(step)
        assert step == until
    check_equal(run.everything(), plain.everything())


def test_any_recorded_step_can_be_restored(root: Path) -> None:
    def new() -> Run:
        return Run(OPTIMIZERS["adam"])

    recorded(root, new)
    for step in (5, 7, 4, 6):
        plain, run = new(), new()
        for number in range(1, step + 1):
            plain.step(number)
        expected = plain.everything()
        with checkpointer(root, run) as ckpt:
            assert ckpt.restore(step) == step
            check_equal(run.everything(), expected)


def test_several_optimizers(root: Path) -> None:
    """One of them steps now and then only."""

    class Two(Run):
        def __init__(self) -> None:
            super().__init__(lambda p: torch.optim.SGD(p[:2], lr=0.1, momentum=0.9))
            self.other = torch.optim.AdamW(list(self.model.parameters())[2:], lr=0.01)
            self.state["other"] = self.other

        def step(self, number: int) -> None:
            super().step(number)
            if number % 2:
                self.other.step()
                self.other.zero_grad()

        def everything(self) -> dict[str, Any]:
            states = [self.other.state.get(p, {}) for p in self.model.parameters()]
            return super().everything() | {"other": copy.deepcopy(states)}

    check_restored(root, Two, recorded(root, Two))


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips(root: Path, fused: bool) -> None:
    class Scaled(Run):
        def __init__(self) -> None:
            super().__init__(lambda p: torch.optim.AdamW(p, lr=0.01, fused=fused))
            self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
            self.state["scaler"] = self.scaler

        def step(self, number: int) -> None:
            self.optim.zero_grad()
            loss = self.model(torch.randn(8, 6), number).square().mean()
            if number in (6, 7):
                loss = loss * float("inf")
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optim)
            self.scaler.update()

        def everything(self) -> dict[str, Any]:
            return super().everything() | {"scaler": self.scaler.state_dict()}

    check_restored(root, Scaled, recorded(root, Scaled))


@pytest.mark.soak_except("options1")
@pytest.mark.parametrize("options", [{"batch": 3}, {"batch": 4, "queue": 1}, {"queue": 1}])
def test_batches(root: Path, options: dict[str, int]) -> None:
    def new() -> Run:
        return Run(OPTIMIZERS["adamw"])

    check_restored(root, new, recorded(root, new, **options))


def test_records_that_no_step_needs_are_deleted(root: Path) -> None:
    def new() -> Run:
        return Run(OPTIMIZERS["sgd"])

    run = new()
    with holdfast.Checkpointer(
        root,
        run.state,
        every=holdfast.Every(durable=BASE, delta=1),
        delta=holdfast.Delta(),
        keep=holdfast.Keep(last=1),
    ) as ckpt:
        for number in range(1, 11):
            run.step(number)
            ckpt.step(number)
            ckpt.wait()
    assert holdfast.steps(str(root)) == [8]
    kept = sorted(int(f.name.split("-")[0]) for f in (root / "log").glob("*/0*-*"))
    assert kept == [9, 10]


def test_a_parameter_group_that_is_added(root: Path) -> None:
    """What records hold is planned anew."""

    class Growing(Run):
        def __init__(self) -> None:
            super().__init__(lambda p: torch.optim.AdamW(p[:4], lr=0.01))

        def step(self, number: int) -> None:
            if number == 6:
                self.optim.add_param_group(
                    {"params": list(self.model.parameters())[4:], "lr": 0.02}
                )
            super().step(number)

    at_the_end = recorded(root, Growing)
    run = Growing()
    run.optim.add_param_group({"params": list(run.model.parameters())[4:], "lr": 0.02})
    run.sched.base_lrs.append(0.02)
    with checkpointer(root, run) as ckpt:
        assert ckpt.restore() == STEPS
        check_equal(run.everything(), at_the_end)


def test_an_average_of_the_weights(root: Path) -> None:
    """A module that no optimizer has: it is recorded whole."""

    class Averaged(Run):
        def __init__(self) -> None:
            super().__init__(OPTIMIZERS["adamw"])
            self.average = copy.deepcopy(self.model)
            self.state["average"] = self.average

        def step(self, number: int) -> None:
            super().step(number)
            with torch.no_grad():
                for mine, theirs in zip(self.average.parameters(), self.model.parameters()):
                    mine.lerp_(theirs, 0.1)

        def everything(self) -> dict[str, Any]:
            mine = {f"average.{k}": v.clone() for k, v in self.average.state_dict().items()}
            return super().everything() | mine

    at_the_end = recorded(root, Averaged)
    forget(root, 8)
    run = Averaged()
    with checkpointer(root, run) as ckpt:
        assert ckpt.restore() == STEPS
        check_equal(run.everything(), at_the_end)


def test_tensors_that_are_bound_anew_or_written_uncounted(root: Path) -> None:
    """Small ones and large ones: what is there when the step ends is what is recorded."""

    class Rebinding(Run):
        def __init__(self) -> None:
            super().__init__(OPTIMIZERS["adamw"])
            self.model.register_buffer("seen", torch.zeros(3))
            self.told |= {"table": torch.zeros(700, 700), "still": torch.ones(600, 600)}
            self.average = copy.deepcopy(nn.Linear(600, 600)).requires_grad_(False)
            self.state["average"] = self.average

        def step(self, number: int) -> None:
            super().step(number)
            self.model.seen = self.model.seen * 0.5 + number
            self.told["table"] = self.told["table"] + number
            self.average.weight.data.mul_(0.9).add_(0.01 * number)

        def everything(self) -> dict[str, Any]:
            return super().everything() | {"average": self.average.weight.clone()}

    at_the_end = recorded(root, Rebinding)
    forget(root, 8)
    run = Rebinding()
    with checkpointer(root, run) as ckpt:
        assert ckpt.restore() == STEPS
        check_equal(run.everything(), at_the_end)


def test_hooks_that_come_later(root: Path) -> None:
    """What changes gradients just before the step is registered after the Checkpointer was made."""
    run = Run(OPTIMIZERS["adamw"])
    with holdfast.Checkpointer(
        root, run.state, every=holdfast.Every(delta=1), delta=holdfast.Delta()
    ) as ckpt:

        def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(0.5)

        for number in range(1, 8):
            if number == 3:
                run.optim.register_step_pre_hook(halve)
            run.step(number)
            ckpt.step(number)
        at_the_end = run.everything()
    for registered in (False, True):  # what is recorded is what came of the hook
        again = Run(OPTIMIZERS["adamw"])
        if registered:
            again.optim.register_step_pre_hook(halve)
        with checkpointer(root, again) as ckpt:
            assert ckpt.restore() == 7
            check_equal(again.everything(), at_the_end)
            assert len(again.optim._optimizer_step_pre_hooks) == registered + 1


def test_a_run_that_restores_again_and_goes_another_way(root: Path) -> None:
    """In one process: what it recorded before is there, and then history."""
    run = Run(OPTIMIZERS["adamw"])
    run.in_place = False
    with checkpointer(root, run) as ckpt:
        for number in range(1, 6):
            run.step(number)
            ckpt.step(number)
        fifth = run.everything()
        began = time.monotonic()
        assert ckpt.restore() == 5
        assert time.monotonic() - began < 300
        check_equal(run.everything(), fifth)
        assert ckpt.restore(3) == 3
        torch.manual_seed(99)
        for number in (4, 5, 6):
            run.step(number)
            ckpt.step(number)
        other = run.everything()
    again = Run(OPTIMIZERS["adamw"])
    with checkpointer(root, again) as ckpt:
        assert ckpt.restore() == 6
        check_equal(again.everything(), other)


def test_a_save_of_what_was_just_restored(root: Path) -> None:
    """It may replace the full step that records led on from."""
    recorded(root, lambda: Run(OPTIMIZERS["adamw"]), 5)
    run = Run(OPTIMIZERS["adamw"])
    options = {"every": holdfast.Every(delta=1), "delta": holdfast.Delta()}
    with holdfast.Checkpointer(root, run.state, keep=holdfast.Keep(last=1), **options) as ckpt:
        assert ckpt.restore() == 5
        ckpt.save(5).wait()
        for number in range(6, 10):
            run.step(number)
            ckpt.step(number)
        at_the_end = run.everything()
    again = Run(OPTIMIZERS["adamw"])
    with checkpointer(root, again) as ckpt:
        assert ckpt.restore() == 9
        check_equal(again.everything(), at_the_end)


@pytest.mark.parametrize("when", ["before the record", "after the record"])
def test_weights_that_somebody_else_writes(root: Path, when: str) -> None:
    """No record leads over that, so a full save is made."""

    def edit(run: Run) -> None:
        with torch.no_grad():
            run.model.last.weight.clamp_(-0.1, 0.1)

    run = Run(OPTIMIZERS["adamw"])
    every = holdfast.Every(delta=1)
    with holdfast.Checkpointer(root, run.state, every=every, delta=holdfast.Delta()) as ckpt:
        for number in range(1, 7):
            run.step(number)
            if number == 4 and when == "before the record":
                edit(run)
            ckpt.step(number)
            if number == 4 and when == "after the record":
                edit(run)
        at_the_end = run.everything()
    again = Run(OPTIMIZERS["adamw"])
    with checkpointer(root, again) as ckpt:
        assert ckpt.restore() == 6
        check_equal(again.everything(), at_the_end)


def test_weights_that_are_loaded_in_between(root: Path, tmp_path: Path) -> None:
    """No record leads over that, either."""
    run = Run(OPTIMIZERS["adamw"])
    every = holdfast.Every(delta=1)
    with holdfast.Checkpointer(root, run.state, every=every, delta=holdfast.Delta()) as ckpt:
        for number in range(1, 7):
            run.step(number)
            ckpt.step(number)
            if number == 1:
                holdfast.save(tmp_path / "other", run.state, step=1)
            if number == 4:
                holdfast.load(tmp_path / "other", {"model": run.model})
        at_the_end = run.everything()
    again = Run(OPTIMIZERS["adamw"])
    with checkpointer(root, again) as ckpt:
        assert ckpt.restore() == 6
        check_equal(again.everything(), at_the_end)


def test_weights_that_are_always_written_are_refused(root: Path) -> None:
    def train() -> None:
        for number in range(1, 9):
            run.step(number)
            with torch.no_grad():
                run.model.last.weight.clamp_(-0.1, 0.1)
            ckpt.step(number)

    run = Run(OPTIMIZERS["adamw"])
    ckpt = checkpointer(root, run)
    with pytest.raises(UsageError, match=r"outside optimizer.step"):
        train()
    ckpt.close()


# -- what is refused ------------------------------------------------------------------------------


def refused(root: Path, step: Callable[[Run], None], make: Make = OPTIMIZERS["sgd"]) -> str:
    run = Run(make)
    with checkpointer(root, run) as ckpt:
        run.step(1)
        ckpt.step(1)
        with pytest.raises(UsageError) as caught:
            step(run)
    return str(caught.value)


def test_a_closure_is_refused(root: Path) -> None:
    def step(run: Run) -> None:
        run.optim.step(lambda: torch.tensor(1.0))

    assert "closure" in refused(root, step)


def test_two_steps_for_one_record_are_refused(root: Path) -> None:
    def step(run: Run) -> None:
        run.step(2)
        run.step(2)

    assert "two steps between two calls" in refused(root, step)


def test_sparse_gradients_are_refused(root: Path) -> None:
    def step(run: Run) -> None:
        p = run.model.first.weight
        p.grad = torch.ones_like(p).to_sparse()
        run.optim.step()

    assert "first.weight: a gradient of torch.float32 (16, 6) torch.sparse_coo" in refused(
        root, step
    )


def test_records_that_are_switched_on_and_never_due_are_told_once(root: Path) -> None:
    run = Run(OPTIMIZERS["sgd"])
    every = holdfast.Every(durable=BASE)
    with holdfast.Checkpointer(root, run.state, every=every, delta=holdfast.Delta()) as ckpt:
        for number in (1, 2, 3):
            run.step(number)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                ckpt.step(number)
            texts = [str(one.message) for one in told]
            assert [("every=Every(delta=1)" in text) for text in texts] == [True] * (number == 1)


def test_what_is_asked_for_must_be_there(root: Path) -> None:
    run = Run(OPTIMIZERS["sgd"])
    with pytest.raises(UsageError, match=r"needs Checkpointer\(delta="):
        holdfast.Checkpointer(root, run.state, every=holdfast.Every(delta=1))
    with pytest.raises(UsageError, match="1 or None"):
        holdfast.Every(delta=3)
    with pytest.raises(UsageError, match="needs an optimizer"):
        holdfast.Checkpointer(root, {"model": run.model}, delta=holdfast.Delta())
    with pytest.raises(UsageError, match="batch"):
        holdfast.Delta(batch=0)
