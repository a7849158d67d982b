"""Parameter groups: which saved group a live group was, and the settings that it gets.

    optim   gets its groups back                       lr 0.05, weight_decay 0.2
    sched   load_state_dict() writes into the groups   lr 0.05, weight_decay 0.9, which is its constructor's

A scheduler may write into the groups while it is loaded, before it has its own fields again.  The next step
would use those settings, but the training that was not interrupted went on with the saved ones.  So
`GroupSettings` looks at the groups after each value of the state, whatever the order of its keys, and puts
the saved settings back.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from holdfast.base.errors import StateMismatch, warn_user
from holdfast.base.text import listed
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.format import extras
from holdfast.live.restore.nested import objects, with_live
from holdfast.live.sources import Group
from holdfast.live.state.encoding import outline_tensor
from holdfast.live.state.optimizers import NamedGroups
from holdfast.live.state.placed import memory_of

COMPUTE_OPTIONS = ("foreach", "fused", "capturable", "differentiable")
"""Options of how an optimizer computes, a process's own: other hardware or layouts need others."""

RATES = (
    "lr",
    "initial_lr",
    "max_lr",
    "min_lr",
    "momentum",
    "base_momentum",
    "max_momentum",
    "betas",
)
"""Hyper-parameters that schedulers set, group by group."""


def match_groups(key: str, tree: Any, pairs: NamedGroups) -> list[int | None]:
    """The number of the saved group that the parameters of each live group were in.

    StateMismatch if they were in several with different hyper-parameters.
    """
    if not isinstance(tree, dict) or "$optimizer" not in tree:
        raise StateMismatch(f"{key!r} is no optimizer in the checkpoint")
    groups = tree["$optimizer"]["groups"]
    group_of = {p: i for i, g in enumerate(groups) for p in g["params"]}
    origin: list[int | None] = []
    for number, params in enumerate(pairs):
        found = sorted({group_of[name] for name, _ in params if name in group_of})
        hypers = {_told_apart(groups[i]["hyper"]): i for i in found}
        if len(hypers) > 1:
            some = [groups[i]["hyper"] for i in hypers.values()]
            unlike = sorted(
                {k for h in some for other in some for k in h if h[k] != other.get(k, h)}
            )
            raise StateMismatch(
                f"parameters of group {number} of {key!r} were in groups {found} "
                f"with different hyper-parameters ({', '.join(unlike)})",
                hint="build the optimizer with the parameter groups that it was saved with",
            )
        empty = number if not params and number < len(groups) else None
        origin.append(next(iter(hypers.values()), empty))
    return origin


def moved_groups(key: str, tree: Any, pairs: NamedGroups) -> list[int]:
    """The live groups whose saved group had another number, and other rates than every saved group of their
    own number (groups of pipeline stages may share a number)."""
    groups = tree["$optimizer"]["groups"]
    numbers = [group.get("number", at) for at, group in enumerate(groups)]
    rates = [{name: group["hyper"].get(name) for name in RATES} for group in groups]
    return [
        number
        for number, source in enumerate(match_groups(key, tree, pairs))
        if source is not None
        and numbers[source] != number
        and rates[source] not in [one for n, one in zip(numbers, rates) if n == number]
    ]


def goes_by_number(value: Any, optimizer: Any) -> bool:
    """True if an object, as schedulers do, keeps a list with an item for each group of an optimizer."""
    known = getattr(value, "__dict__", {})
    groups = getattr(optimizer, "param_groups", ())
    return known.get("optimizer") is optimizer and any(
        isinstance(one, list) and len(one) == len(groups) for one in known.values()
    )


def _told_apart(hyper: dict[str, Any]) -> bytes:
    """Hyper-parameters as bytes, equal for equal hyper-parameters in any order."""
    own = {k: v for k, v in hyper.items() if k not in COMPUTE_OPTIONS}
    return msgspec.json.encode(own, order="deterministic")


def hypers_after(
    key: str, tree: Any, groups: list[Group], pairs: NamedGroups
) -> list[dict[str, Any]]:
    """Hyper-parameters of each live group after the restore."""
    found = []
    for (group, _), source in zip(groups, match_groups(key, tree, pairs)):
        hyper = without_params(group)
        if source is not None:
            saved = extras.decode(tree["$optimizer"]["groups"][source]["hyper"], _tensor)
            hyper |= {k: v for k, v in saved.items() if k not in COMPUTE_OPTIONS or k not in group}
        found.append(hyper)
    return found


def without_params(group: dict[str, Any]) -> dict[str, Any]:
    """A group's hyper-parameters."""
    return {k: v for k, v in group.items() if k != "params"}


def _tensor(tag: str, body: Any) -> Any:
    """A tensor among hyper-parameters.  Large tensors lie elsewhere and do not matter here."""
    return outline_tensor(body) if tag == "$tensor" else None


