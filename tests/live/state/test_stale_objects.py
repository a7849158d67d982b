"""What trains is what is saved: another optimizer, parts that were replaced, a state that never changes."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast

Told = list[str]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def backward(model: nn.Module, scale: float = 1.0) -> None:
    (model(torch.ones(2, 4)).square().sum() * scale).backward()


def update(model: nn.Module, optim: Any) -> None:
    backward(model)
    optim.step()
    optim.zero_grad()


def told(run: Callable[[], None]) -> Told:
    """The names of the notices that a run gives."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    texts = [str(w.message) for w in found if isinstance(w.message, holdfast.HoldfastWarning)]
    return [text.rpartition("[")[2].rstrip("]") for text in texts]


def steps(
    root: Path, state: dict[str, Any], once: Callable[[int], None], until: int = 10, **options: Any
) -> Told:
    """The notices of a loop that calls `once` and then `step`."""

    def run() -> None:
        with holdfast.Checkpointer(root, state, **{"every": 5, **options}) as ckpt:
            first = int(ckpt.restore()) + 1
            for i in range(first, first + until):
                once(i)
                ckpt.step(i)

    return told(run)


# -- another optimizer ------------------------------------------------------------------------------


def test_an_optimizer_made_anew_is_told_within_ten_steps(tmp_path: Path) -> None:
    model = net()
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
    other = torch.optim.AdamW(model.parameters())
    assert steps(tmp_path / "a", state, lambda i: update(model, other)) == ["never-steps"]
    sched = torch.optim.lr_scheduler.StepLR(other, 3)
    state = {"model": model, "optim": state["optim"], "sched": sched}
    assert steps(tmp_path / "b", state, lambda i: update(model, other)) == ["never-steps"]


