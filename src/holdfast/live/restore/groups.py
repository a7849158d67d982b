"""Parameter groups of a live optimizer and those of a checkpoint: which is which, and what they become."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import msgspec
import torch

from holdfast.base.errors import StateMismatch
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.format import extras
from holdfast.live.restore.nested import with_live
from holdfast.live.restore.settings import in_kind_of
from holdfast.live.sources import ParamGroup
from holdfast.live.state.encoding import outline_tensor

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
"""What schedulers set, group by group."""

NamedGroups = list[list[tuple[str, torch.Tensor]]]
"""Names and parameters of each group."""


def match_groups(key: str, tree: Any, pairs: NamedGroups) -> list[int | None]:
    """For each live group the number of the saved group that its parameters were in.

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
    """The live groups whose saved group had another number, with other rates than those that were saved by
    their own number, which groups of pipeline stages may share."""
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
    """Hyper-parameters as bytes that are the same for equal ones, in whatever order they were given."""
    own = {k: v for k, v in hyper.items() if k not in COMPUTE_OPTIONS}
    return msgspec.json.encode(own, order="deterministic")


def hypers_after(
    key: str, tree: Any, groups: list[ParamGroup], pairs: NamedGroups
) -> list[dict[str, Any]]:
    """Hyper-parameters of each live group, as a restore will leave them."""
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
    """A tensor among hyper-parameters; large ones, which lie elsewhere, are none that matter here."""
    return outline_tensor(body) if tag == "$tensor" else None


def put_groups(
    key: str,
    groups: list[ParamGroup],
    tree: Any,
    pairs: NamedGroups,
    decode: Callable[[Any], Any],
    unfit: Collection[int] = (),
    *,
    as_recorded: bool = False,
) -> list[list[str]]:
    """Set each group's hyper-parameters from the saved group that its parameters were in; return the names
    of those that were set.

    Tensors are filled, also with a plain number: a script or a captured graph may hold them.
    `as_recorded`: settings are of the kind that the recorded step was computed with.  `unfit`: by id,
    parameters whose states were another optimizer's, as then the hyper-parameters of their groups were.
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
    """Write `value` to a tensor that is there; False if that cannot be.  `filled`: values that tensors got
    so far, by id, for groups that share one may have been saved with different values."""
    if not isinstance(live, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    if (live.shape, live.dtype) != (value.shape, value.dtype):
        return False
    if not torch.equal(filled.setdefault(id(live), value), value):
        return False
    with torch.no_grad():
        live.copy_(value)
    return True


def memory_orders(checkpoint: Checkpoint, key: str) -> dict[str, dict[str, list[int]]]:
    """Order of dims in memory where it was not the usual one, by parameter name and state."""
    tree = checkpoint.manifest.extras.get(key)
    if not isinstance(tree, dict) or "$optimizer" not in tree:
        return {}
    orders: dict[str, dict[str, list[int]]] = tree["$optimizer"].get("order", {})
    return orders


def plain_states(checkpoint: Checkpoint, key: str) -> dict[str, dict[str, Any]] | None:
    """States that an optimizer kept beside tensors, by parameter name; None if not known."""
    tree = checkpoint.manifest.extras.get(key)
    if not isinstance(tree, dict) or "$optimizer" not in tree:
        return None
    states: dict[str, dict[str, Any]] | None = tree["$optimizer"].get("state")
    return states


def beside_plain(checkpoint: Checkpoint, key: str) -> dict[str, list[str]] | None:
    """States whose lists had plain tensors beside a DTensor, by parameter name; None if not known."""
    tree = checkpoint.manifest.extras.get(key)
    if not isinstance(tree, dict) or "$optimizer" not in tree:
        return None
    states: dict[str, list[str]] | None = tree["$optimizer"].get("plain")
    return states