def put_groups(
    key: str,
    groups: list[Group],
    tree: Any,
    pairs: NamedGroups,
    decode: Callable[[Any], Any],
    unfit: Collection[int] = (),
    *,
    as_recorded: bool = False,
) -> list[list[str]]:
    """Set each group's hyper-parameters from the saved group of its parameters; return the names that were
    set.

    Tensors are filled, also with a plain number: a script or a captured graph may hold them.
    `as_recorded`: keep the types with which the recorded step was computed.  `unfit`: ids of parameters
    whose saved states are another optimizer's; their groups stay as they are.
    """
    saved = tree["$optimizer"]["groups"]
    filled: dict[int, torch.Tensor] = {}
    names: list[list[str]] = []
    for (group, params), source in zip(groups, match_groups(key, tree, pairs)):
        names.append([])
        if source is not None and not any(id(p) in unfit for p in params):
            hyper = decode(with_live(key, partial(dict, group), saved[source]["hyper"], decode))
            for name in (n for n in hyper if n not in COMPUTE_OPTIONS or n not in group):
                names[-1].append(name)
                live, value = group.get(name), hyper[name]
                value = value if as_recorded else in_kind_of(live, value)
                if not fill_in_place(live, value, filled):
                    group[name] = value
    return names


def fill_in_place(live: Any, value: Any, filled: dict[int, torch.Tensor]) -> bool:
    """Write `value` to a live tensor; False if that cannot be.  `filled`: the values that tensors got so
    far, by id, since groups that share a tensor may have been saved with different values."""
    if not isinstance(live, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    if (live.shape, live.dtype) != (value.shape, value.dtype):
        return False
    if not torch.equal(filled.setdefault(id(live), value), value):
        return False
    with torch.no_grad():
        live.copy_(value)
    return True


def optimizer_body(checkpoint: Checkpoint, key: str) -> dict[str, Any]:
    """The saved groups and plain states of an optimizer; empty if the checkpoint has none under the key."""
    tree = checkpoint.manifest.extras.get(key)
    body = tree.get("$optimizer") if isinstance(tree, dict) else None
    return body if isinstance(body, dict) else {}


def plain_states(checkpoint: Checkpoint, key: str) -> dict[str, dict[str, Any]] | None:
    """Saved states that are no tensors, by parameter name; None if not known."""
    return optimizer_body(checkpoint, key).get("state")


# -- settings, after all is loaded --------------------------------------------------------------


ROUNDING = 1e-6
"""Relative difference of a setting that was computed anew: it is put back without a warning."""
GroupDict = dict[str, Any]

_told: set[tuple[str, str]] = set()


class GroupSettings:
    """The restored settings of optimizers, and the objects that wrote over them since."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._kept: dict[str, list[tuple[GroupDict, dict[str, tuple[Any, Any]]]]] = {}
        """Each group of an optimizer, by its key, with the restored values and copies of them, by name."""
        self._optimizers: dict[str, Any] = {}
        self._written: dict[tuple[str, str], list[str]] = {}

    def keep(
        self, key: str, optimizer: Any, groups: Iterable[GroupDict], names: list[list[str]]
    ) -> None:
        """Note an optimizer's settings now.  `names`: the saved settings of each group."""
        self._optimizers[key] = optimizer
        self._kept[key] = [
            (group, {n: (group[n], _copied(group[n])) for n in of_group if _is_setting(group, n)})
            for group, of_group in zip(groups, names)
        ]

    def put_back(self, by: str) -> None:
        """Put back the settings that the value of the key `by` has written over."""
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
        """Warn of the settings that were put back, once per pair of object and optimizer."""
        for (by, key), texts in self._written.items():
            if (by, key) not in _told:
                warn_user(
                    f"{by} wrote into the groups of {key} while it was loaded: "
                    f"{listed(texts)}; the settings of step {self.step} are put "
                    "back: set others after restore()",
                    notice="settings-put-back",
                )
        _told.update(self._written)

    def _now(self, key: str, groups: list[tuple[GroupDict, Any]]) -> list[GroupDict]:
        """The groups that an optimizer has now: loading may have exchanged the dicts."""
        now = getattr(self._optimizers[key], "param_groups", None)
        if isinstance(now, list) and len(now) == len(groups):
            pairs = zip(now, groups)
            if all(_are_same(one.get("params"), old.get("params")) for one, (old, _) in pairs):
                return now
        return [group for group, _ in groups]


def in_kind_of(live: Any, saved: Any) -> Any:
    """A saved number as a tensor where the live value is a tensor, which a script, torch's compiler or an
    optimizer holds.  A saved tensor stays a tensor: torch computes otherwise with a plain number."""
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


def _is_setting(group: GroupDict, name: str) -> bool:
    """True for a value of a group without objects inside: objects keep the state that they loaded."""
    return name in group and not any(True for _ in objects(group[name], name))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value if isinstance(value, (int, float, str)) else copy.deepcopy(value)


def _restored(value: Any, saved: Any) -> Any:
    """The former object of a setting, with its restored value."""
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
    """True if two settings are equal but for their type and the rounding of numbers."""
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
