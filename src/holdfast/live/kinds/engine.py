"""Optimizers of frameworks, in the place of torch's: DeepSpeed's, Megatron's, a registered framework's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from holdfast.live.kinds.kind import Collecting
from holdfast.live.kinds.optimizer import OptimizerKind
from holdfast.live.sources import Sources
from holdfast.live.state.encoding import encode_extra
from holdfast.live.state.optimizers import add_optimizer, refuse_common
from holdfast.live.state.recognising import is_optimizer

if TYPE_CHECKING:
    from holdfast.live.kinds.restoring import Restoring
    from holdfast.live.restore.masters import MasterChange
    from holdfast.live.restore.optimizer_states import StateChange


class EngineOptimizer(OptimizerKind):
    """An optimizer of a framework, which tells where its states and masters lie (`live.sources`)."""

    @classmethod
    def claims(cls, value: Any, sources: Sources) -> bool:
        return is_optimizer(value)

    def _collect(self, to: Collecting) -> None:
        live, source, engine = to.live, self.source, f"{self.key}.engine"
        if to.is_first:
            refuse_common(self.key, self.value, source)
        live.extras[engine] = encode_extra(live, engine, source.extras(), inline=True)
        add_optimizer(live, self.live(to.state))

    def place(self, restore: Restoring) -> Iterable[StateChange | MasterChange]:
        if not self.source.by_master:
            return super().place(restore)
        from holdfast.live.restore.masters import master_changes

        optimizer = self.live(restore.state)
        return master_changes(restore.checkpoint, restore.live, restore.options, optimizer)

    def compare(self, restore: Restoring) -> None:
        name = f"{self.key}.engine"
        tree = restore.manifest.extras.get(name)
        if tree is not None and restore.options.strict:
            for text in self.source.lacking(restore.decode(tree)):
                restore.lacks(name, f"{name}.{text}")
        super().compare(restore)

    def put(self, restore: Restoring) -> None:
        name = f"{self.key}.engine"
        tree = restore.own.get(name, restore.manifest.extras.get(name))
        if tree is not None:
            self.source.put_extras(restore.decode(tree))
        super().put(restore)
