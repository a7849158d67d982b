"""The order in which an Accelerator got its objects: saved with the state, and compared at a load.

    accelerator.register_for_checkpointing(train, valid)      custom, custom_1

If a script hands them over in another order, each would get the values of another.  So a step also has each
object's class and its *marks*: attributes that are the same at each start.  These are strings (`name`,
`split`), members of an enum, and other objects of the trainer, such as a scheduler's optimizer.

A mark proves the order if its values differ between all objects of a class and equal the saved ones.  It
refutes the order if it has the same values in another order.  Counters and rates are no marks, because
training changes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
import xxhash

from holdfast import errors
from holdfast.extend import unwrap

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
        order = arrangement(was, mine)
        if role == "custom":
            moved = {key_of(role, n): state[key_of(role, k)] for n, k in enumerate(order)}
            problems += not_proved(was, [mine[k] for k in order])
        elif order != sorted(order):
            problems.append(
                f"{_shown(role, sorted(order))} come in another order than in the saved step: there they "
                "are " + ", ".join(key_of(role, n) for n in order)
            )
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
        here = order.get(role, [])
        for numbers in _of_one_class(here):
            if not _telling(here, numbers):
                errors.warn_user(
                    f"{_shown(role, numbers)} are {here[numbers[0]]['class']}, and are matched by the "
                    f"order in which they are {how}: a restart with another order would swap their "
                    f"values.  To have another order detected, {WHAT_TO_DO}",
                    notice="same-class",
                )


_MOST_LETTERS = 200
"""Longest string that may be a mark."""
WHAT_TO_DO = "give each a string attribute of its own, such as name='train'"

ObjectMarks = dict[str, Any]
"""Description of an object: `class`, and its `marks` by the attribute's name."""


def marks_of(value: Any, known: Mapping[int, str], **more: str) -> ObjectMarks:
    """Describe an object.  `known`: names of the trainer's objects, by id; `more`: further marks."""
    marks = dict(more)
    attributes = dict(getattr(value, "__dict__", {}))
    attributes.setdefault("name", getattr(value, "name", None))
    for name, one in sorted(attributes.items()):
        if id(one) in known and one is not value:
            marks[name] = f"the {known[id(one)]}"
        elif isinstance(one, Enum):
            marks[name] = str(one)
        elif isinstance(one, str) and len(one) <= _MOST_LETTERS and not name.startswith("_"):
            marks[name] = one
    return {"class": type(value).__qualname__, "marks": marks}


def arrangement(saved: Sequence[ObjectMarks], here: Sequence[ObjectMarks]) -> list[int]:
    """Return for each saved object the number of the same object here, by class and marks; without marks,
    its own number."""
    by_number = list(range(len(here)))
    if sorted(one["class"] for one in saved) != sorted(one["class"] for one in here):
        return by_number
    found = list(by_number)
    for kind in {one["class"] for one in saved}:
        were = [n for n, one in enumerate(saved) if one["class"] == kind]
        are = [n for n, one in enumerate(here) if one["class"] == kind]
        before, now = _telling(saved, were), _telling(here, are)
        same = [name for name in now if name in before and {*before[name]} == {*now[name]}]
        order = (
            [now[same[0]].index(value) for value in before[same[0]]] if same else range(len(are))
        )
        for number, place in zip(were, order):
            found[number] = are[place]
    return found


def not_proved(saved: Sequence[ObjectMarks], here: Sequence[ObjectMarks]) -> list[str]:
    """Return the problems of registered objects, arranged as in the saved step, whose marks do not prove
    that order; a notice of those for which the step has no marks."""
    problems = []
    for numbers in _of_one_class(here):
        if len({saved[n]["class"] for n in numbers}) > 1:
            continue
        before, now = _telling(saved, numbers), _telling(here, numbers)
        if any(before.get(name) == mine for name, mine in now.items()):
            continue
        kind = here[numbers[0]]["class"]
        line = f"{_shown('custom', numbers)} are {kind}, and are matched by number"
        if now and not before:
            errors.warn_user(
                f"{line}: the saved step has nothing to tell them apart, so they are taken in order",
                notice="same-class",
            )
        else:
            line += ": that they come in the saved order cannot be proved"
            problems.append(f"{line} ({WHAT_TO_DO})")
    return problems


def _of_one_class(here: Sequence[ObjectMarks]) -> list[list[int]]:
    found: dict[str, list[int]] = {}
    for number, one in enumerate(here):
        found.setdefault(one["class"], []).append(number)
    return [numbers for numbers in found.values() if len(numbers) > 1]


def _telling(objects: Sequence[ObjectMarks], numbers: Sequence[int]) -> dict[str, list[str]]:
    """Return the marks, by name, whose values differ between all of these objects."""
    first, *others = [objects[n]["marks"] for n in numbers]
    shared = [name for name in first if all(name in marks for marks in others)]
    values = {name: [objects[n]["marks"][name] for n in numbers] for name in shared}
    return {name: found for name, found in values.items() if len({*found}) == len(found)}


def key_of(role: str, number: int) -> str:
    """Return the object's key in the state."""
    return role if number == 0 else f"{role}_{number}"


def _shown(role: str, numbers: Sequence[int]) -> str:
    *some, last = [key_of(role, n) for n in numbers]
    return f"{', '.join(some)} and {last}"
