"""Parameters and optimizer states as foreign tensors: `model.<name>`, `optim.<name>.<state>`.

A model with tensor parallelism puts `universal_checkpoint_info` into its checkpoints: regular expressions
over names, which state how the slices of tensor-parallel ranks make a parameter.
`holdfast.formats.rules.deepspeed` interprets them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.base.errors import FormatError, LayoutError, RuleError
from holdfast.core.format.manifest import ReplicaRule
from holdfast.core.layout import Fragment
from holdfast.core.layout.view import View
from holdfast.formats.read.deepspeed.zero import ZERO_MASTER, FlatCut, FlatGroup, Shape
from holdfast.formats.read.foreign import Foreign, StoredPart
from holdfast.formats.read.torchfile import TensorRef

if TYPE_CHECKING:
    from holdfast.formats.rules.deepspeed import Slices

INFO = "universal_checkpoint_info"
_VOCABULARY = "vocabulary_parameter_patterns"


@dataclass(frozen=True)
class ParamLayout:
    """A parameter's shape, and the view of each tensor-parallel rank."""

    name: str
    shape: Shape
    replica: ReplicaRule = "unique"
    slices: Slices | None = None
    """Cut of the parameter over the tensor-parallel ranks; None if it is whole."""
    path: str = ""

    def views(self, state: str = "param") -> tuple[View, ...]:
        """Return each rank's view, by rank.  `state` matters for scaled values."""
        if self.slices is None:
            return (View.whole(self.shape),)
        with _said_in(self.path):
            return tuple(self.slices.view(self.name, r, state=state) for r in range(self.slices.tp))


class Layouts:
    """Layouts of all parameters; `shapes` are those that the tensor-parallel ranks hold, by name.

    `info`: from the file `path`.  FormatError, with that path, if it does not fit the shapes.
    """

    def __init__(
        self, info: Mapping[str, Any] | None, path: str, shapes: Mapping[str, Sequence[Shape]]
    ) -> None:
        self._shapes = shapes
        self._path = path
        self._slices: Slices | None = None
        several = next((name for name, some in shapes.items() if len(some) > 1), None)
        if several is not None and info is None:
            raise FormatError(
                f"{several!r} is cut over {len(shapes[several])} tensor-parallel ranks, and nothing "
                "says how",
                key=path,
                hint=f"the model must put its {INFO!r} into client_state",
            )
        if info is not None and (several is not None or info.get(_VOCABULARY)):
            from holdfast.formats.rules.deepspeed import Slices  # most checkpoints do not need it

            with _said_in(path):
                self._slices = Slices(info, shapes)

    def of(self, name: str) -> ParamLayout:
        """Return the layout of one parameter."""
        if self._slices is None:
            return ParamLayout(name, self._shapes[name][0])
        with _said_in(self._path):
            shape, replica = self._slices.shape(name), self._slices.replica(name)
        unique = self._slices.tp == 1
        return ParamLayout(name, shape, "unique" if unique else replica, self._slices, self._path)


@contextmanager
def _said_in(path: str) -> Iterator[None]:
    try:
        yield
    except (RuleError, LayoutError) as error:
        raise FormatError(error.message, key=path, hint=error.hint) from None


_Where = list[tuple[int, Fragment]]
"""(data-parallel rank, fragment in its flat array)"""


def viewed(layout: ParamLayout, refs: Sequence[TensorRef]) -> Foreign:
    """A parameter whose parts on tensor-parallel ranks are not flattened."""
    name = tensor_name(layout.name, ZERO_MASTER)
    if any(not ref.contiguous or ref.dtype != refs[0].dtype for ref in refs):
        raise FormatError(f"{name!r}: parts that do not fit together", key=refs[0].path)
    sets = [
        tuple(StoredPart(f, (ref.source,), ref.path) for f in view.fragments())
        for ref, view in zip(refs, layout.views())
    ]
    return _joined(name, refs[0].dtype, "param", layout, [sets])


def flat_tensor(
    name: str, shape: Shape, cuts: Sequence[FlatCut], refs: Sequence[TensorRef]
) -> Foreign:
    """A parameter that was flattened and cut by itself."""
    sources = [ref.source for ref in refs]
    view = View.whole(shape)
    parts = tuple(
        StoredPart(fragment, (sources[c.rank],), refs[c.rank].path)
        for c in cuts
        for fragment in view.flat(c.start, c.stop).fragments(c.at)
    )
    return Foreign(name, refs[0].dtype, shape, "param", parts)


def tensor_name(name: str, state: str) -> str:
    """Name of the tensor of a parameter's state; the master copy is the parameter itself."""
    return f"model.{name}" if state == ZERO_MASTER else f"optim.{name}.{state}"


def trained(layout: ParamLayout, columns: Sequence[Sequence[FlatGroup]]) -> list[Foreign]:
    """A parameter and its states.

    A column has the flat groups that hold it on the tensor-parallel ranks of a pipeline stage; a parameter
    that is tied over stages has several columns.
    """
    name, first = layout.name, columns[0][0]
    found: list[Foreign] = []
    seen: tuple[View, ...] = ()
    where: list[list[_Where]] = []
    for state, refs in first.states.items():
        kind = "param" if state == ZERO_MASTER else state
        if (views := layout.views(kind)) != seen:
            seen = views
            where = [[_where(f, name, v) for f, v in zip(column, views)] for column in columns]
        sets = [
            [_parts(flat, name, state, w) for flat, w in zip(column, ws)]
            for column, ws in zip(columns, where)
        ]
        found.append(_joined(tensor_name(name, state), refs[0].dtype, kind, layout, sets))
    return found + [
        value.foreign(tensor_name(name, state), state)
        for state, value in first.scalars.items()
        if isinstance(value, TensorRef)
    ]


def _where(flat: FlatGroup, name: str, view: View) -> _Where:
    return [
        (cut.rank, fragment)
        for cut in flat.cuts[name]
        for fragment in view.flat(cut.start, cut.stop).fragments(cut.at)
    ]


def _parts(flat: FlatGroup, name: str, state: str, where: _Where) -> tuple[StoredPart, ...]:
    refs = flat.states.get(state)
    if refs is None:
        raise FormatError(
            f"{name!r} has no {state!r} here, other ranks have it",
            key=flat.states[ZERO_MASTER][0].path,
        )
    sources = flat.sources[state]
    return tuple(
        StoredPart(fragment, (sources[rank],), refs[rank].path) for rank, fragment in where
    )


def _joined(
    name: str, dtype: str, state: str, layout: ParamLayout, sets: list[list[tuple[StoredPart, ...]]]
) -> Foreign:
    """Make one tensor of the ranks' parts, copies, or values to average."""
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
