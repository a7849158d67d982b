"""Several optimizers handed over as one.

    {"model": model, "optim": [muon, adamw]}               a list, tuple or dict of optimizers
    {"model": model, "optim": OptimizersContainer(...)}    an optimizer whose steps others make (torchtitan)

Such a container has no states of its own; each part has those of its parameters.  So a `CombinedOptimizer`
stands for the parts: its groups are their groups, one after the other, and the states of a parameter are
those of the part that has the parameter.  A checkpoint says nothing of the division: names are those of
parameters, and it loads into one optimizer, or into other parts, just as well.

That holds only where the parts have each parameter of the container once, and the container has no states
or settings of its own.  Otherwise states would be lost silently, so such a container is refused by name.
SAM has its first states after its first step: every save and every load asks anew.

The user's state is left as it is: `normalised` returns another dict, in which such a value is a
`CombinedOptimizer`, or the only part itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.base.errors import UsageError, need
from holdfast.base.text import listed
from holdfast.live.state.optimizer_wrappers import is_zero1, params_of, stepping

State = dict[str, Any]
MAX_NESTING = 100
"""Deepest nesting of lists that is searched for optimizers."""
MAX_NAMED = 4
"""Names in a message, at most."""


class CombinedOptimizer(Optimizer):
    """Optimizers as one, for a moment: groups and states are those of the parts.

    Torch knows nothing of it: it makes no steps and has no hooks; its parts do.
    """

    def __init__(self, parts: Mapping[str, Optimizer]) -> None:
        self.parts = dict(parts)
        """The optimizers by label, the text behind the key: `[0]`, `.optimizers[1]`."""
        self._part_of = {id(p): part for part in self.parts.values() for p in params_of(part)}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts.values() for group in part.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        return {k: v for part in self.parts.values() for k, v in stepping(part).state.items()}

    def part_of(self, p: torch.Tensor) -> Optimizer:
        """The part that has a parameter."""
        return self._part_of[id(p)]


def holder(optimizer: Optimizer, p: torch.Tensor) -> Optimizer | None:
    """The optimizer that has the state of `p`; None if another rank has it."""
    if isinstance(optimizer, CombinedOptimizer):
        return holder(optimizer.part_of(p), p)
    if is_zero1(optimizer) and optimizer._param_to_rank.get(p) != optimizer.rank:
        return None
    return stepping(optimizer)


def combined_parts(optimizer: Any) -> dict[str, Optimizer]:
    """The parts of a combined optimizer by label; else the optimizer itself."""
    return optimizer.parts if isinstance(optimizer, CombinedOptimizer) else {"": optimizer}


def expand_optimizers(state: State) -> State:
    """A `normalised` state with each part of a combined optimizer under a key of its own."""
    if not any(isinstance(value, CombinedOptimizer) for value in state.values()):
        return state
    found: State = {}
    for key, value in state.items():
        some = value.parts if isinstance(value, CombinedOptimizer) else {"": value}
        found |= {f"{key}{label}": part for label, part in some.items()}
    return found


def normalised(state: State) -> State:
    """The state with each container of optimizers as one optimizer; the dict itself if there is none.

    UsageError for a container whose parts would lose some of its states, settings or parameters.
    """
    seen = {key: _seen(key, value, state) for key, value in state.items()}
    if all(value is state[key] for key, value in seen.items()):
        return state
    _check_once(seen)
    return seen


def _seen(key: str, value: Any, state: State) -> Any:
    if isinstance(value, Optimizer):
        return _together(key, _inside(key, "", value, state))
    if not _leads_with_optimizer(value):
        return value
    parts: dict[str, Optimizer] = {}
    for label, one in _leaves(value):
        if not isinstance(one, Optimizer):
            raise UsageError(
                f"{key}{label}: a {type(one).__name__} among optimizers",
                hint="a list or dict of optimizers holds nothing else: hand the rest over by itself",
            )
        parts |= _inside(key, label, one, state)
    return _together(key, parts)


def _leads_with_optimizer(value: Any) -> bool:
    """True if the first item of a list or dict, at any depth, is an optimizer.  An optimizer behind other
    items is refused as any object that cannot be saved."""
    for _ in range(MAX_NESTING):  # a list may hold itself
        if not isinstance(value, (list, tuple, dict)) or not value:
            break
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return isinstance(value, Optimizer)


def _leaves(value: Any, label: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (label, value) of the leaves of nested lists and dicts."""
    if isinstance(value, dict):
        for number, (name, one) in enumerate(value.items()):
            yield from _leaves(
                one, f"{label}[{name!r}]" if isinstance(name, str) else f"{label}[{number}]"
            )
    elif isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            yield from _leaves(one, f"{label}[{number}]")
    else:
        yield label, value


