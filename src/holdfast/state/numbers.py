"""Numbers that a training counts in attributes, and that no `state_dict()` has.

    class Average(nn.Module):
        def forward(self, ...):
            self.num_updates += 1        # a restart begins at 0 again

That a number is kept so says nothing: sizes, rates and the like are the same in each run.  One that changes
while the training goes on is told, once.  Modules, optimizers and objects are looked at, but not those of
torch, not attributes whose names begin with `_`, and not what the object's own state tells: then the number
is in it under its name or, whatever the name, with its value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.state.customised import named_entries
from holdfast.state.ignoring import Ignored
from holdfast.state.live import State, is_loader, is_optimizer, is_stateful, stages
from holdfast.state.outside import OWN, held, place_of, places_of, saved_names
from holdfast.state.several import inner_optimizers, parts_of
from holdfast.state.wrapped import is_zero1
from holdfast.state.writes import Mark

MOST = 1024
"""Numbers that are looked at, at most."""
CHANGES = 3
"""Changes in one direction that make a number one that is counted: sizes of batches go up and down."""
_OTHERS = ("torch", "builtins")
_REPORTED = ("loss", "time", "elapsed", "accuracy")
"""Words in the names of numbers that are there to be shown."""


class Numbers:
    """The numbers in attributes of a state, and how they change."""

    def __init__(self, state: State) -> None:
        self._kept = [
            (where, owner, name)
            for where, owner in _owners(state)
            for name, value in list(owner.__dict__.items())
            if _is_number(name, value)
        ][:MOST]
        self._values = self._now()
        self._moved = [0] * len(self._kept)
        """Number of changes of each, all in one direction: negative if downwards."""
        self._tensors = [
            (key, part, name, path, Mark.of(tensor))
            for key, value in state.items()
            for part in _optimizers(value)
            for name, one in list(vars(part).items())
            if name not in OWN
            for path, tensor in held(one, name)
        ][:MOST]

    def _now(self) -> list[Any]:
        return [owner.__dict__.get(name) for _, owner, name in self._kept]

    def observe(self) -> None:
        """Look at the numbers once more."""
        now = self._now()
        if now == self._values:
            return
        for n, (value, before) in enumerate(zip(now, self._values)):
            if value != before and type(value) in (int, float) and type(before) in (int, float):
                step = 1 if value > before else -1
                self._moved[n] = (
                    self._moved[n] + step if self._moved[n] * step >= 0 else -MOST * step
                )
        self._values = now

    def counted(self, state: State) -> list[str]:
        """Names of numbers that are counted up or down, and that nothing saves."""
        return [
            f"{where}.{name}"
            for (where, owner, name), value, moved in zip(self._kept, self._values, self._moved)
            if CHANGES <= abs(moved) < MOST // 2 and not _is_saved(owner, name, value, state)
        ]

    def changed_tensors(self) -> list[tuple[str, bool]]:
        """Tensors in attributes of optimizers that were written or replaced since, and that nothing saves:
        the name of each, and whether it is a single number."""
        found = []
        for key, part, name, path, mark in self._tensors:
            now = dict(held(vars(part).get(name), name)).get(path)
            if now is None or not Mark.of(now).differs(mark):
                continue
            if place_of(now) not in places_of(part) and not Ignored([("", part)]).has(name):
                found.append((f"{key}.{path}", now.numel() == 1))
        return found


def _is_number(name: str, value: Any) -> bool:
    return (
        type(value) in (int, float)
        and not name.startswith("_")
        and not any(word in name for word in _REPORTED)
    )


def _optimizers(value: Any) -> list[Optimizer]:
    return list(parts_of(value).values()) if isinstance(value, Optimizer) else []


def _owners(state: State) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) of what may keep numbers of its own."""
    for key, value in state.items():
        for module in stages(value) or ():
            for name, part in module.named_modules():
                if not _is_of_others(part):
                    yield (f"{key}.{name}" if name else key), part
        parts = _optimizers(value)
        if stages(value) is None and not parts and is_stateful(value) and not is_loader(value):
            parts = [value]
        for one in parts:
            if not _is_of_others(one) and isinstance(getattr(one, "__dict__", None), dict):
                yield key, one


def _is_of_others(one: Any) -> bool:
    return type(one).__module__.partition(".")[0] in _OTHERS


def _is_saved(owner: Any, name: str, value: Any, state: State) -> bool:
    """True if a number is in the state of its owner, or a plain value of the state of that name is the
    same."""
    plain = {
        k: v
        for k, v in state.items()
        if stages(v) is None and not is_optimizer(v) and not is_stateful(v)
    }
    if any(
        found == value and key and (key in name or name in key) for key, found in saved_names(plain)
    ):
        return True
    if isinstance(owner, nn.Module):
        if type(owner).get_extra_state is not nn.Module.get_extra_state:
            return True
        own = {k: v for k, v in named_entries(owner).items() if "." not in k}
        return any(name in found or number == value for found, number in saved_names(own))
    if isinstance(owner, Optimizer):
        if Ignored([("", owner)]).has(name):
            return True
        groups = [{k: v for k, v in g.items() if k != "params"} for g in owner.param_groups]
        states = [v for v in owner.state.values() if isinstance(v, dict)][:1]
        return any(number == value for _, number in saved_names([groups, states]))
    return any(
        found == name or number == value for found, number in saved_names(owner.state_dict())
    )


# -- groups of a wrapper ----------------------------------------------------------------------------


def cut_off(state: State) -> Iterator[tuple[str, str]]:
    """Yield (key, class) of each wrapper with `param_groups` of its own beside those of the optimizer
    inside: what a scheduler sets there has no effect."""
    for key, value in state.items():
        if stages(value) is not None or is_zero1(value) or not hasattr(value, "__dict__"):
            continue
        own = vars(value).get("param_groups")
        inner = list(inner_optimizers(value).values()) if isinstance(own, list) and own else []
        theirs = [group for one in inner for group in one.param_groups]
        if not theirs or any(mine is group for mine in own or () for group in theirs):
            continue
        if _params(own) & _params(theirs):
            yield key, type(value).__name__


def _params(groups: Any) -> set[int]:
    return {
        id(p)
        for group in groups
        if isinstance(group, dict)
        for p in group.get("params", ())
        if isinstance(p, torch.Tensor)
    }
