"""Finding the training step among the values of a foreign checkpoint without a step number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from holdfast.base.arguments import MAX_STEP
from holdfast.core.format.dtypes import DTYPES, numpy_dtype
from holdfast.core.store import Store, read_range
from holdfast.formats.read.foreign import Foreign

NAMES = ("global_step", "step", "iteration", "iter")
"""Names of a step among values, in order of precedence."""


def step_among(values: Mapping[str, Any]) -> int:
    """The step among values; 0 if there is none."""
    for name in NAMES:
        value = values.get(name)
        if type(value) is int and 0 <= value <= MAX_STEP:
            return value
    return 0


def stated_step(values: Mapping[str, Any], tensors: Iterable[Foreign], store: Store) -> int:
    """The step among flat values and 0-dim tensors: at the top, else one level down (`progress.step`) if
    all agree there; 0 if there is none."""
    known = dict(values)
    for one in tensors:
        if one.name.rpartition(".")[2] in NAMES and one.name.count(".") < 2 and not one.shape:
            known[one.name] = _number(one, store)
    if step := step_among(known):
        return step
    below: dict[str, dict[str, Any]] = {}
    for flat, value in known.items():
        key, _, name = flat.partition(".")
        below.setdefault(key, {})[name] = value
    steps = {step for inner in below.values() if (step := step_among(inner))}
    return steps.pop() if len(steps) == 1 else 0


def _number(tensor: Foreign, store: Store) -> Any:
    """The element of a 0-dim tensor; None if it cannot be read, or is no whole number."""
    place = tensor.parts[0].sources[0] if tensor.parts else None
    found = None if place is None else place()
    if not isinstance(found, tuple) or "int" not in tensor.dtype:
        return None
    raw = read_range(store, *found, DTYPES[tensor.dtype].bytes)
    return np.frombuffer(raw, numpy_dtype(tensor.dtype))[0].item()
