"""Plain values: numbers, texts, lists and dicts, with tensors and objects anywhere inside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from holdfast.core.format.extras import referred
from holdfast.core.layout import Box
from holdfast.live.kinds.kind import Collecting, Kind
from holdfast.live.sources import Sources
from holdfast.live.state.encoding import encode_extra
from holdfast.live.state.optimizers import tensors_in

if TYPE_CHECKING:
    from holdfast.core.checkpoint.opened import Checkpoint
    from holdfast.live.kinds.restoring import Restoring
    from holdfast.live.restore.nested import Nested


class ValuesKind(Kind):
    """Any other value.  Tensors inside are saved by their paths, and objects stay where they are."""

    def __init__(self, key: str, value: Any, given: Any, sources: Sources) -> None:
        super().__init__(key, value, given, sources)
        self._nested: Nested | None = None
        """In a restore: objects inside, with the saved trees of their places."""
        self._unnamed: set[str] = set()
        """In a restore: names of tensors in deques and sets."""

    @classmethod
    def claims(cls, value: Any, sources: Sources) -> bool:
        return True

    def collect(self, to: Collecting) -> None:
        to.live.extras[self.key] = encode_extra(to.live, self.key, self.value, inline=False)

    def place(self, restore: Restoring) -> Iterable[Any]:
        for path, tensor in tensors_in(self.value):
            name = f"{self.key}.{path}"
            if restore.options.wanted(name):
                restore.live.add(name, "tensor", tensor, steady=True)
        return ()

    def has_extra(self) -> bool:
        return not only_tensors(self.value)

    def compare(self, restore: Restoring) -> None:
        if self.key not in restore.manifest.extras:
            return
        tree = restore.manifest.extras[self.key]
        self._unnamed = set(_in_unnamed(tree))
        if isinstance(self.value, (dict, list, tuple)):
            self._nested = restore.compare_nested(self.key, self.value, tree)

    def objects(self) -> Iterator[tuple[str, Any]]:
        from holdfast.live.restore.nested import objects

        yield from objects(self.value, self.key)

    def saved_state(self, path: str, checkpoint: Checkpoint) -> Any:
        slots = {s.path: s.tree for s in self._nested.slots} if self._nested is not None else {}
        return slots.get(path, super().saved_state(path, checkpoint))

    def holds(self, name: str, restore: Restoring) -> bool | None:
        if restore.options.only is not None:
            return None
        is_inside = self._nested is not None and self._nested.has(name)
        return is_inside or name in restore.of_each_rank or name in self._unnamed

    def memory_for(self, name: str, restore: Restoring) -> tuple[torch.Tensor, Box]:
        return restore.memory_alike(name)

    def put_tree(self, restore: Restoring, tree: Any) -> None:
        restore.put_values(self.key, self.value, tree)


def only_tensors(value: Any) -> bool:
    """True if a value is a tensor, or a dict or list of nothing else: its names say all of it."""
    if isinstance(value, dict):
        return bool(value) and all(map(only_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(only_tensors, value))
    return isinstance(value, torch.Tensor)


def _in_unnamed(tree: Any) -> Iterator[str]:
    """Names of tensors that the deques and sets in a value hold."""
    if isinstance(tree, dict) and len(tree) == 1 and set(tree) <= {"$deque", "$set", "$frozenset"}:
        yield from referred(tree)
    elif isinstance(tree, (dict, list)):
        for one in tree.values() if isinstance(tree, dict) else tree:
            yield from _in_unnamed(one)
