"""The protocol of a kind: one value of the state, and everything that is done with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from holdfast.core.layout import Box, whole
from holdfast.live.sources import Source, Sources
from holdfast.live.state.named import Collected
from holdfast.live.state.optimizers import LiveOptimizer
from holdfast.live.state.own_errors import naming
from holdfast.live.state.placed import torch_dtype
from holdfast.live.state.recognising import State

if TYPE_CHECKING:
    from holdfast.core.checkpoint.opened import Checkpoint
    from holdfast.live.kinds.restoring import Restoring
    from holdfast.live.restore.masters import MasterChange
    from holdfast.live.restore.optimizer_states import StateChange


@dataclass
class Collecting:
    """The collection of a state at one moment, and the facts that kinds need for it."""

    live: Collected
    state: State
    on_resize: dict[str, str]
    """Rule for each extra, by name, when the number of ranks changes."""
    is_first: bool
    """True at the first save of a run, which checks that nothing would be left unsaved."""
    groups: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    """For a record: parameter names of each group, by the optimizer's key."""


class Kind:
    """One value of the state."""

    saved_as: ClassVar[str] = "values"
    """The kind's name in the manifest.  Ranks may differ in the values of a key, not in its kind."""
    may_redistribute: ClassVar[bool] = True
    """True if a value's own method `redistribute` is called by that rule."""

    def __init__(self, key: str, value: Any, given: Any, sources: Sources) -> None:
        self.key = key
        self.value = value
        self.given = given
        """The value as the script handed it over: a list of optimizers is one optimizer (`value`)."""
        self.sources = sources

    @classmethod
    def claims(cls, value: Any, sources: Sources) -> bool:
        """True if a value is of this kind.  The kinds before it in `KINDS` have not claimed it."""
        raise NotImplementedError

    @property
    def source(self) -> Source:
        """The source of the value: torch's or a framework's."""
        return self.sources.of(self.value)

    # -- saving -------------------------------------------------------------------------------------

    def trained(self) -> Iterator[torch.Tensor]:
        """Yield the parameters that the value may change, if its steps are seen."""
        yield from ()

    def collect(self, to: Collecting) -> None:
        """Name and place everything that a save holds of the value."""
        raise NotImplementedError

    def collect_step(self, to: Collecting) -> None:
        """Name and place everything that a record of a step holds of the value, beside gradients."""
        if getattr(self.value, "in_records", True):
            self.collect(to)

    def optimizers(self, state: State) -> Sequence[LiveOptimizer]:
        """The optimizer that the value is, if it is one."""
        return ()

    # -- restoring ----------------------------------------------------------------------------------

    def place(self, restore: Restoring) -> Iterable[StateChange | MasterChange]:
        """Add places for saved tensors; return the changes that will make those that are lacking."""
        return ()

    def compare(self, restore: Restoring) -> None:
        """Find saved extras that do not fit."""

    def compare_with_others(self, restore: Restoring) -> None:
        """Find extras that do not fit the other values of the state.  Called after every `compare`."""

    def compare_part(self, restore: Restoring) -> None:
        """Like `compare`, in a load of some names alone (`only=`)."""

    def has_extra(self) -> bool:
        """True if a save of the value has an extra of its own key."""
        return True

    def extras(self, restore: Restoring) -> list[str]:
        """Names of the extras that the value takes."""
        return [self.key]

    def objects(self) -> Iterator[tuple[str, Any]]:
        """Yield (path, object) for the value, or for each value inside it, that has a state_dict()."""
        yield from ()

    def saved_state(self, path: str, checkpoint: Checkpoint) -> Any:
        """The saved tree of one of `objects`."""
        return checkpoint.manifest.extras.get(path)

    def holds(self, name: str, restore: Restoring) -> bool | None:
        """True if a saved tensor without a place is part of an extra that `put` puts back; False if the
        live value lacks it; None if it is not to be loaded at all."""
        return True if restore.options.only is None else None

    def memory_for(self, name: str, restore: Restoring) -> tuple[torch.Tensor, Box]:
        """Memory for a tensor that the value `holds`, and the box of the tensor that it covers."""
        info = restore.checkpoint.info(name)
        return torch.empty(info.shape, dtype=torch_dtype(info.dtype)), whole(info.shape)

    def lies_otherwise(self, restore: Restoring) -> bool:
        """True if this rank has other parts of the parameters than the rank of its number had."""
        return False

    def differing(self, checkpoint: Checkpoint) -> str:
        """Words that name the values in which ranks differed; may be empty."""
        return ""

    def put(self, restore: Restoring) -> None:
        """Put back the extras of the value."""
        key, is_each_ranks = self.key, self.key in restore.manifest.per_rank
        saved = restore.own if is_each_ranks else restore.manifest.extras
        if is_each_ranks and key in restore.moved:
            self.put_by_rule(restore, restore.told_rule(key))
        elif key in saved:
            self.put_tree(restore, saved[key])

    def redistributes(self, name: str) -> bool:
        """True if the rule `redistribute` can be followed for one of `extras`."""
        has_method = callable(getattr(self.value, "redistribute", None))
        return self.may_redistribute and name == self.key and has_method

    def put_by_rule(self, restore: Restoring, rule: str | None) -> None:
        """Put back an extra that each rank saved for itself, by its rule, on a changed set of ranks."""
        if rule in ("rank0", "same"):
            for tree in islice(restore.of_all(self.key), 1):
                self.put_tree(restore, tree)
        elif rule == "redistribute":
            states = [restore.decode(tree, self.value) for tree in restore.of_all(self.key)]
            with naming(self.key, self.value, "redistribute"):
                self.value.redistribute(states, restore.group.rank, restore.group.size)

    def put_tree(self, restore: Restoring, tree: Any) -> None:
        """Put back the saved tree of the value."""
        raise NotImplementedError

    def put_part(self, restore: Restoring) -> None:
        """Like `put`, in a load of some names alone (`only=`)."""
