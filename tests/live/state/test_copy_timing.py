"""What something else than an optimizer writes is copied at the call: each step is of one moment."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.live.saving import saver
from holdfast.live.state import copy_timing, snapshot

WIDTH = 64


class Loop:
    """Trains an online network; `follow` moves another one at the begin of each iteration."""

    def __init__(self, follow: Callable[[Loop], None], optimizer: Callable[[Loop], Any]) -> None:
        torch.manual_seed(0)
        self.online = nn.Sequential(nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.follow = follow
        self.optim = optimizer(self)
        self.number = 0

    def iterate(self) -> None:
        self.number += 1
        self.follow(self)
        self.online(torch.randn(5, 8)).square().mean().backward()
        self.optim.step()
        self.optim.zero_grad()

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = {"online": self.online, "target": self.target}
        if isinstance(self.optim, torch.optim.Optimizer):
            found["optim"] = self.optim
        return found

    def copies(self) -> list[torch.Tensor]:
        both = [*self.online.parameters(), *self.target.parameters()]
        return [p.detach().clone() for p in both]


def lerp(loop: Loop) -> None:
    with torch.no_grad():
        for t, p in zip(loop.target.parameters(), loop.online.parameters()):
            t.lerp_(p, 0.05)


def by_data(loop: Loop) -> None:
    for t, p in zip(loop.target.parameters(), loop.online.parameters()):
        t.data.copy_(0.95 * t.data + 0.05 * p.data)


def by_numpy(loop: Loop) -> None:
    for t, p in zip(loop.target.parameters(), loop.online.parameters()):
        t.numpy()[...] += 0.05 * p.detach().numpy()


def other_memory(loop: Loop) -> None:
    for t, p in zip(loop.target.parameters(), loop.online.parameters()):
        t.data = t.data + 0.05 * p.data


def now_and_then(loop: Loop) -> None:
    if loop.number % 3 == 0:
        loop.target.load_state_dict(loop.online.state_dict())


class Plain:
    """An optimizer that torch knows nothing of."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params

    def step(self) -> None:
        for p in self.params:
            p.data -= 0.1 * p.grad

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None


class Hidden(torch.optim.SGD):
    """Its steps are made past torch's hooks."""

    def step(self) -> None:  # type: ignore[override]
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p -= 0.1 * p.grad

    step.hooked = True  # type: ignore[attr-defined]


OPTIMIZERS: dict[str, Callable[[Loop], Any]] = {
    "of the online network": lambda loop: torch.optim.Adam(loop.online.parameters(), lr=0.1),
    "of both": lambda loop: torch.optim.SGD(
        [*loop.online.parameters(), *loop.target.parameters()], lr=0.1
    ),
    "not torch's": lambda loop: Plain(list(loop.online.parameters())),
    "another in the state": lambda loop: Hidden(loop.online.parameters(), lr=0.1),
}


