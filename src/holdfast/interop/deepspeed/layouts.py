"""How the parts of tensor-parallel ranks make a parameter, by a checkpoint's `universal_checkpoint_info`.

The info is read as rules (`holdfast.rules.deepspeed`); here its errors get the file that holds it.  Names
that match no pattern are cut along dim 0, as DeepSpeed has it; where copies of such a name were meant
to be replicas, the result has a dim that is twice as long, and does not load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import FormatError, LayoutError, RuleError
from holdfast.format.manifest import Replica
from holdfast.layout import View
from holdfast.rules.deepspeed import Slices

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """A parameter's shape, and by tensor-parallel rank what it stores of it."""

    shape: Shape
    views: tuple[View, ...]
    replica: Replica = "unique"

    @staticmethod
    def whole(shape: Shape) -> Layout:
        """One rank holds all of it."""
        return Layout(shape, (View.whole(shape),))


class Rules:
    """What a checkpoint says of tensor parallelism; `path` is the file that holds it."""

    def __init__(self, info: Mapping[str, Any] | None, path: str) -> None:
        self.info = info
        self.path = path

    def layout(self, name: str, shapes: Sequence[Shape]) -> Layout:
        """How a parameter is made of parts of `shapes`, one for each tensor-parallel rank."""
        if self.info is None and len(shapes) == 1:
            return Layout.whole(shapes[0])
        if self.info is None:
            raise FormatError(
                f"{name!r} is cut over {len(shapes)} tensor-parallel ranks, and nothing says how",
                key=self.path,
                hint="the model must put its 'universal_checkpoint_info' into client_state",
            )
        try:
            slices = Slices(self.info, {name: list(shapes)})
            views = tuple(slices.view(name, rank) for rank in range(len(shapes)))
            replica = slices.replica(name) if len(shapes) > 1 else "unique"
            return Layout(slices.shape(name), views, replica)
        except (LayoutError, RuleError) as error:
            raise FormatError(f"{name!r}: {error.message}", key=self.path) from None
