"""Sources: what a framework tells of the models and optimizers that it has in a state.

torch keeps the values of a weight in the parameter itself, and the optimizer's states under that parameter.
Frameworks for large models do not.  They train a *master*: a float32 tensor of which this rank has a piece,
often one flat tensor for many weights, and make the weights that the model computes with from it.

    weights of the model   bf16   [ a b c d ] [ e f g h ]     whole, on every rank
    master of this rank    fp32         [ c d   e f ]         one flat tensor: a part of either weight
    exp_avg of this rank   fp32         [ c d   e f ]         laid out as the master

What is worth saving are masters and states, under the names and in the coordinates of the weights: then a
checkpoint says nothing of the framework, and loads on any number of ranks or into plain torch.  So a
framework is asked two things, each by a small protocol:

* `Framework`: which objects are its own, and what is inside its wrappers.  One object, registered once.
* `Source`: for the objects of one state, at the moment of a save or a restore, the `Master` of each weight,
  what else is to be saved, and what must happen when values were put back.

`Torch` is the source of everything that no framework tells of: no weight has a master.  DeepSpeed's and
Megatron-Core's are in `live.state.deepspeed` and `live.state.megatron`; they are loaded once
those packages are, since no object of a package exists before it is imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.base.arguments import unfit
from holdfast.core.layout import Box, flat_range
from holdfast.live.ragged import cut, is_ragged, shape_of

__all__ = ["Framework", "Master", "Source", "flat_cut", "register"]

Group = tuple[dict[str, Any], list[torch.Tensor]]
"""A parameter group's dict of hyper-parameters, and the model's own parameters that are in the group."""

Cut = Callable[[torch.Tensor], Iterable[tuple[Box, torch.Tensor]]]
"""From a tensor that is laid out as a master to the parts of the weight in it: the box of the whole weight
that a part covers, and a view of the tensor with that box's shape."""


_boxes = lru_cache(1 << 16)(flat_range)


def flat_cut(shape: Sequence[int], start: int, stop: int, at: int = 0) -> Cut:
    """The cut of elements `start..stop`, counted row by row, of a weight of `shape`, which lie one after
    the other in a flat master, from its element `at` on.  Such a range is few boxes, each contiguous:

        >>> cut = flat_cut((2, 5), 3, 8, at=2)
        >>> [str(box) for box, _ in cut(torch.arange(8.0))]
        ['0:1,3:5', '1:2,0:3']
    """
    return partial(_cut_flat, tuple(shape), start, stop, at)


def _cut_flat(
    shape: tuple[int, ...], start: int, stop: int, at: int, flat: torch.Tensor
) -> Iterator[tuple[Box, torch.Tensor]]:
    for box in _boxes(shape, start, stop):
        yield box, flat.narrow(0, at, box.size).view(box.shape)
        at += box.size


@dataclass(frozen=True, slots=True, eq=False)
class Master:
    """The tensor that keeps the values of one parameter or buffer on this rank: a framework's, or by
    `is_itself` the parameter."""

    tensor: torch.Tensor
    """The tensor that holds the values and counts the writes to them.  States lie as it does."""
    optimizer: Optimizer | None = None
    """The torch optimizer that has `tensor` among its parameters; None if no state of it is here."""
    shape: tuple[int, ...] | None = None
    """Shape of the whole weight over all ranks; needed with `cut`."""
    cut: Cut | None = None
    """The parts of the weight in `tensor`, or in a state that lies as it does: views, disjoint, maybe none.
    None if `tensor` is the weight, whole or a DTensor."""
    is_copy: bool = False
    """True if another rank saves the same values, which this rank then leaves to it."""
    is_padded: bool = False
    """True if dim 0 is padded for this layout: more or fewer rows may have been saved."""
    steady_states: bool = True
    """True if states change inside the torch optimizer's `step()` alone; else they are copied at once."""
    is_itself: bool = False
    """True if `tensor` is the parameter, which torch's optimizers step: they have its states."""
    plain_numbers: bool = False
    """True if the optimizer keeps numbers, such as the count of steps, as Python's; torch's has tensors."""
    stored: Mapping[str, torch.dtype] = field(default_factory=dict)
    """The dtype in which a state is saved, by its name, where it is not that of `tensor`, in which it is
    live: a save rounds, at its call, and a restore puts the rounded values back."""