@pytest.fixture
def _late_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A copy in the window is made at its end, or after some time."""
    monkeypatch.setattr(copy_timing, "COPIED_AT_CALL_BYTES", 0)
    original = snapshot.Copies.run
    at_end = threading.Event()

    def late(*args: Any) -> None:
        at_end.wait(0.05)
        original(*args)

    monkeypatch.setattr(snapshot.Copies, "run", late)
    yield
    at_end.set()


@pytest.mark.usefixtures("_late_copies")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("follow", [lerp, by_data, by_numpy, other_memory])
def test_each_step_is_what_was_there_at_the_call(
    tmp_path: Path, follow: Callable[[Loop], None], optimizer: str
) -> None:
    loop, was = Loop(follow, OPTIMIZERS[optimizer]), {}
    options: dict[str, Any] = {"every": 1, "on_error": "raise"}
    with holdfast.Checkpointer(tmp_path, loop.state(), **options) as ckpt:
        for step in range(1, 6):
            loop.iterate()
            was[step] = loop.copies()
            ckpt.step(step)
    for step, copies in was.items():
        fresh = Loop(follow, OPTIMIZERS[optimizer])
        holdfast.load(tmp_path, {"online": fresh.online, "target": fresh.target}, step=step)
        assert all(map(torch.equal, fresh.copies(), copies)), step


@pytest.mark.usefixtures("_late_copies")
def test_what_is_written_in_a_window_for_the_first_time_fails_one_save(tmp_path: Path) -> None:
    """By name; all other steps are there, and right."""
    loop, was = Loop(now_and_then, OPTIMIZERS["of the online network"]), {}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with holdfast.Checkpointer(tmp_path, loop.state(), every=1) as ckpt:
            for step in range(1, 9):
                loop.iterate()
                was[step] = loop.copies()
                ckpt.step(step)
    failed = [str(one.message) for one in told if "written outside" in str(one.message)]
    assert len(failed) == 1
    assert "target.0.weight, target.0.bias, target.1.weight and 1 more" in failed[0]
    assert holdfast.steps(tmp_path) == [1, 3, 4, 5, 6, 7, 8]
    for step in holdfast.steps(tmp_path):
        fresh = Loop(now_and_then, OPTIMIZERS["of the online network"])
        holdfast.load(tmp_path, {"online": fresh.online, "target": fresh.target}, step=step)
        assert all(map(torch.equal, fresh.copies(), was[step])), step


class Frozen:
    """Adapters on a frozen base."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.optim = torch.optim.AdamW(self.adapter.parameters(), lr=0.1)
        self.state = {"base": self.base, "adapter": self.adapter, "optim": self.optim}

    def iterate(self) -> None:
        self.adapter(self.base(torch.randn(3, WIDTH))).square().mean().backward()
        self.optim.step()
        self.optim.zero_grad()


def test_a_frozen_base_is_copied_in_the_window_until_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore writes to it, too, and is no change."""
    monkeypatch.setattr(copy_timing, "COPIED_AT_CALL_BYTES", 0)
    run = Frozen()
    with holdfast.Checkpointer(tmp_path, run.state, on_error="raise") as ckpt:

        def save(step: int) -> set[str]:
            run.iterate()
            ckpt.save(step).wait(120)
            return {name for name, _ in ckpt._tiers.saver.aside}

        assert [save(step) for step in (1, 2, 3)] == [set(), set(), set()]
        assert ckpt.restore() == 3
        assert [save(step) for step in (4, 5)] == [set(), set()]
        run.base.weight.data.mul_(2)
        assert save(6) == {"base.weight"}
        assert save(7) == {"base.weight"}


def test_what_is_new_and_moved_by_no_optimizer_holds_up_its_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be written at once."""
    monkeypatch.setattr(copy_timing, "COPIED_AT_CALL_BYTES", 0)
    run = Frozen()
    with holdfast.Checkpointer(tmp_path, run.state, on_error="raise") as ckpt:
        for step in (1, 2):
            run.iterate()
            ckpt.save(step).wait(120)
        run.base.more = nn.Linear(WIDTH, WIDTH)
        was = run.base.more.weight.detach().clone()
        save = ckpt.save(3)
        run.base.more.weight.data.zero_()
        save.wait(120)
    with holdfast.open(tmp_path, step=3) as saved:
        assert torch.equal(torch.from_numpy(saved.read("base.more.weight")), was)


def test_a_small_state_is_copied_at_the_call(tmp_path: Path) -> None:
    """Whatever is written afterwards, at any time, and without a word."""
    run = Frozen()
    with (
        warnings.catch_warnings(),
        holdfast.Checkpointer(tmp_path, run.state, on_error="raise") as ckpt,
    ):
        warnings.simplefilter("error")
        for step in (1, 2, 3):
            run.iterate()
            was = [p.detach().clone() for p in run.adapter.parameters()]
            save = ckpt.save(step)
            for p in run.adapter.parameters():
                p.data.mul_(2)
            save.wait(120)
            fresh = Frozen()
            holdfast.load(tmp_path, {"adapter": fresh.adapter}, step=step)
            assert all(map(torch.equal, fresh.adapter.parameters(), was))


