"""Steps of optimizers in blocks: equal bit for bit to the optimizer's own, or not made."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import lr_scheduler

from holdfast.live.state.blockwise import Blockwise, changes_nothing

BLOCK = 1 << 10
SHAPES = ((50, 37), (3,), (), (2048,), (7, 5), (256,), (257,))

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {}),
    "adamw-maximize": (torch.optim.AdamW, {"maximize": True}),
    "adamw-tensor-lr": (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
    "adamw-small-betas": (torch.optim.AdamW, {"betas": (0.3, 0.4)}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "rprop": (torch.optim.Rprop, {}),
}


class Run:
    """Two runs of these are equal, but for who makes the steps."""

    def __init__(
        self, name: str = "adamw", dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        kind, given = KINDS[name]
        self.random = torch.Generator().manual_seed(5)
        self.params = [nn.Parameter(self.draw(shape, dtype)) for shape in SHAPES]
        groups = [{"params": self.params[:4]}, {"params": self.params[4:], "lr": 0.05}]
        self.optim = kind(groups, **given, **options)

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).to(dtype)

    def gradients(self, leave_out: int | None = None) -> None:
        for number, p in enumerate(self.params):
            drawn = self.draw(tuple(p.shape), p.dtype)
            p.grad = None if number == leave_out else drawn

    def everything(self) -> dict[str, torch.Tensor]:
        found = {str(n): p.detach().clone() for n, p in enumerate(self.params)}
        for number, p in enumerate(self.params):
            found |= {f"{number}.{k}": v.clone() for k, v in self.optim.state[p].items()}
        return found


def check_equal(a: Run, b: Run) -> None:
    mine, others = a.everything(), b.everything()
    assert mine.keys() == others.keys()
    assert [k for k in mine if not torch.equal(mine[k], others[k])] == []


@pytest.mark.parametrize("foreach", [None, True], ids=["loop", "foreach"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_equal_to_the_optimizer(name: str, dtype: torch.dtype, foreach: bool | None) -> None:
    if foreach and "tensor" in name:
        pytest.skip("torch does not serve it")
    plain, blocks = Run(name, dtype, foreach=foreach), Run(name, dtype, foreach=foreach)
    blockwise = Blockwise(blocks.optim, BLOCK)
    made = []
    for number in range(6):
        for one in (plain, blocks):
            one.gradients(leave_out=number % 4 if number > 2 else None)
            for group in one.optim.param_groups:
                group["lr"] = group["lr"] * 0.9
        plain.optim.step()
        made.append(blockwise.is_possible())
        (blockwise if made[-1] else blocks.optim).step()
        check_equal(plain, blocks)
    has_states = name == "adagrad"  # others make them at the first step
    assert made == [has_states] + [True] * 5


def test_as_large_as_they_are() -> None:
    """With blocks as they are outside of tests."""
    runs = []
    for in_blocks in (False, True):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(700, 601))
        optim = torch.optim.AdamW([p])
        for number in range(4):
            p.grad = torch.randn_like(p)
            blockwise = Blockwise(optim)
            assert blockwise.is_possible() == (number > 0)
            (blockwise if in_blocks and number else optim).step()
        runs.append([p.detach(), *optim.state[p].values()])
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_under_a_scheduler() -> None:
    plain, blocks = Run(), Run()
    for one in (plain, blocks):
        scheduler = lr_scheduler.ExponentialLR(one.optim, 0.9)
        one.gradients()
        one.optim.step()
        scheduler.step()
        one.gradients()
    plain.optim.step()
    assert Blockwise(blocks.optim, BLOCK).is_possible()
    Blockwise(blocks.optim, BLOCK).step()
    check_equal(plain, blocks)


def _before_the_scheduler(run: Run) -> None:
    step = run.optim.step

    def patched(self: Any) -> None:
        for p in run.params:
            p.grad = None
        step()

    run.optim.step = types.MethodType(patched, run.optim)
    lr_scheduler.ExponentialLR(run.optim, 0.9)


def _after_the_scheduler(run: Run) -> None:
    lr_scheduler.ExponentialLR(run.optim, 0.9)
    run.optim.step = functools.wraps(run.optim.step)(lambda: None)


def _marked(run: Run) -> None:
    run.optim.step = functools.partial(run.optim.step)
    run.optim.step._wrapped_by_lr_sched = True


@pytest.mark.parametrize("patch", [_before_the_scheduler, _after_the_scheduler, _marked])
def test_what_others_put_in_the_place_of_step_is_called(patch: Any) -> None:
    run = Run()
    run.gradients()
    run.optim.step()
    run.gradients()
    assert Blockwise(run.optim, BLOCK).is_possible()
    patch(run)
    assert not Blockwise(run.optim, BLOCK).is_possible()


def test_a_class_whose_step_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.gradients()
    run.optim.step()
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", functools.wraps(step)(lambda *_: None))
    assert not Blockwise(run.optim, BLOCK).is_possible()


def _other_step(run: Run) -> None:
    run.optim.step = lambda: None


def _transposed_parameter(run: Run) -> None:
    p = run.params[0]
    p.data = p.data.t().contiguous().t()


def _transposed_gradient(run: Run) -> None:
    grad = run.params[0].grad
    assert grad is not None
    run.params[0].grad = grad.t().contiguous().t()


def _state_of_another_shape(run: Run) -> None:
    run.optim.state[run.params[3]]["exp_avg"] = torch.zeros(1)


def _number(run: Run) -> None:
    run.optim.state[run.params[3]]["step"] = 3


def _no_state(run: Run) -> None:
    del run.optim.state[run.params[3]]


def _sparse(run: Run) -> None:
    p = run.params[0]
    p.grad = torch.zeros(p.shape).to_sparse()


def _tied(run: Run) -> None:
    """Two parameters on one memory: their operations are interleaved under `foreach`."""
    run.params[5].data = run.params[3].data[:256]


def _one_step_for_two(run: Run) -> None:
    states = run.optim.state
    states[run.params[0]]["step"] = states[run.params[3]]["step"]


def _nothing_large(run: Run) -> None:
    for p in run.params:
        if p.numel() * 4 > BLOCK:
            p.grad = None


@pytest.mark.parametrize(
    "change",
    [
        _other_step,
        _transposed_parameter,
        _transposed_gradient,
        _state_of_another_shape,
        _number,
        _no_state,
        _sparse,
        _tied,
        _one_step_for_two,
        _nothing_large,
    ],
)
def test_what_cannot_be_cut_is_left_to_the_optimizer(change: Any) -> None:
    run = Run()
    run.gradients()
    run.optim.step()
    run.gradients()
    assert Blockwise(run.optim, BLOCK).is_possible()
    change(run)
    assert not Blockwise(run.optim, BLOCK).is_possible()


def test_what_else_a_group_has_does_not_matter() -> None:
    run = Run()
    run.optim.param_groups[0] |= {"their": torch.zeros(3), "own": object()}
    run.gradients()
    run.optim.step()
    run.gradients()
    assert Blockwise(run.optim, BLOCK).is_possible()


@pytest.mark.parametrize("kind", [torch.optim.RAdam, torch.optim.ASGD])
def test_optimizers_that_change_their_ways_are_left_to_themselves(kind: Any) -> None:
    p = nn.Parameter(torch.randn(4096))
    optim = kind([p])
    p.grad = torch.randn(4096)
    optim.step()
    assert not Blockwise(optim, BLOCK).is_possible()


@pytest.mark.parametrize("options", [{"fused": True}, {"differentiable": True}])
def test_other_ways_through_an_optimizer_are_left_to_it(options: dict[str, Any]) -> None:
    run = Run(**options)
    for p in run.params:
        p.grad = torch.ones_like(p)
        run.optim.state[p] = {n: torch.zeros_like(p) for n in ("exp_avg", "exp_avg_sq")}
        run.optim.state[p]["step"] = torch.zeros(())
    assert not Blockwise(run.optim, BLOCK).is_possible()


def test_bfloat16_is_left_to_the_optimizer() -> None:
    """Its kernels round the last elements of a tensor in another way."""
    run = Run(dtype=torch.bfloat16)
    run.gradients()
    run.optim.step()
    assert not Blockwise(run.optim, BLOCK).is_possible()


class Uneven(torch.optim.SGD):
    """As kernels may be: elements that do not fill a vector of eight are treated in another way."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                end = p.numel() // 8 * 8
                p.grad[end:] *= 1 + 1e-6
        super().step(closure)


