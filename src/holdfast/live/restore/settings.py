"""Settings of parameter groups after all is loaded: those that were saved, whatever wrote over them.

    optim   gets its groups back                       lr 0.05, weight_decay 0.2
    sched   load_state_dict() writes into the groups   lr 0.05, weight_decay 0.9, which is its constructor's

A scheduler may write while it is loaded, before it has its own fields again, and the next step would be
made with that.  The training that was not interrupted went on with the saved settings.  So the groups are
looked at after each value of the state, whatever the order of its keys, and have the saved settings when
all is loaded.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from holdfast.base.errors import warn_user
from holdfast.base.text import listed
from holdfast.live.restore.nested import objects
from holdfast.live.state.placed import memory_of

ROUNDING = 1e-6
"""Relative difference of a setting that is computed anew, which is put back and no matter to tell."""
Group = dict[str, Any]

_told: set[tuple[str, str]] = set()


class GroupSettings:
    """The settings of optimizers that have theirs back, and what wrote over them since."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._kept: dict[str, list[tuple[Group, dict[str, tuple[Any, Any]]]]] = {}
        """Each group of an optimizer, by its key, with the restored values and copies of them, by name."""
        self._optimizers: dict[str, Any] = {}
        self._written: dict[tuple[str, str], list[str]] = {}

    def keep(
        self, key: str, optimizer: Any, groups: Iterable[Group], names: list[list[str]]
    ) -> None:
        """Note the settings that an optimizer has now, of those `names` that were saved for each group."""
        self._optimizers[key] = optimizer
        self._kept[key] = [
            (group, {n: (group[n], _copied(group[n])) for n in of_group if _is_setting(group, n)})
            for group, of_group in zip(groups, names)
        ]

    def put_back(self, by: str) -> None:
        """Put back what the value of the key `by` has written over."""
        for key, groups in self._kept.items():
            now = self._now(key, groups)
            for number, (group, (_, settings)) in enumerate(zip(now, groups)):
                for name, (value, saved) in settings.items():
                    if name in group and group[name] is value and _is_same(value, saved):
                        continue
                    seen = _copied(group.get(name))
                    group[name] = _restored(value, saved)
                    if not _is_close(seen, saved):
                        text = (
                            f"{name} of group {number} ({_words(seen)}, saved as {_words(saved)})"
                        )
                        self._written.setdefault((by, key), []).append(text)

    def tell(self) -> None:
        """Tell what was put back, once for each pair of an object and an optimizer."""
        for (by, key), texts in self._written.items():
            if (by, key) not in _told:
                warn_user(
                    f"{by} wrote into the groups of {key} while it was loaded: "
                    f"{listed(texts)}; the settings of step {self.step} are put back: "
                    "set others after restore()",
                    notice="settings-put-back",
                )
        _told.update(self._written)

    def _now(self, key: str, groups: list[tuple[Group, Any]]) -> list[Group]:
        """The groups that an optimizer has now: it may have been given others of the same parameters."""
        now = getattr(self._optimizers[key], "param_groups", None)
        if isinstance(now, list) and len(now) == len(groups):
            pairs = zip(now, groups)
            if all(_are_same(one.get("params"), old.get("params")) for one, (old, _) in pairs):
                return now
        return [group for group, _ in groups]


def in_kind_of(live: Any, saved: Any) -> Any:
    """A saved number as a tensor where the live one is a tensor, which a script, torch's compiler or an
    optimizer holds.  A saved tensor stays one: torch computes otherwise with a plain number."""
    is_tensor = isinstance(live, torch.Tensor) and live.numel() == 1
    if is_tensor and type(saved) in (int, float):
        return torch.full_like(live, saved, requires_grad=False)
    if isinstance(saved, torch.Tensor) and saved.numel() == 1:
        if is_tensor and (live.shape, live.dtype) != (saved.shape, saved.dtype):
            return torch.full_like(live, saved.item(), requires_grad=False)
    return saved


def _are_same(params: Any, others: Any) -> bool:
    if not isinstance(params, list) or not isinstance(others, list) or len(params) != len(others):
        return False
    return all(a is b for a, b in zip(params, others))


def _is_setting(group: Group, name: str) -> bool:
    """True for a value of a group that is no object, nor has one inside: these keep what they loaded."""
    return name in group and not any(True for _ in objects(group[name], name))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value if isinstance(value, (int, float, str)) else copy.deepcopy(value)


def _restored(value: Any, saved: Any) -> Any:
    """The object that was there, with the values that it had."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.copy_(saved)
        return value
    return value if _is_same(value, saved) else _copied(saved)


def _is_same(one: Any, other: Any) -> bool:
    """True for equal values of one kind, NaN included."""
    one, other = (memory_of(v) if isinstance(v, torch.Tensor) else v for v in (one, other))
    if isinstance(one, (torch.Tensor, np.ndarray)) or isinstance(other, (torch.Tensor, np.ndarray)):
        if type(one) is not type(other) or one.shape != other.shape:
            return False
        alike = (one == other) | ((one != one) & (other != other))
        return bool(alike.all())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(v, other[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def _is_close(seen: Any, saved: Any) -> bool:
    """True if two settings are the same but for their kind and the rounding of numbers."""
    numbers = [
        one.item() if isinstance(one, torch.Tensor) and one.numel() == 1 else one
        for one in (seen, saved)
    ]
    if all(isinstance(one, (int, float)) for one in numbers):
        return math.isclose(*numbers, rel_tol=ROUNDING) or numbers[0] != numbers[0] != numbers[1]
    if isinstance(seen, (list, tuple)) and isinstance(saved, (list, tuple)):
        return len(seen) == len(saved) and all(map(_is_close, seen, saved))
    return _is_same(seen, saved)


def _words(value: Any) -> str:
    return f"{value!r}" if len(f"{value!r}") < 40 else f"a {type(value).__name__}"
