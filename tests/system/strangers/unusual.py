"""More strangers: modules, optimizers, schedules and values of the state that are built in unusual ways.

They are added to `SUBJECTS`; what is tried, and what the page shows, is imported from here.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import lr_scheduler as lrs
from torch.optim import swa_utils

from system.strangers.subjects import (
    SUBJECTS,
    mlp,
    scheduled,
    subject,
    tensor,
    trained,
    with_adamw,
    with_optimizer,
)
from system.strangers.trial import Subject

__all__ = ["SUBJECTS"]

# --- torch: modules


class _Plus(nn.Module):
    def __init__(self, other: nn.Parameter) -> None:
        super().__init__()
        self.other = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.other


def _sharing_a_parametrization() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    parametrize.register_parametrization(model[0], "weight", _Plus(model[2].weight))
    return model


def _tied_inside_weight_norm() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    first, last = (parametrizations.weight_norm(model[i]) for i in (0, 2))
    last.parametrizations.weight.original1 = first.parametrizations.weight.original1
    return model


class _Lists(nn.Module):
    """Lists and dicts of parameters, inside each other, under odd names."""

    def __init__(self) -> None:
        super().__init__()
        self.some = nn.ParameterList([torch.randn(8, 8), torch.randn(8)])
        self.named = nn.ParameterDict({"x y": torch.randn(8), "$t/é": torch.randn(8)})
        inner = nn.ModuleList([nn.ParameterList([torch.randn(3)]), nn.ParameterDict()])
        self.nested = nn.ModuleDict({"l": inner})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here = (x @ self.some[0] + self.some[1]) * self.named["x y"] + self.named["$t/é"]
        return here + self.nested["l"][0][0].sum()


class _Odd(nn.Module):
    """Parameters without dims, elements or gradients, and buffers of many dtypes that a step replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.whole = nn.Parameter(torch.randint(0, 9, (3,)), requires_grad=False)
        self.register_buffer("flags", torch.rand(4) > 0.5)
        self.register_buffer("phases", torch.randn(3, dtype=torch.complex128))
        self.register_buffer("nan", torch.tensor(float("nan")))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("strided", torch.randn(8, 8)[::2, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.phases *= 1j
        self.flags = ~self.flags
        self.strided += 1
        added = self.phases.real.sum().float() + self.strided.sum() + self.count + self.flags
        return self.layer(x) * self.scale + self.empty.sum() + added


class _MadeByForward(nn.Module):
    """A buffer that is None until the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.layer(x)
        now = made.detach().mean(0)
        self.mean = now if self.mean is None else self.mean * 0.9 + now * 0.1
        return made - self.mean


class _SameMemory(nn.Module):
    """One parameter under two names, a buffer that is one, and one that lies in its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, 8))
        self.second = self.first
        self.register_buffer("same", self.first)
        self.register_buffer("view", self.first.detach()[2:4])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.first + x @ self.second + (x @ self.same) + self.view.sum()


def _views_of_one_tensor() -> nn.Module:
    model = mlp()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    start = 0
    for p in model.parameters():
        p.data = flat[start : start + p.numel()].view(p.shape)
        start += p.numel()
    return model


class _OwnStateDict(nn.Linear):
    """Overrides state_dict() and load_state_dict() themselves."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.hidden = torch.randn(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.hidden * 0.9
        return super().forward(x) + self.hidden

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {**super().state_dict(*args, **options), "hidden": self.hidden}

    def load_state_dict(self, state: Any, *args: Any, **options: Any) -> Any:
        state = dict(state)
        self.hidden = state.pop("hidden")
        return super().load_state_dict(state, *args, **options)


class _Hooked(nn.Linear):
    """A tensor and a counter, which hooks put into state_dict() and take out of it."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.hidden, self.calls = torch.randn(4), 0
        self.register_state_dict_post_hook(self._put)
        self.register_load_state_dict_pre_hook(self._take)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.hidden = self.hidden * 0.9
        return super().forward(x) + self.hidden * self.calls

    @staticmethod
    def _put(module: Any, state: Any, prefix: str, _: Any) -> None:
        state[prefix + "hidden"] = module.hidden
        state[prefix + "calls"] = torch.tensor(module.calls)

    @staticmethod
    def _take(module: Any, state: Any, prefix: str, *_: Any) -> None:
        module.hidden = state.pop(prefix + "hidden").clone()
        module.calls = int(state.pop(prefix + "calls"))


