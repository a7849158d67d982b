"""Numbers that a training counts in attributes, and that no `state_dict()` has.

    class Average(nn.Module):
        def forward(self, ...):
            self.num_updates += 1        # a restart begins at 0 again

A number in an attribute is no fault in itself: sizes and rates are the same in each run, and a temperature
may be computed from the step.  A whole number that counts up is told of, once.  Attributes of modules,
optimizers and objects are watched, but not those of torch's classes, not names that begin with `_`, and not
numbers that the object's own state has, under the same name or with the same value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.live.sources import is_owned
from holdfast.live.state.customised import named_entries
from holdfast.live.state.generators import OwnGenerators
from holdfast.live.state.ignoring import Ignored
from holdfast.live.state.optimizer_wrappers import is_zero1
from holdfast.live.state.recognising import State, is_loader, is_plain, saves_itself, stages
from holdfast.live.state.several import combined_parts, inner_optimizers
from holdfast.live.state.unsaved_tensors import (
    SAVED_ATTRIBUTES,
    address_of,
    optimizer_addresses,
    saved_names,
    tensors_held,
)
from holdfast.live.state.writes import Mark

MAX_NUMBERS = 1024
"""Most numbers that are watched."""
COUNTED_AFTER = 3
"""Changes upwards after which a number counts as a counter: sizes of batches go up and down."""
_OTHERS = ("torch", "builtins")
_REPORTED = ("loss", "time", "elapsed", "accuracy")
"""Words in the names of numbers that are only reported."""
_DOWN = -1


class AttributeNumbers:
    """Watches the numbers in attributes of a state's values."""

    def __init__(self, state: State) -> None:
        owners = list(_owners(state))
        self.generators = OwnGenerators(owners)
        self._kept = [
            (where, owner, name)
            for where, owner in owners
            for name, value in list(owner.__dict__.items())
            if _is_number(name, value)
        ][:MAX_NUMBERS]
        self._values = self._now()
        self._moved = [0] * len(self._kept)
        """Number of changes of each number, all upwards; _DOWN after any other change."""
        self._saved: dict[tuple[int, str], bool] = {}
        """By owner and name, True if the number is saved: cached, since it takes a state_dict()."""
        self._parts = [(key, one) for key, value in state.items() for one in _optimizers(value)]
        self._marks: dict[tuple[int, str], Mark] = {}
        """Tensors in attributes of optimizers as they were at the last save, by number and path."""
        self._tensors_now()

    def _now(self) -> list[Any]:
        return [owner.__dict__.get(name) for _, owner, name in self._kept]

    def observe(self) -> None:
        """Compare the numbers with the last call."""
        now = self._now()
        if now == self._values:
            return
        for n, (value, before) in enumerate(zip(now, self._values)):
            if value != before and self._moved[n] != _DOWN:
                is_up = type(value) is int and type(before) is int and value > before
                self._moved[n] = self._moved[n] + 1 if is_up else _DOWN
        self._values = now

    def counted(self, state: State) -> list[str]:
        """Names of counters that nothing saves."""
        return [
            f"{where}.{name}"
            for (where, owner, name), value, moved in zip(self._kept, self._values, self._moved)
            if moved >= COUNTED_AFTER and not self._is_saved(owner, name, value, state)
        ]

    def _is_saved(self, owner: Any, name: str, value: Any, state: State) -> bool:
        """True if a number is saved.  Asked once for all numbers of an owner."""
        if (id(owner), name) not in self._saved:
            ours = [(n, v) for (_, one, n), v in zip(self._kept, self._values) if one is owner]
            names = _saved_of(owner, ours)
            self._saved |= {(id(owner), n): n in names or _is_plain(n, v, state) for n, v in ours}
        return self._saved[id(owner), name]

    def changed_tensors(self) -> list[tuple[str, bool]]:
        """(name, is a single number) of tensors in attributes of optimizers that were written or replaced
        since the last save and that nothing saves."""
        before, found = self._marks, []
        for at, name, path, now in self._tensors_now():
            mark = before.get((at, path))
            if mark is None or not Mark.of(now).differs(mark):
                continue
            key, part = self._parts[at]
            if address_of(now) not in optimizer_addresses(part) and not Ignored([("", part)]).has(
                name
            ):
                found.append((f"{key}.{path}", now.numel() == 1))
        return found

    def _tensors_now(self) -> list[tuple[int, str, str, torch.Tensor]]:
        """Return (number of the optimizer, attribute, path, tensor) of each, and mark them."""
        now = [
            (at, name, path, tensor)
            for at, (_, part) in enumerate(self._parts)
            for name, one in list(vars(part).items())
            if name not in SAVED_ATTRIBUTES
            for path, tensor in tensors_held(one, name)
        ][:MAX_NUMBERS]
        self._marks = {(at, path): Mark.of(tensor) for at, _, path, tensor in now}
        return now


def _is_number(name: str, value: Any) -> bool:
    return (
        type(value) is int
        and not name.startswith("_")
        and not any(word in name for word in _REPORTED)
    )


def _optimizers(value: Any) -> list[Optimizer]:
    return list(combined_parts(value).values()) if isinstance(value, Optimizer) else []


def _owners(state: State) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) for modules, optimizers and objects that may count in attributes."""
    for key, value in state.items():
        for module in stages(value) or ():
            for name, part in module.named_modules():
                if not _is_of_others(part):
                    yield (f"{key}.{name}" if name else key), part
        parts = _optimizers(value)
        if not parts and saves_itself(value) and not is_loader(value):
            parts = [value]
        for one in parts:
            if not _is_of_others(one) and isinstance(getattr(one, "__dict__", None), dict):
                yield key, one


def _is_of_others(one: Any) -> bool:
    """True for an object of torch, or of a framework, whose source saves its counters."""
    return type(one).__module__.partition(".")[0] in _OTHERS or is_owned(one)


def _is_plain(name: str, value: Any, state: State) -> bool:
    """True if a plain value of the state with a similar name has the same value."""
    plain = {k: v for k, v in state.items() if is_plain(v)}
    return any(
        found == value and key and (key in name or name in key) for key, found in saved_names(plain)
    )


def _saved_of(owner: Any, numbers: list[tuple[str, Any]]) -> set[str]:
    """Names of the numbers that the owner's state has, under any name."""
    if isinstance(owner, nn.Module):
        if type(owner).get_extra_state is not nn.Module.get_extra_state:
            return {name for name, _ in numbers}
        own = {k: v for k, v in named_entries(owner).items() if "." not in k}
        saved = list(saved_names(own))
        return {n for n, v in numbers if any(n in found or one == v for found, one in saved)}
    if isinstance(owner, Optimizer):
        ignored = Ignored([("", owner)])
        groups = [{k: v for k, v in g.items() if k != "params"} for g in owner.param_groups]
        states = [v for v in owner.state.values() if isinstance(v, dict)][:1]
        values = [one for _, one in saved_names([groups, states])]
        return {n for n, v in numbers if ignored.has(n) or v in values}
    saved = list(saved_names(owner.state_dict()))
    return {n for n, v in numbers if any(found == n or one == v for found, one in saved)}


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