@runtime_checkable
class Source(Protocol):
    """The framework's word on its models and optimizers in one state, at one moment."""

    framework: str
    """Name of the framework, for messages."""
    by_master: bool = False
    """True if a master, and so each of its states, may serve several weights; then a state that is one
    number must be the same for all of them."""
    saves_rest: bool = False
    """True for torch alone: entries that modules add to their state_dict(), and state of an optimizer that
    belongs to no parameter, are saved as they are.  Elsewhere they are refused by name, for nobody says
    which rank's they are."""

    def groups(self, optimizer: Any) -> list[Group]:
        """The parameter groups of one of its optimizers, with the model's own parameters."""

    def master(self, p: torch.Tensor) -> Master | None:
        """The master of a parameter or buffer; None if it is kept as torch keeps it."""

    def extras(self) -> dict[str, Any]:
        """Whatever else an optimizer cannot go on without (counters, a loss scale), as plain data."""
        return {}

    def put_extras(self, saved: dict[str, Any]) -> None:
        """Put back what `extras` gave, in this run or another."""
        return

    def lacking(self, saved: dict[str, Any]) -> list[str]:
        """Return a description of each value that this run needs and that the `saved` extras lack."""
        return []

    def refresh(self) -> None:
        """Make the model's own weights from the masters, after a restore.  May be collective."""
        return

    def poison(self) -> None:
        """Fill the model's own weights with NaN: a half-loaded model must not train.  Not collective."""
        return


@runtime_checkable
class Framework(Protocol):
    """Recognises the objects of one framework."""

    def owns(self, value: Any) -> bool:
        """True if a value is a model, a wrapper of models or an optimizer of this framework."""

    def inside(self, module: nn.Module) -> nn.Module | None:
        """The module in one of the framework's wrappers, whose names count; None if it is no wrapper."""
        return None

    def names(self, module: nn.Module) -> Mapping[str, Sequence[str]]:
        """Names in the whole model of an unwrapped module's parameters, buffers and extra states, by their
        paths in the module; what is not in it keeps its path.  The first name is that of the checkpoint,
        the others are of tied weights."""
        return {}

    def sources(
        self, modules: Mapping[str, Sequence[nn.Module]], state: Mapping[str, Any]
    ) -> Mapping[int, Source]:
        """The source of each of the framework's modules and optimizers in a state, by `id` of these.
        `modules` has the modules of the state by key.  UsageError for what cannot be saved right."""


class Torch(Source):
    """The source of torch's own modules and optimizers: values are where the parameters are."""

    framework = "torch"
    saves_rest = True

    def groups(self, optimizer: Any) -> list[Group]:
        return [(group, group["params"]) for group in optimizer.param_groups]

    def master(self, p: torch.Tensor) -> Master | None:
        """A ragged parameter, whose states lie as it does, is its own master."""
        if not is_ragged(p):
            return None
        return Master(p, shape=shape_of(p), cut=partial(cut, p), is_itself=True)


TORCH = Torch()


class Sources:
    """The source of each module and optimizer of a state: torch's own but for those of frameworks."""

    def __init__(self, found: Mapping[int, Source] | None = None) -> None:
        self._by_id = dict(found or {})

    def of(self, value: Any) -> Source:
        """The source that tells of a module or an optimizer."""
        return self._by_id.get(id(value), TORCH)

    def of_frameworks(self) -> list[Source]:
        """The sources of frameworks, each once."""
        return list(dict.fromkeys(self._by_id.values()))


# -- frameworks -----------------------------------------------------------------------------------

_OURS = {"deepspeed": "holdfast.live.state.deepspeed", "megatron": "holdfast.live.state.megatron"}
"""Modules with a `FRAMEWORK`, by the package whose objects it recognises."""
_registered: list[Framework] = []


def register(framework: Framework) -> None:
    """Let every later save and restore of this process ask one more framework.

    Call it where the framework is imported, on all ranks.  Registering the same object again does nothing.
    """
    if not issubclass(type(framework), Framework):
        raise unfit(
            "sources.register",
            "framework",
            framework,
            "an object with the methods of holdfast.sources.Framework",
        )
    if framework not in _registered:
        _registered.append(framework)


def frameworks() -> list[Framework]:
    """The frameworks of which this process may have objects."""
    ours = [
        importlib.import_module(ours) for package, ours in _OURS.items() if package in sys.modules
    ]
    return [*(module.FRAMEWORK for module in ours), *_registered]


def is_owned(value: Any) -> bool:
    """True if a value is a model, a wrapper or an optimizer of a framework."""
    return any(framework.owns(value) for framework in frameworks())
