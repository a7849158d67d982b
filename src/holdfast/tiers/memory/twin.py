"""Twins: optimizers on the host that make the same steps as the training's, from the same gradients.

A `Twin` has parts of an optimizer's parameters.  When the training's optimizer begins a step, its
gradients are final: those of the twin's parts are copied to the host, and a thread makes the step with
them, while the training goes on (LowDiff+'s layer-wise replica, REFT's asynchronous optimizer
recomputation).  `twins.py` orders the steps.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.base.errors import HoldfastError, need
from holdfast.live.state.blockwise import Blockwise
from holdfast.live.state.devices import Moment, after, devices_of, on, on_streams, page_locks
from holdfast.live.state.gradient_copies import Lender, Lent, only_reads
from holdfast.live.state.observer import unhooked
from holdfast.live.state.optimizer_wrappers import stepping
from holdfast.live.state.optimizers import hyper_parameters, named_groups, param_names
from holdfast.live.state.placed import memory_of
from holdfast.live.state.recognising import State
from holdfast.live.state.writes import times_written

MOST_AHEAD = 8
"""Most gradients that may wait to be applied."""

AT_FIRST = 2
"""Number of gradients whose memory is allocated with the twin, off the training thread: new pages
cost ten times a copy."""

States = Mapping[str, torch.Tensor]
Named = tuple[str, Any, list[tuple[str, torch.Tensor]]]
"""An optimizer's key, the optimizer, and its parameters by name."""


@dataclass(frozen=True)
class ParamPart:
    """A part of a parameter."""

    name: str
    """Name that tells it from others."""
    param: torch.Tensor
    at: tuple[slice, ...] | None = None
    """Slices of this rank's local tensor; None: all of it."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same part of a tensor that has the parameter's layout; it shares memory."""
        with torch.no_grad():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local = local.detach()
            return local if self.at is None else local[self.at]


@dataclass
class Gradient:
    """What one step of an optimizer used: the gradients of a twin's parts, and the hyper-parameters."""

    twin: Twin
    values: list[torch.Tensor]
    given: list[bool]
    hypers: list[dict[str, Any]]
    ready: Moment
    """The end of the copy."""
    lent: Lent | None = None
    """The training's own gradients, if they are lent until they are copied."""
    is_torn: bool = False
    """True if somebody wrote to them before they were copied."""

    def settle(self) -> None:
        """Give lent gradients back to the training, after their copy.  On any thread."""
        lent = self.lent
        if lent is not None:
            self.is_torn |= lent.is_written
            self.lent = None


