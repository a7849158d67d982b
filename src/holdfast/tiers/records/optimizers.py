"""The recorded optimizers: their parameters by name, their steps, and the gradients that records can hold.

A record is exact only if a replay makes the same step.  So this module knows which gradients a record can
hold, and which steps may depend on values that no record has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.base.errors import UsageError
from holdfast.live.gradient_compression.marks import HALVES
from holdfast.live.state.gradient_copies import is_torchs
from holdfast.live.state.observer import HookOrder, Observer, StepCall, calls_hooks, hooks_after
from holdfast.live.state.optimizer_wrappers import shown_optimizer, stepping
from holdfast.live.state.optimizers import check_exact, named_groups, param_names, served_modules
from holdfast.live.state.placed import local_of
from holdfast.live.state.recognising import State, is_optimizer
from holdfast.live.state.several import check_apart

GRAD = "grad"
"""The state of a gradient, and the end of its name: `optim.h.0.weight.grad`."""

Groups = dict[str, tuple[tuple[str, ...], ...]]
"""The parameters' names, group by group, by optimizer's key."""


def grad_name(key: str, name: str) -> str:
    return f"{key}.{name}.{GRAD}"


@dataclass
class NamedOptimizer:
    """An optimizer of the state, and its parameters by name."""

    key: str
    optimizer: Optimizer
    groups: list[list[tuple[str, torch.Tensor]]]
    modules: tuple[str, ...] = ()
    """Keys of the modules that have these parameters."""

    @property
    def params(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pairs in self.groups:
            yield from pairs


def optimizers(state: State) -> list[NamedOptimizer]:
    """Every optimizer of a state.  UsageError if there is none, or one that cannot be recorded."""
    named: list[NamedOptimizer] = []
    check_apart(state, "delta=")
    check_exact(state, "delta=")
    for key, value in state.items():
        if not is_optimizer(value):
            continue
        value = shown_optimizer(value)
        if twice := [one.key for one in named if one.optimizer is value]:
            raise UsageError(f"an optimizer is in the state twice, as {twice[0]!r} and {key!r}")
        if not isinstance(value, Optimizer):
            raise UsageError(
                f"delta= does not know the gradients of {key!r}, a {type(value).__name__}",
                hint="use torch optimizers, or memory= and durable saves alone",
            )
        if not calls_hooks(value):
            raise UsageError(
                f"delta= cannot see the steps of {key!r}, a {type(value).__name__}: its __init__ has not "
                "called torch.optim.Optimizer's",
                hint="if it wraps another optimizer, hand that over in its place",
            )
        groups = [(group, group["params"]) for group in value.param_groups]
        names = param_names(state, groups)
        modules = tuple(served_modules(state, groups))
        named.append(NamedOptimizer(key, value, named_groups(groups, names), modules))
    if not named:
        raise UsageError("delta= needs an optimizer in the state")
    return named


class ObservedOptimizers:
    """The optimizers of the state, by name; `before` and `after` are called around each of their steps."""

    def __init__(
        self,
        state: State,
        before: Callable[[StepCall[str]], None],
        after: Callable[[StepCall[str]], None],
    ) -> None:
        self._before = before
        self._after = after
        self._is_paused = False
        self.num_begun = 0
        """Number of steps that these optimizers have begun."""
        self.named = optimizers(state) if {*state} - {"rng"} else []  # the state may come later
        self.observer = self._observe()

    def complete(self, state: State) -> None:
        """Observe the optimizers of a state that has come late.  UsageError if there are none."""
        if not self.named:
            self.named = optimizers(state)
            self.observer = self._observe()

    def __getitem__(self, key: str) -> NamedOptimizer:
        return next(one for one in self.named if one.key == key)

    def _observe(self) -> Observer[str]:
        by_key = {one.key: one.optimizer for one in self.named}
        return Observer(by_key, HookOrder.RECORDS, self._begins, self._after)

    def _begins(self, call: StepCall[str]) -> None:
        if not self._is_paused:
            self.num_begun += 1
            self._before(call)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Call neither `before` nor `after` in this block: its steps are no steps of the training."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def follow(self, state: State) -> bool:
        """Observe the state's optimizers if they are others than before; True if so."""
        live = [
            (key, id(shown_optimizer(value))) for key, value in state.items() if is_optimizer(value)
        ]
        if live == [(one.key, id(one.optimizer)) for one in self.named]:
            return False
        self.observer.close()
        self.named = optimizers(state)
        self.observer = self._observe()
        return True

    def rename(self, state: State) -> None:
        """Look up the parameters of all optimizers, and their names, again."""
        self.named = optimizers(state)

    @property
    def is_stale(self) -> bool:
        """True if an optimizer has other parameters than at the last look."""
        return any(
            [id(p) for g in one.optimizer.param_groups for p in g["params"]]
            != [id(p) for _, p in one.params]
            for one in self.named
        )

    @property
    def groups(self) -> Groups:
        return {
            one.key: tuple(tuple(name for name, _ in pairs) for pairs in one.groups)
            for one in self.named
        }


