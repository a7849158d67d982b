"""Objects that a trainer numbers, and the attributes that tell those of one class apart.

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


def not_told_apart(here: Sequence[ObjectMarks]) -> list[list[int]]:
    """Return the numbers of objects, by class, that no mark tells apart."""
    return [numbers for numbers in _of_one_class(here) if not _telling(here, numbers)]


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


def in_another_order(
    role: str, saved: Sequence[ObjectMarks], here: Sequence[ObjectMarks], *, proved: bool
) -> tuple[list[str], list[str]]:
    """Return the problems, and the texts of notices, about the objects of a role.  `proved`: it is a
    problem if marks do not prove the saved order."""
    if len(saved) != len(here):
        return [], []
    order = arrangement(saved, here)
    if order != list(range(len(here))):
        return [
            f"{_shown(role, sorted(order))} come in another order than in the saved step: there they are "
            + ", ".join(key_of(role, n) for n in order)
        ], []
    problems: list[str] = []
    notices: list[str] = []
    for numbers in _of_one_class(here) if proved else ():
        if len({saved[n]["class"] for n in numbers}) > 1:
            continue
        before, now = _telling(saved, numbers), _telling(here, numbers)
        if any(before.get(name) == mine for name, mine in now.items()):
            continue
        line = f"{_shown(role, numbers)} are {here[numbers[0]]['class']}, and are matched by number"
        if now and not before:
            notices.append(
                f"{line}: the saved step has nothing to tell them apart, so they are taken in order"
            )
        else:
            line += ": that they come in the saved order cannot be proved"
            problems.append(f"{line} ({WHAT_TO_DO})")
    return problems, notices


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


def tell_apart(role: str, here: Sequence[ObjectMarks], how: str) -> list[str]:
    """Return the texts of notices about objects of one class that are matched by number alone."""
    return [
        f"{_shown(role, numbers)} are {here[numbers[0]]['class']}, and are matched by the order in which "
        f"they are {how}: a restart with another order would swap their values.  To have another order "
        f"detected, {WHAT_TO_DO}"
        for numbers in not_told_apart(here)
    ]
