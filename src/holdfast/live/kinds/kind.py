"""One value of the state, as what it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from holdfast.core.layout import Box, whole
from holdfast.live.sources import Source, Sources
from holdfast.live.state.named import Collected
from holdfast.live.state.placed import torch_dtype
from holdfast.live.state.recognising import State

if TYPE_CHECKING:
    from holdfast.core.checkpoint.opened import Checkpoint
    from holdfast.live.kinds.restoring import Restoring
    from holdfast.live.restore.masters import MasterChange
    from holdfast.live.restore.optimizer_states import StateChange


@dataclass
class Collecting:
    """What is collected at one moment, and what the kinds have to know for it."""

    live: Collected
    state: State
    on_resize: dict[str, str]
    """What becomes of extras when the number of ranks changes, by name."""
    is_first: bool
    """True at a run's first save, which refuses and tells what would not be saved."""
    groups: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    """For a record: names of the parameters of each group, by an optimizer's key."""


class Kind:
    """One value of the state."""

    saved_as: ClassVar[str] = "values"
    """What the manifest calls it: of a key, ranks may differ in values, not in this."""

    def __init__(self, key: str, value: Any, given: Any, sources: Sources) -> None:
        self.key = key
        self.value = value
        self.given = given
        """The value as the script handed it over: a list of optimizers is one optimizer (`value`)."""
        self.sources = sources

    @classmethod
    def claims(cls, value: Any, sources: Sources) -> bool:
        """True if a value is of this kind, and of none before it."""
        raise NotImplementedError

    @property
    def source(self) -> Source:
        """Whoever tells of the value: torch, or a framework."""
        return self.sources.of(self.value)

    # -- saving -------------------------------------------------------------------------------------

    def trained(self) -> Iterator[torch.Tensor]:
        """The parameters that the value may move, if its steps are seen."""
        yield from ()

    def collect(self, to: Collecting) -> None:
        """Name and place everything that is saved of the value."""
        raise NotImplementedError

    def collect_step(self, to: Collecting) -> None:
        """Name and place what a record of a step has of the value, beside the gradients."""
        if getattr(self.value, "in_records", True):
            self.collect(to)

    # -- restoring ----------------------------------------------------------------------------------

    def place(self, restore: Restoring) -> Iterable[StateChange | MasterChange]:
        """Find where saved tensors go; return the changes that are to make their places."""
        return ()

    def compare(self, restore: Restoring) -> None:
        """Find what was saved beside tensors and does not fit."""

    def compare_with_others(self, restore: Restoring) -> None:
        """Find what does not fit together with other values of the state, once each has been compared."""

    def compare_part(self, restore: Restoring) -> None:
        """`compare`, in a load of some names alone."""

    def has_extra(self) -> bool:
        """True if a save of the value has an extra of its own key."""
        return True

    def extras(self, restore: Restoring) -> list[str]:
        """Names of the extras that the value has a place for."""
        return [self.key]

    def objects(self) -> Iterator[tuple[str, Any]]:
        """Yield (path, object) of each object with a state_dict() that the value is, or has inside."""
        yield from ()

    def saved_state(self, path: str, checkpoint: Checkpoint) -> Any:
        """The saved tree of one of `objects`."""
        return checkpoint.manifest.extras.get(path)

    def holds(self, name: str, restore: Restoring) -> bool | None:
        """Tell of a saved tensor of this key that has no place of its own: True if it is part of an extra
        that is put back, None if it is not to be loaded at all."""
        return True if restore.options.only is None else None

    def memory_for(self, name: str, restore: Restoring) -> tuple[torch.Tensor, Box]:
        """Memory for such a tensor, and the box of the whole that it has."""
        info = restore.checkpoint.info(name)
        return torch.empty(info.shape, dtype=torch_dtype(info.dtype)), whole(info.shape)

    def lies_otherwise(self, restore: Restoring) -> bool:
        """True if this rank has other parts of what each rank has saved its own values of."""
        return False

    def differing(self, checkpoint: Checkpoint) -> str:
        """Words for what ranks have saved different values of; may be empty."""
        return ""

    def put(self, restore: Restoring) -> None:
        """Put back all that is no tensor of its own."""
        key, is_each_ranks = self.key, self.key in restore.manifest.per_rank
        saved = restore.own if is_each_ranks else restore.manifest.extras
        if is_each_ranks and key in restore.moved:
            self.put_by_rule(restore, restore.told_rule(key))
        elif key in saved:
            self.put_tree(restore, saved[key])

    def put_by_rule(self, restore: Restoring, rule: str | None) -> None:
        """Put back what each rank has saved for itself, on other ranks, by the rule for that."""
        if rule in ("rank0", "same"):
            for tree in islice(restore.of_all(self.key), 1):
                self.put_tree(restore, tree)

    def put_tree(self, restore: Restoring, tree: Any) -> None:
        """Put back the saved tree of the value."""
        raise NotImplementedError

    def put_part(self, restore: Restoring) -> None:
        """`put`, in a load of some names alone."""
