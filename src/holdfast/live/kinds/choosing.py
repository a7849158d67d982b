"""The kind of each value of a state, asked once."""

from __future__ import annotations

from typing import Any

from holdfast.live.kinds.engine import EngineOptimizer
from holdfast.live.kinds.kind import Kind
from holdfast.live.kinds.module import ModuleKind
from holdfast.live.kinds.object import ObjectKind
from holdfast.live.kinds.optimizer import OptimizerKind
from holdfast.live.kinds.tensor import TensorKind
from holdfast.live.kinds.values import ValuesKind
from holdfast.live.sources import Sources
from holdfast.live.state.recognising import State

KINDS: tuple[type[Kind], ...] = (
    ModuleKind,
    OptimizerKind,
    EngineOptimizer,
    ObjectKind,
    TensorKind,
    ValuesKind,
)
"""All kinds.  A value is of the first kind that claims it."""


def kinds_of(state: State, given: State, sources: Sources) -> dict[str, Kind]:
    """The kind of each value of a state, by key.  `given`: the values as the script handed them over."""
    return {
        key: _kind_of(value, sources)(key, value, given[key], sources)
        for key, value in state.items()
    }


def _kind_of(value: Any, sources: Sources) -> type[Kind]:
    return next(kind for kind in KINDS if kind.claims(value, sources))
