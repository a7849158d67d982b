"""Objects that a trainer knows by number, and what tells those of one class apart.

    accelerator.register_for_checkpointing(train, valid)      custom, custom_1

Where a script hands them over in another order, each gets the values of another.  So beside the state is
kept what an object is: its class, and its *marks*, which say the same at each start. These are attributes
that are texts (`name`, `split`) or members of an enum, and those that are another object which the trainer
has: the optimizer of a scheduler, the model of an average.

Marks prove an order if one of them differs between all objects of a class, and is what it was.  They refute
it if it has the same values in another order.  Counts and rates are no marks, for training changes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

_MOST_LETTERS = 200
"""Letters of a text that may be a mark."""
WHAT_TO_DO = "give each an attribute that is a text of its own, such as name='train'"

ObjectMarks = dict[str, Any]
"""Description of an object: `class`, and its `marks` by the attribute's name."""


def marks_of(value: Any, known: Mapping[int, str], **more: str) -> ObjectMarks:
    """Describe an object.  `known`: names of objects that the trainer has, by id; `more`: further marks."""
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
    """Numbers of objects of one class in which no mark differs from each to each."""
    return [numbers for numbers in _of_one_class(here) if not _telling(here, numbers)]


def arrangement(saved: Sequence[ObjectMarks], here: Sequence[ObjectMarks]) -> list[int]:
    """For each saved object the number of the one here that it is, by class and marks; where these do not
    say it, the one with its number."""
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
    """Problems, and what is only to be told, of the objects of a role.  `proved`: they must be shown to be
    in the order in which they were saved."""
    if len(saved) != len(here):
        return [], []
    order = arrangement(saved, here)
    if order != list(range(len(here))):
        return [
            f"{_shown(role, sorted(order))} come in another order than when they were saved: as "
            + ", ".join(key_of(role, n) for n in order)
        ], []
    problems: list[str] = []
    told: list[str] = []
    for numbers in _of_one_class(here) if proved else ():
        if len({saved[n]["class"] for n in numbers}) > 1:
            continue
        before, now = _telling(saved, numbers), _telling(here, numbers)
        if any(before.get(name) == mine for name, mine in now.items()):
            continue
        line = f"{_shown(role, numbers)} are {here[numbers[0]]['class']}, which go by their number"
        if now and not before:
            told.append(
                f"{line}: nothing told them apart when they were saved; they are taken in order"
            )
        else:
            line += ": that they come in the order in which they were saved cannot be proved"
            problems.append(f"{line} ({WHAT_TO_DO})")
    return problems, told


def _of_one_class(here: Sequence[ObjectMarks]) -> list[list[int]]:
    found: dict[str, list[int]] = {}
    for number, one in enumerate(here):
        found.setdefault(one["class"], []).append(number)
    return [numbers for numbers in found.values() if len(numbers) > 1]


def _telling(objects: Sequence[ObjectMarks], numbers: Sequence[int]) -> dict[str, list[str]]:
    """Marks, by name, that differ between all of some objects."""
    first, *others = [objects[n]["marks"] for n in numbers]
    shared = [name for name in first if all(name in marks for marks in others)]
    values = {name: [objects[n]["marks"][name] for n in numbers] for name in shared}
    return {name: found for name, found in values.items() if len({*found}) == len(found)}


def key_of(role: str, number: int) -> str:
    """The key of the state that the object has."""
    return role if number == 0 else f"{role}_{number}"


def _shown(role: str, numbers: Sequence[int]) -> str:
    *some, last = [key_of(role, n) for n in numbers]
    return f"{', '.join(some)} and {last}"


def tell_apart(role: str, here: Sequence[ObjectMarks], how: str) -> list[str]:
    """Texts for a notice: objects of one class that go by number alone."""
    return [
        f"{_shown(role, numbers)} are {here[numbers[0]]['class']} and go by the order in which they are "
        f"{how}: a restart that has them in another order would swap what they hold.  To have that found, "
        f"{WHAT_TO_DO}"
        for numbers in not_told_apart(here)
    ]
