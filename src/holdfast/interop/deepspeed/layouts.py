"""Tells how the parts of tensor-parallel ranks make a parameter.

A model that is to be converted puts `universal_checkpoint_info` into its checkpoints: regular expressions
over names.  `holdfast.rules.deepspeed` knows what they say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.errors import FormatError, LayoutError, RuleError
from holdfast.format.manifest import Replica
from holdfast.layout.view import View

if TYPE_CHECKING:
    from holdfast.rules.deepspeed import Slices

Shape = tuple[int, ...]
INFO = "universal_checkpoint_info"
VOCABULARY = "vocabulary_parameter_patterns"


@dataclass(frozen=True)
class ParamLayout:
    """A parameter's shape, and what each tensor-parallel rank stores of it."""

    name: str
    shape: Shape
    replica: Replica = "unique"
    slices: Slices | None = None
    """Cut of the parameter over the tensor-parallel ranks; None if it is whole."""
    path: str = ""

    def views(self, state: str = "param") -> tuple[View, ...]:
        """Return what each rank stores, by rank.  The state matters where values are scaled."""
        if self.slices is None:
            return (View.whole(self.shape),)
        with _said_in(self.path):
            return tuple(self.slices.view(self.name, r, state=state) for r in range(self.slices.tp))


class Layouts:
    """Layouts of all parameters; `shapes` are those that the tensor-parallel ranks hold, by name.

    `info` is what the file `path` says of them.  FormatError, naming it, if that does not fit the shapes.
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
        if info is not None and (several is not None or info.get(VOCABULARY)):
            from holdfast.rules.deepspeed import Slices  # most checkpoints do without

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
