"""The contents of a rank's records: gradients as the optimizer uses them, and what else changes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.compression.marks import HALVES, rounded_to
from holdfast.delta.packing import SPARSE, pays
from holdfast.delta.segment import SegmentPlan
from holdfast.errors import UsageError
from holdfast.format.manifest import TensorEntry
from holdfast.group import Group
from holdfast.layout import Mesh
from holdfast.state.agreed import Agreement, Description, describe, merge
from holdfast.state.customised import customised, own_tensors
from holdfast.state.live import (
    Live,
    State,
    is_optimizer,
    is_stateful,
    named_buffers,
    named_parameters,
    stages,
)
from holdfast.state.observer import calls_hooks, hooks_after
from holdfast.state.optimizers import named_groups, param_names, served_modules, tensors_in
from holdfast.state.placed import local_of
from holdfast.state.several import check_apart
from holdfast.state.wrapped import bare, stepping

GRAD = "grad"
"""The state of a gradient, and the end of its name: `optim.h.0.weight.grad`."""
SPARE_ROOM = 4 << 10
"""Bytes left free for extras that grow."""
SMALL_BYTES = 1 << 20
ROUNDED = {str(dtype).removeprefix("torch."): dtype for dtype in HALVES}
"""Dtypes of gradients that are recorded in another dtype than their own, by their state."""


@dataclass
class Steps:
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


def optimizers(state: State) -> list[Steps]:
    """Every optimizer of a state.  UsageError for those of engines, whose gradients are elsewhere."""
    found: list[Steps] = []
    check_apart(state, "delta=")
    for key, value in state.items():
        if not is_optimizer(value):
            continue
        value = bare(value)
        if twice := [one.key for one in found if one.optimizer is value]:
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
                hint="if it is around another optimizer, hand that over in its place",
            )
        groups = [(group, group["params"]) for group in value.param_groups]
        names = param_names(state, groups)
        modules = tuple(served_modules(state, groups))
        found.append(Steps(key, value, named_groups(groups, names), modules))
    if not found:
        raise UsageError("delta= needs an optimizer in the state")
    return found


def untrained(state: State) -> dict[str, torch.Tensor]:
    """Parameters that no optimizer of the state has, by name: frozen ones, or an average of the weights."""
    trained = {
        id(p)
        for value in state.values()
        if isinstance(value, Optimizer)
        for group in value.param_groups
        for p in group["params"]
    }
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        for module in stages(value) or ():
            for name, p in named_parameters(module):
                if id(p) not in trained:
                    found.setdefault(f"{key}.{name}", p)
    return found


def buffers(state: State) -> dict[str, torch.Tensor]:
    """Buffers and tensors of the user's own, by name."""
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        for module in stages(value) or ():
            for name, buffer in named_buffers(module):
                found.setdefault(f"{key}.{name}", buffer)
            for name, tensor in own_tensors(customised(key, module)):
                found.setdefault(f"{key}.{name}", tensor)
        if stages(value) is None and not is_optimizer(value) and not is_stateful(value):
            for path, tensor in tensors_in(value):
                found[f"{key}.{path}" if path else key] = tensor
    return found


def small(tensors: dict[str, torch.Tensor]) -> set[str]:
    """Names of small tensors, recorded at every step: batch norm's kernels write uncounted."""
    return {n for n, t in tensors.items() if t.numel() * t.element_size() <= SMALL_BYTES}


def grad_name(key: str, name: str) -> str:
    return f"{key}.{name}.{GRAD}"


def held(steps: list[Steps], values: dict[str, torch.Tensor], dense: Collection[str] = ()) -> Live:
    """The tensors of a record; gradients lie as their parameters do.  `dense`: those that are recorded
    whole, whatever was declared of them."""
    live = Live()
    for one in steps:
        for name, p in one.params:
            full = grad_name(one.key, name)
            state = GRAD if full in dense else declared(p)
            live.add(full, state, p, steady=True)
    for name, tensor in values.items():
        live.add(name, "buffer", tensor, steady=False)
    return live


def declared(p: torch.Tensor) -> str:
    """The state that a parameter's gradient counts as, by what was declared of it."""
    if pays(p):
        return SPARSE
    dtype = rounded_to(p)
    return GRAD if dtype is None else str(dtype).removeprefix("torch.")


