"""What training depends on and no state_dict has: tensors and numbers in attributes, merges."""

from __future__ import annotations

import copy
import random
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.base.notices import Notices
from holdfast.errors import HoldfastError, UsageError
from holdfast.integrations.trl_parts import tell_of_generated
from holdfast.live.state.generators import generator_state, set_generator_state

from .test_stale_objects import backward, net, steps, told, update


def masters(optim: Any) -> list[torch.Tensor]:
    return [p.detach().double() for group in optim.param_groups for p in group["params"]]


SHAPES: dict[str, Any] = {
    "list": masters,
    "tuple": lambda o: tuple(masters(o)),
    "nested": lambda o: [[{"of": m}] for m in masters(o)],
    "by parameter": lambda o: dict(zip(o.param_groups[0]["params"], masters(o))),
    "flat": lambda o: torch.cat([m.flatten() for m in masters(o)]),
    "deque": lambda o: deque(masters(o), maxlen=9),
    "object": lambda o: SimpleNamespace(flat=torch.cat([m.flatten() for m in masters(o)])),
}


class WithMasters(torch.optim.SGD):
    def __init__(self, params: Any, kind: str) -> None:
        super().__init__(params, lr=0.1)
        self.masters = SHAPES[kind](self)


@pytest.mark.parametrize("kind", SHAPES)
def test_tensors_in_an_optimizers_attributes_are_refused(tmp_path: Path, kind: str) -> None:
    model = net()
    optim = WithMasters(model.parameters(), kind)
    for value in (optim, [optim]):
        with pytest.raises(HoldfastError, match=r"masters.* nothing saves|nothing saves .masters"):
            holdfast.save(tmp_path, {"model": model, "optim": value}, step=1)
    holdfast.ignore(optim, "masters")
    assert told(lambda: holdfast.save(tmp_path, {"model": model, "optim": optim}, step=1)) == []


def test_tensors_that_the_state_has_are_no_loss(tmp_path: Path) -> None:
    model = net()
    optim = WithMasters(model.parameters(), "list")
    state = {"model": model, "optim": optim, "masters": optim.masters}
    assert told(lambda: holdfast.save(tmp_path, state, step=1)) == []


def test_views_states_gradients_and_constants_are_no_loss(tmp_path: Path) -> None:
    model = net()
    optim: Any = torch.optim.AdamW(model.parameters())
    update(model, optim)
    backward(model)
    optim.params = [p for p in model.parameters()]
    optim.views = [p.detach().view(-1) for p in model.parameters()]
    optim.moments = [s["exp_avg"] for s in optim.state.values()]
    optim.gradients = {p: p.grad for p in model.parameters()}
    optim.levels = {"dynamic": torch.linspace(0, 1, 25)}
    optim.one = torch.ones(1)
    optim.masks = [torch.ones(p.shape, dtype=torch.int64) for p in model.parameters()]
    optim.masks[0].add_(1)
    optim.scale = torch.ones(()).mul_(2)
    optim.flat = [s["exp_avg"].view(-1)[:3] for s in optim.state.values()]
    holdfast.save(tmp_path, {"model": model, "optim": optim}, step=1)


def test_tensors_that_come_with_the_steps_are_told(tmp_path: Path) -> None:
    class Late(torch.optim.SGD):
        past: Any = None

        def step(self, closure: Any = None) -> Any:
            if self.past is None:
                self.past = torch.zeros(3)
            self.past = self.past * 0.9 + 1
            return super().step(closure)

    model = net()
    optim = Late(model.parameters(), lr=0.1)
    found = steps(tmp_path, {"model": model, "optim": optim}, lambda i: update(model, optim), 20)
    assert found == ["tensors-outside"]


class Around:
    """An optimizer of one's own around one of torch's."""

    def __init__(self, optim: Any) -> None:
        self.optim, self.param_groups = optim, optim.param_groups
        self.step, self.zero_grad = optim.step, optim.zero_grad

    def state_dict(self) -> Any:
        return self.optim.state_dict()

    def load_state_dict(self, saved: Any) -> None:
        self.optim.load_state_dict(saved)


