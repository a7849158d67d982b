"""Parameters and optimizer states as foreign tensors: `model.<name>`, `optim.<name>.<state>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.errors import FormatError
from holdfast.interop.deepspeed.layouts import ParamLayout
from holdfast.interop.deepspeed.trees import source
from holdfast.interop.deepspeed.zero import MASTER, FlatCut, FlatGroup, Shape
from holdfast.interop.foreign import Foreign, StoredPart
from holdfast.interop.torchfile import TensorRef
from holdfast.layout import Fragment
from holdfast.layout.view import View

Where = list[tuple[int, Fragment]]
"""(data-parallel rank, fragment in its flat array)"""


def plain(name: str, state: str, ref: TensorRef) -> Foreign:
    """A tensor that lies whole in a file, in any order of its dims."""
    return Foreign(name, ref.dtype, ref.shape, state, ref.parts())


def viewed(layout: ParamLayout, refs: Sequence[TensorRef]) -> Foreign:
    """A parameter of which each tensor-parallel rank holds a part, not flattened."""
    name = named(layout.name, MASTER)
    if any(not ref.contiguous or ref.dtype != refs[0].dtype for ref in refs):
        raise FormatError(f"{name!r}: parts that do not fit together", key=refs[0].path)
    sets = [
        tuple(StoredPart(f, (source(ref),), ref.path) for f in view.fragments())
        for ref, view in zip(refs, layout.views())
    ]
    return _joined(name, refs[0].dtype, "param", layout, [sets])


def cut(name: str, shape: Shape, cuts: Sequence[FlatCut], refs: Sequence[TensorRef]) -> Foreign:
    """A parameter that was flattened and cut by itself."""
    sources = [source(ref) for ref in refs]
    view = View.whole(shape)
    parts = tuple(
        StoredPart(fragment, (sources[c.rank],), refs[c.rank].path)
        for c in cuts
        for fragment in view.flat(c.start, c.stop).fragments(c.at)
    )
    return Foreign(name, refs[0].dtype, shape, "param", parts)


def named(name: str, state: str) -> str:
    """Name of the tensor of a parameter's state; the master copy is the parameter itself."""
    return f"model.{name}" if state == MASTER else f"optim.{name}.{state}"


def trained(layout: ParamLayout, columns: Sequence[Sequence[FlatGroup]]) -> list[Foreign]:
    """A parameter and its states.

    A column is the flat groups that hold it on the tensor-parallel ranks of a pipeline stage; of a
    parameter that is tied over stages there are several.
    """
    name, first = layout.name, columns[0][0]
    found: list[Foreign] = []
    seen: tuple[View, ...] = ()
    where: list[list[Where]] = []
    for state, refs in first.states.items():
        kind = "param" if state == MASTER else state
        if (views := layout.views(kind)) != seen:
            seen = views
            where = [[_where(f, name, v) for f, v in zip(column, views)] for column in columns]
        sets = [
            [_parts(flat, name, state, w) for flat, w in zip(column, ws)]
            for column, ws in zip(columns, where)
        ]
        found.append(_joined(named(name, state), refs[0].dtype, kind, layout, sets))
    return found + [
        plain(named(name, state), state, value)
        for state, value in first.scalars.items()
        if isinstance(value, TensorRef)
    ]


def _where(flat: FlatGroup, name: str, view: View) -> Where:
    return [
        (cut.rank, fragment)
        for cut in flat.cuts[name]
        for fragment in view.flat(cut.start, cut.stop).fragments(cut.at)
    ]


def _parts(flat: FlatGroup, name: str, state: str, where: Where) -> tuple[StoredPart, ...]:
    refs = flat.states.get(state)
    if refs is None:
        raise FormatError(
            f"{name!r} has no {state!r} here, other ranks have it", key=flat.states[MASTER][0].path
        )
    sources = flat.sources[state]
    return tuple(
        StoredPart(fragment, (sources[rank],), refs[rank].path) for rank, fragment in where
    )


def _joined(
    name: str, dtype: str, state: str, layout: ParamLayout, sets: list[list[tuple[StoredPart, ...]]]
) -> Foreign:
    """Make one tensor of what the ranks hold: parts of it, copies of each other, or values to average."""
    if layout.replica == "unique":
        whole_sets = [tuple(part for parts in column for part in parts) for column in sets]
    elif layout.replica == "averaged":
        whole_sets = [_averaged(name, column) for column in sets]
    else:
        whole_sets = [parts for column in sets for parts in column]
    kind: Any = "replicated" if len(whole_sets) > 1 else layout.replica
    return Foreign(name, dtype, layout.shape, state, whole_sets[0], kind, tuple(whole_sets[1:]))


def _averaged(name: str, column: Sequence[tuple[StoredPart, ...]]) -> tuple[StoredPart, ...]:
    """Return parts that are the mean of the ranks' parts."""
    first = column[0]
    if any([p.fragment for p in parts] != [p.fragment for p in first] for parts in column):
        raise FormatError(f"{name!r} is to be averaged, but cut differently by each rank")
    return tuple(
        StoredPart(same[0].fragment, tuple(s for p in same for s in p.sources), same[0].path)
        for same in zip(*column)
    )
