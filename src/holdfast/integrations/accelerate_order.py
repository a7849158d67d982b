"""The order in which an Accelerator got its objects: saved with the state, and compared at a load."""

from __future__ import annotations

from typing import Any

import torch
import xxhash

from holdfast import errors
from holdfast.extend import unwrap
from holdfast.integrations.numbered import (
    ObjectMarks,
    arrangement,
    in_another_order,
    key_of,
    marks_of,
    tell_apart,
)

_HOW = {
    "custom": "registered",
    "model": "prepared",
    "optimizer": "prepared",
    "scheduler": "prepared",
}
"""Roles whose indistinguishable objects are warned of, and how the script hands them over."""


def had_by(accelerator: Any) -> list[list[Any]]:
    """Return all objects of the Accelerator, by role."""
    known = accelerator._models, accelerator._optimizers, accelerator._schedulers
    return [*known, accelerator._custom_objects, accelerator._dataloaders]


def order_of(accelerator: Any) -> dict[str, list[ObjectMarks]]:
    """Describe the objects of the Accelerator, by role and number."""
    models = [unwrap(m) for m in accelerator._models]
    optimizers = [getattr(o, "optimizer", o) for o in accelerator._optimizers]
    schedulers = [getattr(s, "scheduler", s) for s in accelerator._schedulers]
    known: dict[int, str] = {}
    for role, wrapped, bare in (
        ("model", accelerator._models, models),
        ("optimizer", accelerator._optimizers, optimizers),
        ("scheduler", accelerator._schedulers, schedulers),
    ):
        for values in (wrapped, bare):
            known |= {id(value): key_of(role, n) for n, value in enumerate(values)}
    names = {
        id(p): f"{key_of('model', number)}.{name}"
        for number, model in enumerate(models)
        for name, p in model.named_parameters()
    }
    found = {
        "model": [marks_of(m, known, shapes=_shapes(m)) for m in models],
        "optimizer": [marks_of(o, known, parameters=_parameters(o, names)) for o in optimizers],
        "scheduler": [marks_of(s, known) for s in schedulers],
        "custom": [marks_of(c, known) for c in accelerator._custom_objects],
        "loader": [marks_of(d.dataset, known, length=_length(d)) for d in accelerator._dataloaders],
    }
    return {role: one for role, one in found.items() if len(one) > 1}


def _shapes(model: torch.nn.Module) -> str:
    shapes = repr([(name, tuple(p.shape)) for name, p in model.named_parameters()])
    return f"{xxhash.xxh3_64_intdigest(shapes.encode()):x}"


def _parameters(optimizer: Any, names: dict[int, str]) -> str:
    groups = getattr(optimizer, "param_groups", ())
    found = [names.get(id(p), "") for group in groups for p in group["params"]]
    return f"{len(found)} from {found[0]}" if found and all(found) else ""


def _length(loader: Any) -> str:
    try:
        return f"{len(loader.dataset)} samples"
    except TypeError:
        return ""


def reordered(
    saved: dict[str, list[ObjectMarks]], accelerator: Any, state: dict[str, Any]
) -> dict[str, Any]:
    """Return the state with registered objects under the keys of the save.

    StateMismatch if other objects are in another order, or that of registered objects cannot be proved.
    """
    here = order_of(accelerator)
    moved: dict[str, Any] = {}
    problems: list[str] = []
    for role, mine in here.items():
        was = saved.get(role, ())
        if len(was) != len(mine):
            continue
        if role == "custom":
            order = arrangement(was, mine)
            moved = {key_of(role, n): state[key_of(role, k)] for n, k in enumerate(order)}
            mine = [mine[k] for k in order]
        lines, notices = in_another_order(role, was, mine, proved=role == "custom")
        problems += lines
        for text in notices:
            errors.warn_user(text, notice="same-class")
    if problems:
        raise errors.StateMismatch(
            "the accelerator's objects are not, or not provably, in the order of the saved step:\n  "
            + "\n  ".join(problems),
            tuple(problems),
            hint="prepare and register them in the same order as in the run that saved",
        )
    return {**state, **moved}


def tell_order(order: dict[str, list[ObjectMarks]]) -> None:
    """HoldfastWarning for objects of one class that cannot be told apart."""
    for role, how in _HOW.items():
        for text in tell_apart(role, order.get(role, ()), how):
            errors.warn_user(text, notice="same-class")
