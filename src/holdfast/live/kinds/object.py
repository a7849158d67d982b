"""Objects that are saved by their own state_dict(): schedulers, data loaders, scalers, anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from holdfast.core.layout import Box, whole
from holdfast.live.kinds.kind import Collecting, Kind
from holdfast.live.sources import Sources
from holdfast.live.state.encoding import add_order, encode_extra
from holdfast.live.state.loaded import loaded_states
from holdfast.live.state.own_errors import naming
from holdfast.live.state.placed import torch_dtype
from holdfast.live.state.recognising import is_loader, is_stateful

if TYPE_CHECKING:
    from holdfast.live.kinds.restoring import Restoring


class ObjectKind(Kind):
    """An object with `state_dict` and `load_state_dict`."""

    @classmethod
    def claims(cls, value: Any, sources: Sources) -> bool:
        return is_stateful(value)

    def collect(self, to: Collecting) -> None:
        live, key, value = to.live, self.key, self.value
        rule = to.on_resize.get(key) or getattr(value, "on_resize", None)
        if rule or is_loader(value):
            live.rules[key] = rule or "ask"
        with naming(key, value, "state_dict"):
            saved = loaded_states.of(value)
        live.extras[key] = encode_extra(live, key, saved, inline=True)
        if is_loader(value):
            add_order(live, key, value, saved, rule)

    def compare(self, restore: Restoring) -> None:
        if self.key in restore.manifest.extras:
            tree = restore.manifest.extras[self.key]
            restore.compare_object(self.key, self.value, tree)

    def objects(self) -> Iterator[tuple[str, Any]]:
        yield self.key, self.value

    def memory_for(self, name: str, restore: Restoring) -> tuple[torch.Tensor, Box]:
        info = restore.checkpoint.info(name)
        rows = getattr(self.value, "rows_of_rank", None)
        if not info.shape or not callable(rows):
            return restore.memory_alike(name)
        first, last = rows(info.shape[0])  # the rows that the object needs
        box = whole(info.shape)
        box = Box((first, *box.start[1:]), (last, *box.stop[1:]))
        return torch.empty(box.shape, dtype=torch_dtype(info.dtype)), box

    def put_tree(self, restore: Restoring, tree: Any) -> None:
        restore.put_state(self.key, self.value, tree)