def test_copies_in_other_objects_are_told(tmp_path: Path) -> None:
    class Average(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.decay = nn.Parameter(torch.ones(1), requires_grad=False)
            self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    model = net()
    state = {"model": model, "average": Average(model)}
    assert told(lambda: holdfast.save(tmp_path / "a", state, step=1)) == ["tensors-outside"]
    around: Any = Around(torch.optim.SGD(model.parameters(), lr=0.1))
    around.masters = [masters(around.optim)]
    state = {"model": model, "optim": around}
    assert told(lambda: holdfast.save(tmp_path / "b", state, step=1)) == ["tensors-outside"]


# -- numbers ----------------------------------------------------------------------------------------


class Average(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)
        self.updates, self.decay, self.last_loss = 0, 0.9, 1.0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        self.last_loss /= 2
        for mine, other in zip(self.module.parameters(), model.parameters()):
            mine.lerp_(other, 0.1)


def averaged(root: Path, **more: Any) -> tuple[Any, Average]:
    model = net()
    optim, average = torch.optim.AdamW(model.parameters()), Average(model)
    state = {"model": model, "optim": optim, "average": average, **more}

    def once(i: int) -> None:
        update(model, optim)
        average.update(model)
        for progress in more.values():
            progress |= dict.fromkeys(progress, i)

    return steps(root, state, once), average


def test_a_counter_of_a_module_is_told(tmp_path: Path) -> None:
    found, _ = averaged(tmp_path / "a", progress={"step": 0})
    assert found == ["numbers-outside"]
    found, _ = averaged(tmp_path / "b", progress={"updates": 0})
    assert found == []  # the script has it in the state


def test_a_counter_is_told_at_the_only_save(tmp_path: Path) -> None:
    model = net()
    optim, average = torch.optim.AdamW(model.parameters()), Average(model)
    state = {"model": model, "optim": optim, "average": average}

    def run() -> None:
        with holdfast.Checkpointer(tmp_path, state) as ckpt:
            for _ in range(10):
                update(model, optim)
                average.update(model)
            ckpt.save(10)

    with pytest.warns(holdfast.HoldfastWarning, match=r"average\.updates changes while"):
        run()


def test_a_counter_of_an_object_is_told_if_its_state_lacks_it(tmp_path: Path) -> None:
    class Schedule:
        def __init__(self, *names: str) -> None:
            self.rate, self.calls, self.names = 1.0, 0, names

        def step(self) -> None:
            self.rate, self.calls = self.rate * 0.9, self.calls + 1

        def state_dict(self) -> Any:
            return {f"my_{name}": getattr(self, name) for name in self.names}

        def load_state_dict(self, saved: Any) -> None:
            for name in self.names:
                setattr(self, name, saved[f"my_{name}"])

    model = net()
    optim = torch.optim.AdamW(model.parameters())
    for names, expected in ((("rate",), ["numbers-outside"]), (("rate", "calls"), [])):
        mine = Schedule(*names)

        def once(i: int, mine: Any = mine) -> None:
            update(model, optim)
            mine.step()

        state = {"model": model, "optim": optim, "mine": mine}
        assert steps(tmp_path / str(len(names)), state, once) == expected


class Noisy(nn.Module):
    """A module with a generator of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.one, self._draws = nn.Linear(2, 2), GENERATORS[kind]()

    def draw(self, step: int) -> None:
        self.one(torch.ones(2)).sum().backward()
        one = self._draws
        torch.rand(2, generator=one) if isinstance(one, torch.Generator) else one.random()


GENERATORS: dict[str, Any] = {
    "torch": lambda: torch.Generator().manual_seed(1),
    "numpy": lambda: np.random.default_rng(1),
    "numpy of old": lambda: np.random.RandomState(1),
    "python": lambda: random.Random(1),
}


class OfGenerator:
    """An object of the state that saves another one's generator."""

    def __init__(self, of: Noisy) -> None:
        self.of = of

    def state_dict(self) -> Any:
        return {"rng": generator_state(self.of._draws)}

    def load_state_dict(self, saved: Any) -> None:
        set_generator_state(self.of._draws, saved["rng"])


def drawn(root: Path, model: Noisy, draw: Any = None, **more: Any) -> list[str]:
    optim = torch.optim.SGD(model.parameters(), 0.1)

    def once(i: int) -> None:
        (draw or model.draw)(i)
        optim.step()
        optim.zero_grad()

    return steps(root, {"model": model, "optim": optim, **more}, once)


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_of_a_module_is_told_unless_something_saves_it(
    kind: str, tmp_path: Path
) -> None:
    assert drawn(tmp_path / "a", Noisy(kind)) == ["generators-outside"]
    model = Noisy(kind)
    assert drawn(tmp_path / "b", model, rngs=OfGenerator(model)) == []


def test_a_generator_that_rests_or_is_seeded_anew_is_told_nothing(tmp_path: Path) -> None:
    model = Noisy("torch")

    def seeded(step: int) -> None:
        model._draws.manual_seed(step)
        model.draw(step)

    def made(step: int) -> None:
        again._draws = np.random.default_rng(step)
        again.draw(step)

    again, default = Noisy("numpy"), Noisy("torch")
    default._draws = torch.default_generator
    assert drawn(tmp_path / "a", model, seeded) == drawn(tmp_path / "b", again, made) == []
    assert drawn(tmp_path / "c", default) == []  # which every step has


def test_what_is_computed_from_the_step_is_told_nothing(tmp_path: Path) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.tau, self.left = net(), 1.0, 100

        def forward(self, x: Any) -> Any:
            return self.inner(x) / self.tau

    model = Layer()
    optim = torch.optim.AdamW(model.parameters())

    def once(i: int) -> None:
        model.tau, model.left = max(0.5, 1 - 0.01 * i), 100 - i
        update(model, optim)

    assert steps(tmp_path, {"model": model, "optim": optim}, once, until=20) == []


def test_a_state_is_asked_for_once_beside_the_saves(tmp_path: Path) -> None:
    class Buffer:
        def __init__(self) -> None:
            self.place = self.total = self.size = self.asked = 0

        def state_dict(self) -> Any:
            self.asked += 1
            return {"place": self.place, "total": self.total, "size": self.size}

        def load_state_dict(self, saved: Any) -> None:
            vars(self).update(saved)

    model, buffer = net(), Buffer()
    optim = torch.optim.AdamW(model.parameters())
    asked = []

    def once(i: int) -> None:
        update(model, optim)
        buffer.place, buffer.size, buffer.total = i, i, i
        asked.append(buffer.asked)

    state = {"model": model, "optim": optim, "buffer": buffer}
    steps(tmp_path, state, once, until=31)
    assert asked[30] - asked[5] <= 5 + 1  # five saves, and one look at most
    assert asked[5] - asked[1] <= 2 + 1


def test_sizes_and_extra_states_are_told_nothing(tmp_path: Path) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.length, self.calls = net(), 0, 0

        def forward(self, x: Any) -> Any:
            self.length, self.calls = random.randint(1, 9), self.calls + 1
            return self.inner(x)

        def get_extra_state(self) -> Any:
            return {"calls": self.calls}

        def set_extra_state(self, saved: Any) -> None:
            self.calls = saved["calls"]

    model = nn.Sequential(Layer())
    optim = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optim": optim}
    assert steps(tmp_path, state, lambda i: update(model, optim), until=20) == []


# -- groups and adapters ------------------------------------------------------------------------------


def test_groups_that_a_restore_cuts_off_are_told(tmp_path: Path) -> None:
    for expected in ([], ["dead-groups"]):
        model = net()
        optim = Around(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        state = {"model": model, "optim": optim}
        assert steps(tmp_path, state, lambda i, m=model, o=optim: update(m, o), 5) == expected


def test_merged_adapters_are_told(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(net(), peft.LoraConfig(target_modules=["0"], r=2))
    optim = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def once(i: int) -> None:
        if i > 7:
            model.unmerge_adapter()
        update(model, optim)
        model.merge_adapter()
        if i < 7:
            model.unmerge_adapter()

    state = {"model": model, "optim": optim}
    assert steps(tmp_path / "a", state, once, until=6, every=3) == []
    assert steps(tmp_path / "b", state, once, until=9, every=3) == ["merged-adapters"]
    match = r"model\.base_model\.model\.0.*: the adapter is merged"
    with pytest.warns(holdfast.HoldfastWarning, match=match):
        holdfast.save(tmp_path / "c", {"model": model}, step=1)


def test_batches_that_were_generated_are_told() -> None:
    notices = Notices("warn")
    args = SimpleNamespace(steps_per_generation=4, gradient_accumulation_steps=1)
    trainer = SimpleNamespace(args=args, num_iterations=2, _buffered_inputs=[1], _step=16)
    tell_of_generated(trainer, 16, notices.once)
    assert notices.texts == []
    trainer._step = 18
    tell_of_generated(trainer, 18, notices.once)
    tell_of_generated(trainer, 18, notices.once)
    assert len(notices.texts) == 1 and "be a multiple of 8 [generation-buffer]" in notices.texts[0]


def test_the_error_names_a_way_out(tmp_path: Path) -> None:
    model = net()
    optim = WithMasters(model.parameters(), "list")
    with pytest.raises(UsageError, match=r"holdfast\.ignore\(optim, 'masters'\)") as error:
        holdfast.save(tmp_path, {"model": model, "optim": optim}, step=1)
    assert "masters[0] and 3 more" in str(error.value)