def test_what_cuts_change_is_found() -> None:
    options = {"lr": 0.1, "momentum": 0.9}
    for kind, is_exact in ((torch.optim.SGD, True), (Uneven, False)):
        p = nn.Parameter(torch.zeros(3))
        optim = kind([p], **options)
        optim.state[p]["momentum_buffer"] = torch.zeros(3)
        before = copy.deepcopy(optim.state_dict())
        assert changes_nothing(optim, optim.param_groups[0], p) == is_exact
        assert str(optim.state_dict()) == str(before) and not p.any()


def test_optimizers_of_others_are_left_to_themselves() -> None:
    p = nn.Parameter(torch.randn(4096))
    optim = Uneven([p], lr=0.1, momentum=0.9)
    p.grad = torch.randn(4096)
    optim.step()
    assert not Blockwise(optim, BLOCK).is_possible()


def test_sharded_parameters(mesh: Any) -> None:
    drawn = [torch.randn(64, 33) for _ in range(5)]
    plain = nn.Parameter(drawn[0].clone())
    sharded = nn.Parameter(DTensor.from_local(drawn[0].clone(), mesh, [Shard(0)]))
    optims = [torch.optim.AdamW([p]) for p in (plain, sharded)]
    for number, grad in enumerate(drawn[1:]):
        plain.grad = grad.clone()
        sharded.grad = DTensor.from_local(grad.clone(), mesh, [Shard(0)])
        optims[0].step()
        blockwise = Blockwise(optims[1], BLOCK)
        assert blockwise.is_possible() == (number > 0)
        (blockwise if number else optims[1]).step()
    assert torch.equal(plain, sharded.to_local())
    for name, value in optims[0].state[plain].items():
        found = optims[1].state[sharded][name]
        assert torch.equal(value, found.to_local() if isinstance(found, DTensor) else found)