def test_weights_that_the_forward_pass_writes_fail_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window of the first save tells."""
    monkeypatch.setattr(copy_timing, "COPIED_AT_CALL_BYTES", 0)
    torch.manual_seed(0)
    model = nn.Embedding(10, 4, max_norm=0.5)
    optim = torch.optim.SGD(model.parameters(), lr=1.0)
    with holdfast.Checkpointer(
        tmp_path, {"model": model, "optim": optim}, every=1, on_error="raise"
    ) as ckpt:
        for step in range(1, 6):
            model(torch.arange(10)).sum().backward()
            optim.step()
            optim.zero_grad()
            was = model.weight.detach().clone()
            ckpt.step(step)
            model(torch.arange(10))
            ckpt.wait()
            fresh = nn.Embedding(10, 4, max_norm=0.5)
            holdfast.load(tmp_path, {"model": fresh}, step=step)
            assert torch.equal(fresh.weight, was)


def test_a_target_on_a_device_is_learned_from_two_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writes are not counted, and the device is not asked at the call; the tensors pass for its own."""
    monkeypatch.setattr(copy_timing, "COPIED_AT_CALL_BYTES", 0)
    for module in (copy_timing, snapshot):
        monkeypatch.setattr(module, "is_on_host", lambda t: False)
    original = snapshot.Copies.run

    def late(*args: Any) -> None:
        threading.Event().wait(0.05)
        original(*args)

    monkeypatch.setattr(snapshot.Copies, "run", late)
    loop, was = Loop(by_data, OPTIMIZERS["of the online network"]), {}
    with holdfast.Checkpointer(tmp_path, loop.state(), every=1, on_error="raise") as ckpt:
        for step in range(1, 6):
            loop.iterate()
            was[step] = loop.copies()
            ckpt.step(step)
            asides = {name for name, _ in ckpt._tiers.saver.aside}
            assert ("target.0.weight" in asides) == (step > 2)
            assert "online.0.weight" not in asides
    for step, copies in was.items():
        fresh = Loop(by_data, OPTIMIZERS["of the online network"])
        holdfast.load(tmp_path, {"online": fresh.online, "target": fresh.target}, step=step)
        assert all(map(torch.equal, fresh.copies(), copies)), step


def test_a_frozen_base_on_a_device_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two images that are alike; until then saves are held up."""
    monkeypatch.setattr(copy_timing, "COPIED_AT_CALL_BYTES", 0)
    for module in (copy_timing, snapshot):
        monkeypatch.setattr(module, "is_on_host", lambda t: False)
    run, held = Frozen(), []
    with holdfast.Checkpointer(tmp_path, run.state, on_error="raise") as ckpt:
        sort = ckpt._tiers.saver.copy_timing.sort
        monkeypatch.setattr(
            ckpt._tiers.saver.copy_timing, "sort", lambda live: held.append(sort(live)) or held[-1]
        )
        for step in range(1, 6):
            run.iterate()
            ckpt.save(step).wait(120)
            assert not ckpt._tiers.saver.aside
    assert held == [True, True, False, False, False]


def test_much_that_is_copied_at_each_call_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, with what it is."""
    monkeypatch.setattr(copy_timing, "COPIED_AT_CALL_BYTES", 0)
    monkeypatch.setattr(saver, "MUCH_BYTES", 1 << 10)
    loop = Loop(lerp, OPTIMIZERS["of the online network"])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with holdfast.Checkpointer(tmp_path, loop.state(), every=1) as ckpt:
            for step in range(1, 5):
                loop.iterate()
                ckpt.step(step)
    (only,) = [str(one.message) for one in told if "before its call returns" in str(one.message)]
    assert "target.0.weight" in only and only.endswith("[set-aside]")


class Batches:
    """An object with a tensor of another size at each save, which refuses to tell of it once."""

    def __init__(self) -> None:
        self.x = torch.zeros(40_000)
        self.refuses = False

    def state_dict(self) -> dict[str, Any]:
        if self.refuses:
            raise RuntimeError("not now")
        return {"x": self.x}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.x = saved["x"]