class Twin:
    """An optimizer of the same kind as another, on the host."""

    def __init__(self, optimizer: Any, parts: Sequence[ParamPart]) -> None:
        self.outer = optimizer
        self.parts = list(parts)
        likes = [part.of(part.param) for part in parts]
        self.weights = [torch.nn.Parameter(torch.empty(t.shape, dtype=t.dtype)) for t in likes]
        self.regroup()
        self._spare = [self._new_gradient_memory() for _ in range(AT_FIRST)]
        self._made = AT_FIRST
        self._lender = Lender(0)
        self._before: Gradient | None = None
        """The last gradient that was lent."""

    def regroup(self) -> None:
        """Put the parts in the groups that their parameters are in now; the twin has no states until
        `put`."""
        of: dict[int, list[torch.Tensor]] = {}
        for part, mine in zip(self.parts, self.weights):
            of.setdefault(id(part.param), []).append(mine)
        self._grouped = self._groups()
        groups = [
            {**hyper_parameters(g), "params": [mine for p in ids for mine in of[p]]}
            for g, ids in zip(self.outer.param_groups, self._grouped)
        ]
        self._inner: Optimizer = type(stepping(self.outer))(groups, **_defaults(self.outer))
        self._blockwise = Blockwise(self._inner)

    def is_regrouped(self) -> bool:
        """True if a parameter has moved to another group since `regroup`, or to none."""
        return self._grouped != self._groups()

    def _groups(self) -> list[list[int]]:
        """Return, for each of the training's groups, the ids of the parameters that the twin has parts
        of."""
        mine = {id(part.param) for part in self.parts}
        return [[id(p) for p in g["params"] if id(p) in mine] for g in self.outer.param_groups]

    def copy_weights(self) -> None:
        """Copy the training's weights as they are now; on the training thread."""
        with torch.no_grad():
            for mine, part in zip(self.weights, self.parts):
                mine.copy_(part.of(part.param))

    def misfit(self) -> str:
        """Return why the step that begins cannot be made here; empty if it can."""
        if self.is_regrouped():
            return "parameters are in other groups now"
        for part in self.parts:
            grad = part.param.grad
            if grad is not None and (
                grad.layout != torch.strided or grad.dtype != part.param.dtype
            ):
                return f"a gradient is {grad.layout}, of {grad.dtype}"
            if isinstance(grad, DTensor) and grad.placements != part.param.placements:
                return f"a gradient is in {grad.placements}"
        return ""

    def take(self) -> Gradient | None:
        """Return the gradients of the step that begins, on the training thread; None if too many
        wait."""
        if not self._spare:
            if self._made == MOST_AHEAD:
                return None
            self._spare.append(self._new_gradient_memory())
            self._made += 1
        values = self._spare.pop()
        given = [part.param.grad is not None for part in self.parts]
        into = [value for value, has in zip(values, given) if has]
        grads = [part.param.grad for part in self.parts if part.param.grad is not None]
        is_free = not self._is_lending() and bool(devices_of(grads)) and only_reads(self.outer)
        may_keep = self._lender.may_keep("", [memory_of(g) for g in grads]) and is_free
        sources = [part.of(part.param.grad) for part, has in zip(self.parts, given) if has]
        ready = self._begin_copy(into, sources)
        hypers = [copy.deepcopy(hyper_parameters(g)) for g in self.outer.param_groups]
        gradient = Gradient(self, values, given, hypers, ready)
        if may_keep:
            gradient.lent = Lent(sources, "lent", [*map(times_written, sources)])
            self._before = gradient
        else:
            for device in ready.devices:
                ready.before(torch.accelerator.current_stream(device))
        return gradient

    @staticmethod
    def _begin_copy(into: list[torch.Tensor], sources: list[torch.Tensor]) -> Moment:
        """Begin to copy, on streams of our own; return the moment at which the copy is done."""
        devices = devices_of(sources)
        streams = [after(Moment([device]), device, "feed") for device in devices]
        with torch.no_grad(), on_streams(streams):
            if into:
                torch._foreach_copy_(into, sources, non_blocking=True)
        return Moment.of(streams)

    def _is_lending(self) -> bool:
        """True if lent gradients of an earlier step are still being copied; if not, give them back."""
        before = self._before
        if before is not None and before.lent is not None:
            if not before.ready.is_over:
                return True
            before.settle()
        return False

    def _new_gradient_memory(self) -> list[torch.Tensor]:
        """Return memory for one gradient, whose pages are allocated."""
        return [_host_memory(part.of(part.param)).zero_() for part in self.parts]

    def give_back(self, gradient: Gradient) -> None:
        self._spare.append(gradient.values)

    def apply(self, gradient: Gradient) -> None:
        """Make the step.  Blocks."""
        gradient.ready.wait()
        gradient.settle()
        if gradient.is_torn:
            raise HoldfastError("gradients were written to while they were copied")
        for mine, value, given in zip(self.weights, gradient.values, gradient.given):
            mine.grad = value if given else None
        for group, new in zip(self._inner.param_groups, gradient.hypers):
            group.update(new)
            if group.get("capturable"):
                group["capturable"] = False  # only devices support it
        if self._blockwise.is_possible():
            self._blockwise.step()
        else:
            unhooked(self._inner)(self._inner)  # hooks are for the training's steps

    def put(self, states: Sequence[States]) -> None:
        """Take over the states of each part, which are from now on the twin's own."""
        self._inner.state.clear()
        for mine, found in zip(self.weights, states):
            if found:
                self._inner.state[mine] = dict(found)

    def states(self) -> list[dict[str, torch.Tensor]]:
        """Return the states of each part: the very tensors that the next steps change."""
        found = [self._inner.state.get(mine, {}) for mine in self.weights]
        return [{k: v for k, v in s.items() if isinstance(v, torch.Tensor)} for s in found]


def named_params(state: State, optimizers: Mapping[str, Any]) -> list[Named]:
    """Return the parameters by name of these optimizers of a state; on the training thread, between two
    steps."""
    found = []
    for key, optimizer in optimizers.items():
        groups = [(g, g["params"]) for g in optimizer.param_groups]
        pairs = named_groups(groups, param_names(state, groups))
        found.append((key, optimizer, [pair for some in pairs for pair in some]))
    return found


def _host_memory(like: torch.Tensor) -> torch.Tensor:
    """Return host memory of the same shape, to which the tensor's device can copy in the background."""
    if like.device.type not in page_locks:
        return torch.empty(like.shape, dtype=like.dtype)
    with on(like.device):
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def _defaults(optimizer: Any) -> dict[str, Any]:
    """Return the arguments that an optimizer of the same kind needs; each group overrides them."""
    if stepping(optimizer) is not optimizer:
        return dict(*need("torch", optimizer, "_optim_defaults"))
    return {"lr": optimizer.defaults["lr"]} if "lr" in optimizer.defaults else {}