def _together(key: str, parts: dict[str, Optimizer]) -> Optimizer:
    """One optimizer of several; UsageError if two have the same parameter, whose states have one name."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    owner: dict[int, str] = {}
    for label, part in parts.items():
        for p in params_of(part):
            other = owner.setdefault(id(p), label)
            if other != label:
                raise UsageError(
                    f"{key}{other} and {key}{label} have the same parameter of shape {tuple(p.shape)}",
                    hint="hand each optimizer over under a key of its own: "
                    + one_by_one(key, {label: parts[label] for label in (other, label)}),
                )
    return CombinedOptimizer(parts)


def _check_once(seen: State) -> None:
    """UsageError for a part that the state has twice."""
    owner: dict[int, str] = {}
    for key, value in seen.items():
        for label, one in combined_parts(value).items() if isinstance(value, Optimizer) else ():
            other = owner.setdefault(id(one), key + label)
            if other != key + label:
                raise UsageError(
                    f"{other} and {key}{label} are the same {type(one).__name__}",
                    hint="hand each optimizer over once",
                )


# -- optimizers around optimizers -----------------------------------------------------------------


def _inside(key: str, label: str, optimizer: Any, state: State) -> dict[str, Optimizer]:
    """The optimizers that have the states of one: itself, or all that it was made around.

    UsageError for one around others where neither is right and the state does not have the others, too.
    """
    if is_zero1(optimizer):
        overlaps, _ = need("torch", optimizer, "_overlap_with_ddp", "_param_to_rank")
        if overlaps:
            raise UsageError(
                f"{key + label!r}: ZeroRedundancyOptimizer(overlap_with_ddp=True) is not supported",
                hint="build it with overlap_with_ddp=False",
            )
        return {label: optimizer}
    inner = inner_optimizers(optimizer)
    shown = [name for name, one in inner.items() if one.state is optimizer.state]
    if shown:  # around it there may be nothing, and inside it others
        deeper = _inside(key, label + shown[0], inner[shown[0]], state)
        return {label: optimizer} if list(deeper.values()) == [inner[shown[0]]] else deeper
    lost = {n: one for n, one in inner.items() if not any(v is one for v in state.values())}
    if not lost:
        return {label: optimizer}
    why = _why_not(optimizer, inner) if len(lost) == len(inner) else "others of it are in the state"
    if why:
        raise _refused(key + label, optimizer, lost, why)
    parts: dict[str, Optimizer] = {}
    for name, one in inner.items():
        parts |= _inside(key, label + name, one, state)
    return parts


def inner_optimizers(optimizer: Any) -> dict[str, Any]:
    """Other optimizers in the attributes of an optimizer, also in lists and dicts, by label."""
    found: dict[str, Any] = {}
    met = {id(optimizer)}
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups", "defaults"):
            continue
        for label, one in optimizers_within(value, f".{name}"):
            if id(one) not in met:
                met.add(id(one))
                found[label] = one
    return found


def optimizers_within(value: Any, label: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (label, optimizer) for an optimizer, or for those in a list or dict that begins with one."""
    if isinstance(value, Optimizer) or _leads_with_optimizer(value):
        yield from (pair for pair in _leaves(value, label) if isinstance(pair[1], Optimizer))


def _why_not(optimizer: Any, inner: dict[str, Any]) -> str:
    """Why the optimizers inside one are not all of it; empty if they are."""
    states = optimizer.state.values()
    if any(v if isinstance(v, dict) else True for v in states):
        return "it has states of its own, too"
    groups = [group for one in inner.values() for group in one.param_groups]
    mine = set(map(id, params_of(optimizer)))
    theirs = [id(p) for one in inner.values() for p in params_of(one)]
    if mine != set(theirs):
        return "its groups have other parameters than theirs"
    if len(theirs) > len(mine):
        return "some of them have the same parameter"
    for group in optimizer.param_groups:
        own = sorted(set(group) - {"params", "param_names"})
        if own and not any(group is one for one in groups):
            return f"its groups have {own[0]!r} of their own"
    return ""


def _refused(where: str, optimizer: Any, lost: dict[str, Any], why: str) -> UsageError:
    named = listed((f"a {type(one).__name__} ({name})" for name, one in lost.items()), MAX_NAMED)
    return UsageError(
        f"{where!r}: a {type(optimizer).__name__} around {named}, whose state would be "
        f"lost; for one optimizer they cannot be taken: {why}",
        hint=f"hand them over, too: {one_by_one(where, lost, optimizer)}",
    )


def one_by_one(where: str, parts: Mapping[str, Any], outer: Any = None) -> str:
    """Text for hints: the dict that hands optimizers over one by one."""
    plain = where.partition("[")[0].partition(".")[0]
    shown = "optimizer" if outer is not None else where
    rows = [f"{plain!r}: optimizer"] if outer is not None else []
    rows += [
        f"'{plain}_{'inner' if len(parts) == 1 else number}': {shown}{label}"
        for number, label in enumerate(list(parts)[:MAX_NAMED])
    ]
    return "{" + ", ".join(rows) + (", ..." if len(parts) > MAX_NAMED else "") + "}"


# -- optimizers that are followed one by one ----------------------------------------------------


def check_apart(state: State, what: str) -> None:
    """UsageError if the state has a container of optimizers: `what` has to follow each alone."""
    seen = normalised(state)
    for key, value in state.items():
        if seen[key] is value:
            continue
        parts = combined_parts(seen[key])
        if len(parts) == 1:
            raise UsageError(
                f"{what} cannot see the steps of {key!r}, a {type(value).__name__}: an optimizer inside it "
                "makes them",
                hint=f"hand that over in its place: {one_by_one(key, parts)}",
            )
        raise UsageError(
            f"{what} follows each optimizer by itself, and {key!r} is {len(parts)} of them in a "
            f"{type(value).__name__}",
            hint=f"hand the optimizers over one by one: {one_by_one(key, parts)}",
        )