def agree(group: Group, live: Live, mesh: Mesh | None, number: int) -> Agreement:
    """Agree on what the records of all ranks hold together.  Collective; blocks."""

    def together(answers: list[bytes]) -> bytes:
        kinds = list(dict.fromkeys(answers))
        found = merge(kinds, [kinds.index(a) for a in answers], mesh)
        return msgspec.msgpack.encode(_one_state(found, kinds))

    data = group.ask(
        f"delta/plan/{number}", describe(live), together, awaited="planned its records"
    )
    return msgspec.msgpack.decode(data, type=Agreement)


def _one_state(agreement: Agreement, descriptions: list[bytes]) -> Agreement:
    """A gradient that one rank has to record whole is recorded whole by all; one that is rounded counts as
    of that dtype."""
    docs = [msgspec.msgpack.decode(d, type=Description) for d in descriptions]
    dense = {t.name for doc in docs for t in doc.tensors if t.state == GRAD}
    tensors = []
    for t in agreement.tensors:
        if t.name in dense:
            t = msgspec.structs.replace(t, state=GRAD)
        elif t.state in ROUNDED:
            t = msgspec.structs.replace(t, state=GRAD, dtype=t.state)
        tensors.append(t)
    return msgspec.structs.replace(agreement, tensors=tuple(tensors))


def plan_of(agreement: Agreement, few: tuple[TensorEntry, ...]) -> SegmentPlan:
    return SegmentPlan(
        agreement.mesh, agreement.shardings, agreement.tensors, agreement.aliases, few
    )


def check_grad(name: str, p: torch.Tensor, *, read_only: bool) -> None:
    """UsageError for a gradient that no record holds as the optimizer takes it.  `read_only`: it takes its
    values alone, and does not differentiate it."""
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
            hint="dense gradients of the parameters' own dtype can; of those that are mostly zero "
            "(holdfast.compression.sparse) only the rest is recorded",
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
        hint="have it in the parameter groups, or use memory= and durable saves alone",
    )


def mixed_up(one: Steps) -> str:
    """Name of a parameter with which an optimizer computes otherwise than a replay would; empty if none.

    Torch's fused kernels on CPUs go through the memory of gradient and parameter side by side, also where
    one of them lies otherwise than the other (elsewhere they refuse), and those of 16 bits round otherwise
    where memory has gaps.
    """
    for group, pairs in zip(one.optimizer.param_groups, one.groups):
        for name, p in pairs:
            is_open = (group.get("fused") or p.dtype in HALVES) and p.device.type == "cpu"
            grad = p.grad if is_open else None
            if grad is not None and grad.layout == torch.strided and not _lie_alike(p, grad):
                return name
    return ""


def _lie_alike(p: torch.Tensor, grad: torch.Tensor) -> bool:
    here, there = local_of(p), local_of(grad)
    return all(size < 2 or a == b for size, a, b in zip(here.shape, here.stride(), there.stride()))


def kind_of(optimizer: Optimizer) -> str:
    """The optimizer's class as `module:name`: a replay without the training script can make one."""
    kind = type(stepping(optimizer))
    return f"{kind.__module__}:{kind.__qualname__}"


def only_reads(optimizer: Optimizer) -> bool:
    """True if an optimizer's step is known to leave gradients as they are: torch's do, unless a fused
    kernel unscales them, or one with `nesterov` writes to them."""
    optimizer = stepping(optimizer)
    looks_ahead = any(group.get("nesterov") for group in optimizer.param_groups)  # foreach writes
    scales = getattr(optimizer, "grad_scale", None) is not None
    return is_torchs(optimizer) and not looks_ahead and not scales


def is_torchs(optimizer: Optimizer) -> bool:
    """True if torch brings the optimizer, so that it is known what it reads, keeps and writes."""
    return type(stepping(optimizer)).__module__.startswith("torch.optim.")


def is_watched(optimizer: Optimizer) -> bool:
    """True if something in an optimizer's step may read other values than its own: a hook that follows it,
    or an optimizer that torch does not bring."""
    return hooks_after(optimizer) > 0 or not is_torchs(optimizer)


def missing_of(one: Steps) -> tuple[str, ...]:
    return tuple(name for name, p in one.params if p.grad is None)


def encode_extras(extras: dict[str, Any]) -> bytes:
    return msgspec.json.encode(extras)