class _Renaming(nn.Linear):
    """Whose hooks rename a parameter in state_dict()."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.register_state_dict_post_hook(self._put)
        self.register_load_state_dict_pre_hook(self._take)

    @staticmethod
    def _put(_: Any, state: Any, prefix: str, __: Any) -> None:
        state[prefix + "w"] = state.pop(prefix + "weight")

    @staticmethod
    def _take(_: Any, state: Any, prefix: str, *__: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "w")


def _compiled_in_place() -> nn.Module:
    model = mlp()
    model.compile(backend="eager")
    model[0].compile(backend="eager")
    return model


UNUSUAL: dict[str, Callable[[], nn.Module]] = {
    "parametrization with another's parameter": _sharing_a_parametrization,
    "tied inside weight_norm": _tied_inside_weight_norm,
    "ParameterList and ParameterDict, nested": _Lists,
    "odd shapes and dtypes": _Odd,
    "buffer made by forward": _MadeByForward,
    "one memory under several names": _SameMemory,
    "one module twice": lambda: nn.Sequential(*[nn.Linear(8, 8)] * 2),
    "views of one flat tensor": _views_of_one_tensor,
    "state_dict() overridden": lambda: nn.Sequential(_OwnStateDict()),
    "state_dict hooks with a counter": lambda: nn.Sequential(_Hooked()),
    "state_dict hooks that rename": lambda: nn.Sequential(_Renaming()),
    "torch.compile in place": _compiled_in_place,
    "torch.compile of DDP": lambda: torch.compile(
        nn.parallel.DistributedDataParallel(mlp()), backend="eager"
    ),
    "fx.symbolic_trace": lambda: torch.fx.symbolic_trace(mlp()),
    "torch.export": lambda: torch.export.export(mlp(), (torch.randn(4, 8),)).module(),
}
for name, make in UNUSUAL.items():
    subject("torch", name)(with_adamw(make))
subject("torch", "Embedding, max_norm")(
    with_adamw(lambda: nn.Embedding(10, 4, max_norm=0.5), inputs=lambda: torch.randint(10, (4,)))
)


@subject("torch", "AveragedModel of DDP of torch.compile")
def averaged_wrapped(seed: int) -> Subject:
    model = nn.parallel.DistributedDataParallel(torch.compile(mlp(), backend="eager"))
    mean = swa_utils.AveragedModel(
        model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    one = trained(model, torch.optim.AdamW(model.parameters()))

    def step(n: int) -> Any:
        made = one.step(n)
        mean.update_parameters(model)
        return made

    return Subject({**one.state, "mean": mean}, step)


@subject("torch", "torch.func.stack_module_state")
def stacked(seed: int) -> Subject:
    base = mlp()
    params, _ = torch.func.stack_module_state([mlp(), mlp()])
    optim = torch.optim.AdamW(list(params.values()))

    def step(n: int) -> Any:
        optim.zero_grad()
        x = torch.randn(4, 8)
        each = torch.vmap(lambda one: torch.func.functional_call(base, one, (x,)))(params)
        each.square().mean().backward()
        optim.step()
        return each.detach()

    return Subject({"params": params, "optim": optim}, step)


# --- torch: optimizers


class _Keeper(torch.optim.Optimizer):
    """Keeps of each parameter about everything that can be kept."""

    def __init__(self, params: Any, **more: Callable[[torch.Tensor], Any]) -> None:
        self.more = more
        super().__init__(params, {"lr": 0.1, "plan": [1, (2, 3)], "none": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] *= 0.9
            group["plan"][0] += 1
            for p in group["params"]:
                state = self.state[p] or self._begun(p)
                self._advance(state, p.grad)
                p.sub_(
                    group["lr"] * (state["tree"]["mean"] + state["pair"][0] * state["tree"]["f"])
                )

    def _begun(self, p: torch.Tensor) -> Any:
        state = self.state[p]
        state["tree"] = {"mean": torch.zeros_like(p), "f": 0.5, 0: torch.zeros(2)}
        state["pair"] = (torch.ones_like(p), 1)
        state["last"] = deque(maxlen=2)
        state |= {"none": None, "set": {1, 2}, "huge": 2**70, "inf": float("inf")}
        state |= {"flag": True, "array": np.zeros(3), "a.b/é": torch.zeros_like(p)}
        state |= {name: make(p) for name, make in self.more.items()}
        return state

    def _advance(self, state: Any, grad: torch.Tensor) -> None:
        state["tree"]["mean"].mul_(0.9).add_(grad)
        state["tree"]["f"] *= 0.9
        state["pair"] = (state["pair"][0] * 0.9, state["pair"][1] + 1)
        state["last"].append(grad.norm().item())
        state["none"] = grad.clone() if state["none"] is None else state["none"] + grad
        state["flag"] = not state["flag"]
        state["array"] = state["array"] + 1


KEEPERS: dict[str, Callable[[Any], Any]] = {
    "states of every type": _Keeper,
    "a sparse state": partial(_Keeper, sparse=lambda p: torch.zeros_like(p).to_sparse()),
    "a generator as a state": partial(_Keeper, draws=lambda _: torch.Generator()),
    "AdamW, maximize": partial(torch.optim.AdamW, maximize=True),
    "SGD, fused": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
}
for name, opt in KEEPERS.items():
    subject("torch", name)(with_optimizer(opt))


@subject("torch", "named parameters")
def named_parameters(seed: int) -> Subject:
    model = mlp()
    return trained(model, torch.optim.AdamW(model.named_parameters()))


@subject("torch", "a parameter group that is added later")
def added_later(seed: int) -> Subject:
    model = mlp()
    optim = torch.optim.AdamW(model[0].parameters())
    one = trained(model, optim)

    def step(n: int) -> Any:
        if n == 2:
            optim.add_param_group({"params": model[2].parameters(), "lr": 0.1})
        return one.step(n)

    return Subject(one.state, step)


def frozen(name: str, trains: Callable[[int], bool]) -> None:
    """The first layer is trained in some steps only."""

    def build(seed: int) -> Subject:
        model = mlp()
        one = trained(model, torch.optim.AdamW(model.parameters()))

        def step(n: int) -> Any:
            model[0].requires_grad_(trains(n))
            return one.step(n)

        return Subject(one.state, step)

    subject("torch", name)(build)


frozen("frozen, then trained", lambda n: n > 2)
frozen("trained, then frozen", lambda n: n in (1, 5))


@subject("torch", "a parameter in two optimizers")
def in_two_optimizers(seed: int) -> Subject:
    model = mlp()
    also = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    return trained(model, torch.optim.AdamW(model.parameters()), also=also)


@subject("torch", "optimizers of hooks after the gradient, in a dict")
def in_hooks(seed: int) -> Subject:
    model = mlp()
    optims = {name: torch.optim.AdamW([p]) for name, p in model.named_parameters()}

    def apply(name: str, _: torch.Tensor) -> None:
        optims[name].step()
        optims[name].zero_grad()

    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(partial(apply, name))

    def step(n: int) -> Any:
        made = model(torch.randn(4, 8)).square().mean()
        made.backward()
        return made.detach()

    return Subject({"model": model, "optims": optims}, step)


@subject("torch", "PostLocalSGDOptimizer")
def post_local_sgd(seed: int) -> Subject:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = mlp()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    return trained(model, PostLocalSGDOptimizer(inner, averager))


# --- torch: schedules


class _Counting:
    """A rate that depends on how often it was asked for."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1 / (self.calls + 1)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR, stateful": lambda o: lrs.LambdaLR(o, _Counting()),
    "MultiplicativeLR, stateful": lambda o: lrs.MultiplicativeLR(o, _Counting()),
    "CyclicLR, stateful": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 3, scale_fn=_Counting()),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [1, 3, 3, 4], 0.5),
    "SequentialLR of ChainedScheduler": lambda o: lrs.SequentialLR(
        o,
        [
            lrs.ChainedScheduler([lrs.ConstantLR(o, 0.1, 2), lrs.ExponentialLR(o, 0.9)]),
            lrs.CosineAnnealingLR(o, 10),
        ],
        [2],
    ),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 10, 2.0),
}
for name, make_schedule in SCHEDULES.items():
    subject("torch", name)(scheduled(make_schedule))


