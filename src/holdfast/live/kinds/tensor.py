"""A tensor that the script handed over as a value of the state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from holdfast.live.kinds.kind import Collecting
from holdfast.live.kinds.values import ValuesKind
from holdfast.live.sources import Sources

if TYPE_CHECKING:
    from holdfast.live.kinds.restoring import Restoring


class TensorKind(ValuesKind):
    """A tensor, whose name is the key itself.  An extra of that name, which other writers may have saved,
    replaces it as it would any value."""

    saved_as = "tensor"
    may_redistribute = False

    @classmethod
    def claims(cls, value: Any, sources: Sources) -> bool:
        return isinstance(value, torch.Tensor)

    def has_extra(self) -> bool:
        return False

    def collect(self, to: Collecting) -> None:
        to.live.add(self.key, "tensor", self.value, steady=False)

    def place(self, restore: Restoring) -> Iterable[Any]:
        if restore.options.wanted(self.key):
            restore.live.add(self.key, "tensor", self.value, steady=True)
        return ()
