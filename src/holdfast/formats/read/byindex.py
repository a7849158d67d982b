"""Names of parameters for optimizer states that are saved by number.

torch's optimizers number parameters through their groups.  `param_names` states the name of each number
(torch 2.6, given `named_parameters()`).  Else names may follow from the model in the same checkpoint, if
groups have parameters in the order of `parameters()`: if all parameters of a shape are in one group, only
one assignment fits; else none is made.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

_Shape = tuple[int, ...]


def stated_names(groups: Sequence[Mapping[str, Any]]) -> dict[int, str] | None:
    """Return the name of each number as the groups state it; None unless they state all names."""
    found: dict[int, str] = {}
    for group in groups:
        names = group.get("param_names")
        if not isinstance(names, (list, tuple)) or len(names) != len(group["params"]):
            return None
        found.update(zip(group["params"], map(str, names)))
    return found


def hyper_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyper-parameters: all its entries except the parameters and their names."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def is_buffer(name: str, dtype: str, names: Container[str]) -> bool:
    """True if `name`, one of the tensors `names` of a module, is known to be no parameter.

    Integer tensors and batch norm's running statistics are known; other buffers look like parameters.
    """
    module, dot, last = name.rpartition(".")
    statistic = (
        last in ("running_mean", "running_var") and f"{module}{dot}num_batches_tracked" in names
    )
    return statistic or not dtype.startswith(("float", "bfloat"))


def parameter_shapes(model: Sequence[tuple[str, str, _Shape]]) -> list[tuple[str, _Shape]]:
    """Return those of a module's tensors (name, dtype, shape) that can be parameters, in order."""
    names = {name for name, _, _ in model}
    return [(name, shape) for name, dtype, shape in model if not is_buffer(name, dtype, names)]


def proved_names(
    groups: Sequence[Sequence[int]],
    shapes: Mapping[int, _Shape],
    model: Sequence[tuple[str, _Shape]],
) -> dict[int, str] | None:
    """Return the name of each number if only one assignment fits; else None.

    `groups`: numbers of each group; `shapes`: those known, by number; `model`: parameters in order.

    >>> proved_names([[0, 1]], {0: (4, 2), 1: (4,)}, [("w", (4, 2)), ("b", (4,))])
    {1: 'b', 0: 'w'}
    """
    numbers = [i for group in groups for i in group]
    if len(numbers) != len(model) or any(i not in shapes for i in numbers):
        return None
    group_of = {i: g for g, group in enumerate(groups) for i in group}
    found: dict[int, str] = {}
    place: dict[int, int] = {}
    for shape in set(shapes[i] for i in numbers):
        mine = [i for i in numbers if shapes[i] == shape]
        theirs = [at for at, (_, s) in enumerate(model) if s == shape]
        if len(mine) != len(theirs) or len({group_of[i] for i in mine}) != 1:
            return None
        for i, at in zip(mine, theirs):
            found[i], place[i] = model[at][0], at
    in_order = all(place[a] < place[b] for group in groups for a, b in zip(group, list(group)[1:]))
    return found if in_order else None