@pytest.mark.filterwarnings("ignore::holdfast.HoldfastWarning")
def test_memory_that_was_set_aside_for_a_failed_save_is_not_taken_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of copies holds for the very memory that it was made for."""
    run, batches = Frozen(), Batches()
    with holdfast.Checkpointer(tmp_path, {**run.state, "batches": batches}) as ckpt:

        def save(step: int, size: int) -> None:
            batches.x = torch.full((size,), float(step))
            ckpt.save(step).wait(120)

        save(1, 40_000)
        original = ckpt._tiers.saver.planner.agree

        def fails(*args: Any) -> Any:
            raise RuntimeError("a rank is gone")

        monkeypatch.setattr(ckpt._tiers.saver.planner, "agree", fails)
        with pytest.raises(RuntimeError, match="a rank is gone"):
            save(2, 30_000)
        monkeypatch.setattr(ckpt._tiers.saver.planner, "agree", original)
        save(3, 40_000)
    with holdfast.open(tmp_path, step=3) as saved:
        assert (saved.read("batches.x") == 3).all()


def test_what_an_optimizer_has_stepped_is_its_own_while_it_is_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A discriminator is frozen while the generator trains, and its step is saved amid that."""
    monkeypatch.setattr(copy_timing, "COPIED_AT_CALL_BYTES", 0)
    model = nn.Linear(WIDTH, WIDTH)
    optim = torch.optim.Adam(model.parameters())
    state = {"model": model, "optim": optim}
    with holdfast.Checkpointer(tmp_path, state, on_error="raise") as ckpt:
        for step in range(1, 5):
            model.requires_grad_(True)
            model(torch.ones(WIDTH)).sum().backward()
            optim.step()
            optim.zero_grad()
            model.requires_grad_(False)
            ckpt.save(step).wait(120)
            assert not {name for name, _ in ckpt._tiers.saver.aside if name.startswith("model")}


def test_an_average_on_a_device_that_is_set_aside_holds_up_no_more_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was learned from the first window, so no image of it is ever compared."""
    monkeypatch.setattr(copy_timing, "COPIED_AT_CALL_BYTES", 0)
    for module in (copy_timing, snapshot):
        monkeypatch.setattr(module, "is_on_host", lambda t: False)
    loop, held = Loop(lerp, OPTIMIZERS["of the online network"]), []
    with holdfast.Checkpointer(tmp_path, loop.state(), every=1, on_error="raise") as ckpt:
        sort = ckpt._tiers.saver.copy_timing.sort
        monkeypatch.setattr(
            ckpt._tiers.saver.copy_timing, "sort", lambda live: held.append(sort(live)) or held[-1]
        )
        for step in range(1, 6):
            loop.iterate()
            ckpt.step(step)
    assert held == [True, False, False, False, False]


def test_a_first_save_that_fails_is_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the loop writes after it is known all the same."""
    monkeypatch.setattr(copy_timing, "COPIED_AT_CALL_BYTES", 0)
    run = Frozen()
    with holdfast.Checkpointer(tmp_path, run.state) as ckpt:
        run.iterate()
        agree = ckpt._tiers.saver.planner.agree

        def fails(*args: Any) -> Any:
            raise RuntimeError("a rank is gone")

        monkeypatch.setattr(ckpt._tiers.saver.planner, "agree", fails)
        ckpt.save(1).add_done_callback(lambda save: None)
        monkeypatch.setattr(ckpt._tiers.saver.planner, "agree", agree)
        for step in (2, 3):
            with torch.no_grad():
                run.adapter.weight.mul_(2)
            run.iterate()
            was = run.adapter.weight.detach().clone()
            save = ckpt.save(step)
            with torch.no_grad():
                run.adapter.weight.mul_(2)
            save.wait(120)
            with holdfast.open(tmp_path, step=step) as saved:
                assert torch.equal(torch.from_numpy(saved.read("adapter.weight")), was)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ckpt.wait()