def check_grad(name: str, p: torch.Tensor, *, read_only: bool) -> None:
    """Raise UsageError for a gradient that a record cannot hold as the optimizer uses it.  `read_only`: the
    optimizer uses its values alone, and does not differentiate it."""
    grad = p.grad
    if grad is None:
        if getattr(p, "main_grad", None) is not None:
            raise UsageError(
                f"{name}: its gradient is in .main_grad, which cannot be recorded",
                hint="records are of gradients in .grad; use memory= and durable saves alone",
            )
        return
    if grad.requires_grad and not read_only:
        raise UsageError(
            f"{name}: its gradient has a graph of its own (create_graph=True), which no record has",
            hint="detach gradients before step(); of an optimizer that differentiates them, such as "
            "AdaHessian, use memory= and durable saves alone",
        )
    if isinstance(grad, DTensor) and isinstance(p, DTensor) and grad.placements != p.placements:
        raise UsageError(
            f"{name}: a gradient in {grad.placements} for a parameter in {p.placements}"
        )
    if grad.dtype != p.dtype or grad.layout != torch.strided or grad.shape != p.shape:
        raise UsageError(
            f"{name}: a gradient of {grad.dtype} {tuple(grad.shape)} {grad.layout} for a parameter of "
            f"{p.dtype} {tuple(p.shape)} cannot be recorded",
            hint="make it a dense gradient of the parameter's dtype; if most of it is zero, declare that "
            "(holdfast.compression.sparse), and only nonzero elements are recorded",
        )


def refused(key: str, given: list[Any]) -> UsageError:
    """The error for arguments of `step()`, which a replay would have to hand over, too."""
    if callable(given[0]):
        return UsageError(
            "delta= cannot record an optimizer that is given a closure",
            hint="call step() without one; LBFGS cannot be recorded",
        )
    return UsageError(
        f"delta= cannot record {key!r}, whose step() is given {', '.join(map(repr, given))}",
        hint="put such values into the parameter groups, or use memory= and durable saves alone",
    )


def differently_strided(one: NamedOptimizer) -> str:
    """Name of a parameter whose gradient has other strides, so that a replay would make another step; empty
    if there is none.

    Torch's fused kernels on CPUs go through the memory of gradient and parameter side by side, even if
    their strides differ (on devices they refuse that), and its kernels for 16 bits round differently if
    memory has gaps.
    """
    for group, pairs in zip(one.optimizer.param_groups, one.groups):
        for name, p in pairs:
            matters = (group.get("fused") or p.dtype in HALVES) and p.device.type == "cpu"
            grad = p.grad if matters else None
            if grad is not None and grad.layout == torch.strided and not _same_strides(p, grad):
                return name
    return ""


def _same_strides(p: torch.Tensor, grad: torch.Tensor) -> bool:
    a, b = local_of(p), local_of(grad)
    return all(size < 2 or m == n for size, m, n in zip(a.shape, a.stride(), b.stride()))


def kind_of(optimizer: Optimizer) -> str:
    """The optimizer's class as `module:name`: a replay without the training script can make one."""
    kind = type(stepping(optimizer))
    return f"{kind.__module__}:{kind.__qualname__}"


def may_read_others(optimizer: Optimizer) -> bool:
    """True if an optimizer's step may read values other than its own weights and states: hooks follow it,
    or it is not one of torch's."""
    return hooks_after(optimizer) > 0 or not is_torchs(optimizer)


def missing_of(one: NamedOptimizer) -> tuple[str, ...]:
    return tuple(name for name, p in one.params if p.grad is None)


def reduce_gradients(params: Iterable[torch.Tensor]) -> None:
    """Do the reductions that tensor parallelism leaves pending on gradients (of norms, say), as the
    optimizer would at the beginning of its step.  Collective if there are any."""
    for p in params:
        grad = p.grad
        if isinstance(grad, DTensor) and isinstance(p, DTensor) and grad.placements != p.placements:
            with torch.no_grad():
                p.grad = grad.redistribute(p.device_mesh, p.placements)