@subject("torch", "OneCycleLR, lr as a tensor")
def one_cycle_of_a_tensor(seed: int) -> Subject:
    model = mlp()
    optim = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    return trained(model, optim, sched=lrs.OneCycleLR(optim, 0.1, total_steps=20))


# --- torch: values of the state


def value(name: str, make: Callable[[], Any]) -> None:
    def build(seed: int) -> Subject:
        kept = make()
        return Subject({"value": {"x": kept}}, lambda n: None)

    subject("torch", f"value: {name}")(build)


VALUES: dict[str, Callable[[], Any]] = {
    "torch.Generator": torch.Generator,
    "numpy's generator": np.random.default_rng,
    "masked array": lambda: np.ma.masked_array(np.random.rand(2), [False, True]),
    "structured scalar": lambda: np.zeros(1, [("x", "i4")])[0],
    "a number of 5000 digits": lambda: 10**5000,
}
for name, make_value in VALUES.items():
    value(name, make_value)
tensor("of no elements", lambda: torch.randn(0, 3))
tensor("slice of a slice", lambda: torch.randn(8, 8)[1::2][:, ::3])


# --- accelerate


@subject("accelerate", "offloaded to the CPU before the load")
def offloaded(seed: int) -> Subject:
    from accelerate import cpu_offload

    model = mlp().requires_grad_(False)
    if seed:
        cpu_offload(model, torch.device("cpu"))
    return Subject({"model": model}, lambda n: model(torch.randn(4, 8)))


@subject("accelerate", "disk_offload")
def on_disk(seed: int) -> Subject:
    import tempfile

    from accelerate import disk_offload

    model = mlp().requires_grad_(False)
    disk_offload(model, tempfile.mkdtemp(), torch.device("cpu"))
    return Subject({"model": model}, lambda n: model(torch.randn(4, 8)))
