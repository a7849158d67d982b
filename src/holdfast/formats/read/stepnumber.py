"""The step of a training in the values of a foreign checkpoint that has no number of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from holdfast.base.arguments import MAX_STEP
from holdfast.core.format.dtypes import DTYPES, numpy_dtype
from holdfast.core.store import Store
from holdfast.formats.read.foreign import Foreign

NAMES = ("global_step", "step", "iteration", "iter")
"""Names of a step among values, those before others first."""


def step_among(values: Mapping[str, Any]) -> int:
    """The step that values state; 0 if they state none."""
    for name in NAMES:
        value = values.get(name)
        if type(value) is int and 0 <= value <= MAX_STEP:
            return value
    return 0


def stated_step(values: Mapping[str, Any], tensors: Iterable[Foreign], store: Store) -> int:
    """The step that flat values and tensors without dims state: at the top, or else one level down, as
    `progress.step`, if they do not contradict each other there.  0 if they state none."""
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
    """The element of a tensor without dims; None if it cannot be had here, or is no whole number."""
    place = tensor.parts[0].sources[0] if tensor.parts else None
    found = None if place is None else place()
    if not isinstance(found, tuple) or "int" not in tensor.dtype:
        return None
    path, offset = found
    raw = bytearray(DTYPES[tensor.dtype].bytes)
    store.read(path, offset, memoryview(raw))
    return np.frombuffer(raw, numpy_dtype(tensor.dtype))[0].item()