class Listing(nn.Module):
    """As Megatron's DDP, which keeps the memory of its gradients in a list of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.buffers = []  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_a_module_with_a_list_in_the_place_of_buffers(tmp_path: Path) -> None:
    model = Listing()
    optim = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optim": optim}
    assert steps(tmp_path, state, lambda _: update(model, optim), every=2) == []
    assert holdfast.steps(tmp_path)[-1] == 10


def test_the_text_says_since_when_and_who(tmp_path: Path) -> None:
    model = net()
    optim = torch.optim.AdamW(model.parameters())
    with holdfast.Checkpointer(tmp_path, {"model": model, "optim": optim}, every=5) as ckpt:
        for i in range(1, 6):
            update(model, optim)
            ckpt.step(i)
    model = net()
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
    match = "optim has not stepped since step 5; another SGD steps parameters of model"

    def run() -> None:
        with holdfast.Checkpointer(tmp_path, state, every=5) as ckpt:
            assert ckpt.restore() == 5
            optim = torch.optim.SGD(model.parameters(), 0.1)
            for i in range(6, 10):
                update(model, optim)
                ckpt.step(i)

    with pytest.warns(holdfast.HoldfastWarning, match=match):
        run()


@pytest.mark.parametrize("at", [4, 23])
def test_an_optimizer_is_replaced_in_the_midst(tmp_path: Path, at: int) -> None:
    model = net()
    first, other = (torch.optim.AdamW(model.parameters()) for _ in range(2))

    def once(i: int) -> None:
        update(model, first if i < at else other)

    assert "never-steps" in steps(tmp_path, {"model": model, "optim": first}, once, until=40)


def test_a_script_that_saves_once_is_told_too(tmp_path: Path) -> None:
    model = net()
    optim, other = (torch.optim.AdamW(model.parameters()) for _ in range(2))

    def run() -> None:
        with holdfast.Checkpointer(tmp_path, {"model": model, "optim": optim}) as ckpt:
            for _ in range(10):
                update(model, other)
            ckpt.save(10)

    assert told(run) == ["never-steps"]


def test_a_second_optimizer_that_was_forgotten_is_told(tmp_path: Path) -> None:
    a, b = net(), net()
    mine, forgotten = torch.optim.AdamW(a.parameters()), torch.optim.AdamW(b.parameters())

    def once(i: int) -> None:
        update(a, mine)
        update(b, forgotten)

    assert steps(tmp_path, {"a": a, "b": b, "optim": mine}, once) == ["another-optimizer"]


# -- parts that were replaced -------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 17])
@pytest.mark.parametrize("width", [4, 2])
def test_a_head_that_was_replaced_is_told(tmp_path: Path, at: int, width: int) -> None:
    model = net()
    optim = torch.optim.AdamW(model.parameters())

    def once(i: int) -> None:
        if i == max(at, 1):
            model[2] = nn.Linear(8, width)
        update(model, optim)

    if not at:
        model[2] = nn.Linear(8, width)
    until = 40 if at else 10
    assert steps(tmp_path, {"model": model, "optim": optim}, once, until) == ["parts-replaced"]


# -- nothing changes ----------------------------------------------------------------------------------


def test_a_model_that_was_copied_is_told(tmp_path: Path) -> None:
    model, progress = net(), {"step": 0}
    average = torch.optim.swa_utils.AveragedModel(model)
    optim = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optim": optim, "progress": progress, "average": average}
    trained = copy.deepcopy(model)
    other = torch.optim.AdamW(trained.parameters())

    def once(i: int) -> None:
        update(trained, other)
        average.update_parameters(trained)
        progress["step"] = i

    assert steps(tmp_path, state, once) == ["never-changes"]


# -- gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
def test_a_save_amid_accumulation_is_told(tmp_path: Path, scaled: bool, to_none: bool) -> None:
    model = net()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optim": optim}
    scaler = torch.amp.GradScaler("cpu")
    state |= {"scaler": scaler} if scaled else {}

    def once(i: int) -> None:
        backward(model)
        if i % 4 == 0:
            optim.step()
            optim.zero_grad(set_to_none=to_none)

    assert steps(tmp_path / "amid", state, once, until=8, every=6) == ["gradients"]
    optim.zero_grad()
    assert steps(tmp_path / "whole", state, once, until=12, every=4) == []


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_that_are_clipped_and_used_are_told(tmp_path: Path, scaled: bool) -> None:
    model = net()
    optim = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)

    def once(i: int) -> None:
        scaler.scale(model(torch.ones(2, 4)).square().sum()).backward()
        if i % 3 == 0:
            scaler.unscale_(optim)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()

    state = {"model": model, "optim": optim, "scaler": scaler}
    assert steps(tmp_path, state, once, until=9, every=8) == ["gradients"]


@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("kind", ["skipped", "evaluated"])
def test_gradients_that_are_cleared_are_told_nothing(
    tmp_path: Path, kind: str, to_none: bool
) -> None:
    model = net()
    optim = torch.optim.AdamW(model.parameters())

    def once(i: int) -> None:
        optim.zero_grad(set_to_none=to_none)
        backward(model)
        if kind == "evaluated":
            optim.step()
            backward(model)  # as for examples against the model
        elif i % 5:
            optim.step()

    assert steps(tmp_path, {"model": model, "optim": optim}, once, until=21) == []


def test_a_step_of_another_optimizer_uses_no_gradients(tmp_path: Path) -> None:
    a, b = net(), net()
    of_a, of_b = torch.optim.AdamW(a.parameters()), torch.optim.AdamW(b.parameters())

    def once(i: int) -> None:
        of_a.zero_grad()
        backward(a)
        if i % 5:
            of_a.step()
        if i % 5 == 1:
            update(b, of_b)

    def late(i: int) -> None:
        if i % 5 == 1:
            update(b, of_b)
        once(i)

    state = {"a": a, "b": b, "of_a": of_a, "of_b": of_b}
    assert steps(tmp_path, state, late, until=21) == []


def test_gradients_of_before_the_checkpointer_are_told_nothing(tmp_path: Path) -> None:
    model = net()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    optim.step()

    def run() -> None:
        with holdfast.Checkpointer(tmp_path, {"model": model, "optim": optim}) as ckpt:
            ckpt.save(1)

    assert told(run) == []


# -- honest trainings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("clears", ["at the start", "at the end", "by zeros"])
def test_a_plain_loop_is_told_nothing(tmp_path: Path, clears: str) -> None:
    model = net()
    optim = torch.optim.AdamW(model.parameters(), lr=0.0)

    def once(i: int) -> None:
        if clears == "at the start":
            optim.zero_grad()
        backward(model)
        optim.step()
        if clears != "at the start":
            optim.zero_grad(set_to_none=clears == "at the end")

    assert steps(tmp_path, {"model": model, "optim": optim}, once, until=25) == []


def test_optimizers_that_alternate_or_wait_are_told_nothing(tmp_path: Path) -> None:
    g, d = net(), net()
    of_g, of_d = torch.optim.Adam(g.parameters()), torch.optim.Adam(d.parameters())

    def once(i: int) -> None:
        of_d.zero_grad()
        d(g(torch.ones(2, 4)).detach()).sum().backward()
        of_d.step()
        if i > 12 and i % 7 == 0:
            of_g.zero_grad()
            d(g(torch.ones(2, 4))).sum().backward()  # leaves gradients in d
            of_g.step()

    assert steps(tmp_path, {"g": g, "d": d, "of_g": of_g, "of_d": of_d}, once, until=35) == []


def test_frozen_and_unused_parts_are_told_nothing(tmp_path: Path) -> None:
    for freezes in (True, False):
        model = net()
        model[0].requires_grad_(not freezes)
        optim = torch.optim.AdamW(model[2].parameters())
        state = {"model": model, "optim": optim}
        root = tmp_path / str(freezes)
        assert steps(root, state, lambda i, m=model, o=optim: update(m, o), until=20) == []


def test_masters_in_the_optimizer_are_told_nothing(tmp_path: Path) -> None:
    model = net().bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optim = torch.optim.SGD(masters, lr=0.1)

    def once(i: int) -> None:
        model(torch.ones(2, 4).bfloat16()).float().square().sum().backward()
        for p, master in zip(model.parameters(), masters):
            master.grad, p.grad = p.grad.float(), None
        optim.step()
        optim.zero_grad()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters):
                p.copy_(master)

    assert steps(tmp_path, {"model": model, "optim": optim}, once, until=20) == []


def test_collecting_data_is_told_nothing(tmp_path: Path) -> None:
    model, progress = net(), {"seen": 0}
    optim = torch.optim.AdamW(model.parameters())

    def once(i: int) -> None:
        progress["seen"] = i * 512 + random.randint(1, 9)
        if i > 20:
            update(model, optim)

    state = {"model": model, "optim": optim, "progress": progress}
    assert steps(tmp_path, state, once, until=25) == []


@pytest.mark.parametrize("kind", ["accumulates", "draws by its own"])
def test_a_state_that_rests_is_told_nothing(tmp_path: Path, kind: str) -> None:
    model, draws = net(), np.random.default_rng(0)
    optim = torch.optim.AdamW(model.parameters())

    def once(i: int) -> None:
        if kind == "accumulates":
            backward(model, 1 / 16)
        draws.standard_normal(8)
        if i % 16 == 0:
            optim.step()
            optim.zero_grad()

    assert steps(tmp_path, {"model": model, "optim": optim}, once, until=33, every=16) == []


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("every", [1, 5])
def test_optimizers_for_one_task_each_are_told_nothing(
    tmp_path: Path, kind: Any, every: int
) -> None:
    model = net()
    optim = torch.optim.AdamW(model.parameters())
    inner: Any = None

    def once(i: int) -> None:
        nonlocal inner
        old = [p.detach().clone() for p in model.parameters()]
        inner = kind(model.parameters(), lr=0.01)
        for _ in range(5):
            update(model, inner)
        with torch.no_grad():
            for p, before in zip(model.parameters(), old):
                p.grad = before - p
                p.copy_(before)
        optim.step()
        optim.zero_grad()

    state = {"model": model, "optim": optim}
    assert steps(tmp_path, state, once, until=20, every=every) == []


def test_a_scaler_that_skips_and_a_closure_are_told_nothing(tmp_path: Path) -> None:
    model = net()
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")

    def once(i: int) -> None:
        optim.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).sum() * (float("inf") if i % 5 == 0 else 1)).backward()
        scaler.step(optim)
        scaler.update()

    state = {"model": model, "optim": optim, "scaler": scaler}
    assert steps(tmp_path / "scaler", state, once, until=20) == []
    second = torch.optim.LBFGS(model.parameters(), lr=0.01)

    def closure() -> Any:
        second.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    state = {"model": model, "optim": second}
    assert steps(tmp_path / "closure", state, lambda i: second.step(closure), until=12) == []


def test_what_an_object_has_is_in_the_state(tmp_path: Path) -> None:
    class App:
        def __init__(self, optim: Any) -> None:
            self.optim = optim

        def state_dict(self) -> Any:
            return self.optim.state_dict()

        def load_state_dict(self, saved: Any) -> None:
            self.optim.load_state_dict(saved)

    a, b = net(), net()
    of_a, of_b = torch.optim.AdamW(a.parameters()), torch.optim.SGD(b.parameters(), lr=0.1)

    def once(i: int) -> None:
        update(a, of_a)
        update(b, of_b)

    assert steps(tmp_path, {"a": a, "app": App(of_a), "b": b, "of_b": of_b}, once, until=12) == []


def test_a_compiled_step_is_compiled_once(tmp_path: Path) -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model, counter = net(), CompileCounter()
    optim = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    step = torch.compile(optim.step, backend=counter)

    def once(i: int) -> None:
        optim.zero_grad()
        backward(model)
        step()

    assert steps(tmp_path, {"model": model, "optim": optim}, once, until=12) == []
    assert counter.frame_count == 1


def test_a_functional_loop_whose_state_rests_is_told(tmp_path: Path) -> None:
    """What trains are tensors that the loop makes anew; one that hands them over is told nothing."""
    model = net()
    params = {n: p.detach().clone() for n, p in model.named_parameters()}

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, params, (torch.ones(2, 4),)).square().mean()

    def once(i: int) -> None:
        grads = torch.func.grad(loss)(params)
        params.update({n: p - 0.1 * grads[n] for n, p in params.items()})

    rests = {"model": model, "log": [], "total": torch.zeros(2)}
    assert steps(tmp_path / "rests", rests, once) == ["never-changes"]
    assert steps(tmp_path / "follows", {"model": model, "params": params}, once) == []


def test_many_batches_before_the_first_step_are_no_state_that_rests(tmp_path: Path) -> None:
    model = net()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for state in ({"model": model, "optim": optim}, {"model": model}):
        assert steps(tmp_path / str(len(state)), state, lambda i: backward(model), until=12) == []


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients(tmp_path: Path, kind: Any) -> None:
    """They lie in no one memory; those that are accumulated at a save are told like others."""
    model = nn.Embedding(10, 3, sparse=True)
    optim = kind(model.parameters(), lr=0.1)
    every = {"at": 1}

    def once(i: int) -> None:
        model(torch.tensor([i % 10, 1])).square().sum().backward()
        if i % every["at"] == 0:
            optim.step()
            optim.zero_grad()

    state = {"model": model, "optim": optim}
    assert steps(tmp_path / "each", state, once, every=1) == []
    every["at"] = 4
    assert steps(tmp_path / "amid", state, once, until=8, every=6) == ["gradients"]
