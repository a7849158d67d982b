"""Optimizers of torch's class: one, or several as one (`state.several`).

A save holds the states of each parameter under the parameter's name.  One extra has the groups and all
states that are no tensors, another the state that belongs to no parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.base.errors import warn_user
from holdfast.core.format import extras
from holdfast.core.format.extras import DCP_NAMES
from holdfast.core.layout import Box
from holdfast.live.kinds.kind import Collecting, Kind
from holdfast.live.sources import Sources
from holdfast.live.state.named import Collected
from holdfast.live.state.observer import calls_hooks
from holdfast.live.state.optimizer_wrappers import check_own_state, shown_optimizer, stepping
from holdfast.live.state.optimizers import (
    LiveOptimizer,
    NamedGroups,
    add_common,
    add_optimizer,
    common_name,
    encoded_hyper_parameters,
    holder_of,
    own_params,
)
from holdfast.live.state.placed import place
from holdfast.live.state.recognising import State, is_optimizer
from holdfast.live.state.several import CombinedOptimizer, combined_parts
from holdfast.live.state.shared_states import tell_shared
from holdfast.live.state.unsaved_tensors import outside

if TYPE_CHECKING:
    from holdfast.core.checkpoint.opened import Checkpoint
    from holdfast.live.kinds.restoring import Restoring
    from holdfast.live.restore.masters import MasterChange
    from holdfast.live.restore.optimizer_states import StateChange


class OptimizerKind(Kind):
    """An optimizer of torch's class, or several that were handed over under one key."""

    saved_as = "optimizer"
    may_redistribute = False

    def __init__(self, key: str, value: Any, given: Any, sources: Sources) -> None:
        super().__init__(key, value, given, sources)
        self._live: LiveOptimizer | None = None
        self._params: dict[str, torch.Tensor] = {}
        """In a restore: parameters, by the prefix of the names of their states."""

    @classmethod
    def claims(cls, value: Any, sources: Sources) -> bool:
        return is_optimizer(value) and sources.of(value).saves_rest

    # -- saving -------------------------------------------------------------------------------------

    def trained(self) -> Iterator[torch.Tensor]:
        if not self._is_seen():
            return
        parts = combined_parts(self.value).values()
        some = {id(p) for one in parts if isinstance(one, Optimizer) for p in stepping(one).state}
        for _, params in self.source.groups(self.value):
            # one that is frozen for now has its states: a discriminator, while the generator trains
            yield from (p for p in params if p.requires_grad or id(p) in some)

    def _is_seen(self) -> bool:
        """True if all its steps call torch's hooks.  A framework's optimizer has one of torch's inside."""
        parts = combined_parts(self.value).values()
        return all(
            not isinstance(part, Optimizer) or calls_hooks(shown_optimizer(part)) for part in parts
        )

    def collect(self, to: Collecting) -> None:
        first = len(to.live.tensors)
        self._collect(to)
        if self._is_seen():
            self._note_moved(to.live, first)

    def live(self, state: State) -> LiveOptimizer:
        """The optimizer with its groups and names, which are found once."""
        if self._live is None:
            self._live = LiveOptimizer.of(self.key, self.value, self.source, state)
        return self._live

    def optimizers(self, state: State) -> Sequence[LiveOptimizer]:
        return [self.live(state)]

    def _collect(self, to: Collecting) -> None:
        live, optimizer = to.live, self.live(to.state)
        for name, p in own_params(to.state, optimizer):
            live.add(name, "param", p, steady=True)
        add_optimizer(live, optimizer)
        add_common(live, self.key, self.value, to.on_resize)
        names = optimizer.names
        if any(id(p) not in names for _, params in optimizer.groups for p in params):
            from holdfast.live.state.nameless_parameters import note_positions

            note_positions(live, optimizer, to.state)
        if to.is_first:
            self._check_states(to)
            tell_shared(self.key, self.value, names)

    def collect_step(self, to: Collecting) -> None:
        groups = [
            {"params": list(names), "hyper": encoded_hyper_parameters(self.key, group)}
            for group, names in zip(self.value.param_groups, to.groups[self.key])
        ]
        to.live.extras[self.key] = {"$optimizer": {"groups": groups, "state": {}}}
        to.live.rules[self.key] = "merge"

    def _check_states(self, to: Collecting) -> None:
        """Check the states of the optimizer as it was handed over, and of those saved in its place."""
        for label, part in combined_parts(self.value).items():
            check_own_state(self.key + label, part, part, outside(part, to.state))
        if isinstance(self.given, Optimizer) and self.given is not self.value:
            # torchtitan's makes a step to have states to tell of, if there are none
            if all(part.state for part in combined_parts(self.value).values()):
                outer = outside(self.given, to.state)
                check_own_state(self.key, self.given, self.value, outer)

    def _note_moved(self, live: Collected, first: int) -> None:
        """Note as moved the tensors from number `first` on: states, and parameters of its own."""
        for name in islice(live.tensors, first, None):
            t = live.tensors[name]
            if t.state != "param" or id(t.source) in live.trained:
                live.moved.add(name)

    # -- restoring ----------------------------------------------------------------------------------

    def place(self, restore: Restoring) -> Iterable[StateChange | MasterChange]:
        from holdfast.live.restore.optimizer_states import StatePlaces

        optimizer = self.live(restore.state)
        places = StatePlaces(restore.checkpoint, restore.live, restore.options, optimizer)
        changes = places.find()
        if self.source.saves_rest:
            for name, p in own_params(restore.state, optimizer):
                if restore.options.wanted(name):
                    restore.live.add(name, "param", p, steady=True)
        return changes

    def pairs(self, restore: Restoring) -> NamedGroups:
        """Names and parameters of each group."""
        return self.live(restore.state).pairs

    def compare(self, restore: Restoring) -> None:
        from holdfast.live.restore.param_groups import match_groups

        if self.key in restore.manifest.extras:
            tree, pairs = restore.manifest.extras[self.key], self.pairs(restore)
            match_groups(self.key, tree, pairs)
            self._compare_objects(restore, tree["$optimizer"].get("state", {}))
            if restore.options.strict and (why := _all_unknown(tree, pairs)):
                restore.differs(self.key, why)
        if not self._has_common():
            self._compare_common(restore)

    def compare_with_others(self, restore: Restoring) -> None:
        """Find schedulers whose next step would exchange the rates of groups."""
        from holdfast.live.restore.param_groups import goes_by_number, moved_groups

        saved = restore.manifest.extras
        if restore.checkpoint.format == "dcp" or DCP_NAMES in saved or self.key not in saved:
            return  # groups that were flattened have no numbers
        pairs = [pair for kind in restore.kinds.values() for pair in kind.objects()]
        having = [path for path, one in pairs if goes_by_number(one, self.value)]
        moved = moved_groups(self.key, saved[self.key], self.pairs(restore)) if having else []
        why = (
            f"groups {moved} were saved by another number with other rates, and {', '.join(having)} goes "
            "by their number: give the groups in the order in which they were saved"
        )
        if moved and restore.options.strict:
            restore.differs(self.key, why)
        elif moved and not restore.group.rank:
            warn_user(f"{self.key}: {why}")

    def _compare_objects(self, restore: Restoring, saved: dict[str, Any]) -> None:
        """Compare states of objects that were saved inside states of parameters."""
        if self.source.by_master:
            return
        for name, p in (one for params in self.pairs(restore) for one in params):
            inner, tensor = holder_of(self.value, p, self.source.master(p))
            states = {} if inner is None else inner.state.get(tensor, {})
            for state, tree in saved.get(name, {}).items():
                path = f"{self.key}.{name}.{state}"
                restore.compare_objects_in(path, partial(states.get, state), tree)

    def _has_common(self) -> bool:
        """True if state that belongs to no parameter is saved of such an optimizer."""
        is_one = isinstance(self.value, Optimizer) and not isinstance(self.value, CombinedOptimizer)
        return is_one and self.source.saves_rest

    def _compare_common(self, restore: Restoring) -> None:
        """Find saved state that belongs to no parameter, of any rank: it has no place in this optimizer."""
        from holdfast.live.restore.optimizer_states import checked_common

        name = common_name(self.key)
        trees = [restore.manifest.extras[name]] if name in restore.manifest.extras else []
        trees += restore.of_all(name) if name in restore.manifest.per_rank else []
        found = [checked_common(name, extras.decode(tree, lambda *_: None)) for tree in trees]
        names = list(dict.fromkeys(repr(k) for common in found for k in common["state"]))
        if names:
            restore.differs(self.key, _of_no_part(names, self.value))

    def extras(self, restore: Restoring) -> list[str]:
        return [self.key, common_name(self.key)]

    def memory_for(self, name: str, restore: Restoring) -> tuple[torch.Tensor, Box]:
        plain, box = super().memory_for(name, restore)
        if not self._params:
            pairs = (pair for params in self.pairs(restore) for pair in params)
            self._params = {f"{self.key}.{n}.": p for n, p in pairs}
        found = [start for start in self._params if name.startswith(start)]
        p = self._params[max(found, key=len)] if found else None
        if not isinstance(p, DTensor):
            return plain, box
        from holdfast.live.restore.optimizer_states import memory_beside

        tensor = memory_beside(restore.checkpoint, name, p, plain)
        return tensor, place(tensor, name).box if isinstance(tensor, DTensor) else box

    def lies_otherwise(self, restore: Restoring) -> bool:
        from holdfast.live.restore.values_per_rank import lies_otherwise

        params = {id(p) for pairs in self.pairs(restore) for _, p in pairs}
        mine = [t for t in restore.live.tensors.values() if id(t.source) in params]
        return lies_otherwise(restore.checkpoint, mine, restore.group.rank)

    def differing(self, checkpoint: Checkpoint) -> str:
        from holdfast.live.restore.values_per_rank import differing_values

        return differing_values(checkpoint, self.key)

    def put(self, restore: Restoring) -> None:
        common = common_name(self.key)
        if restore.is_whole and restore.is_saved(common) and self._has_common():
            from holdfast.live.restore.optimizer_states import checked_common, put_common_state

            tree = restore.tree(common)
            saved = None if tree is None else checked_common(common, restore.decode(tree))
            put_common_state(self.value, saved)
        super().put(restore)

    def put_by_rule(self, restore: Restoring, rule: str | None) -> None:
        if rule in ("rank0", "same"):
            from holdfast.live.restore.values_per_rank import of_first

            self.put_tree(restore, of_first(restore.checkpoint, self.key))

    def put_tree(self, restore: Restoring, tree: Any) -> None:
        from holdfast.live.restore.optimizer_states import put_plain_states
        from holdfast.live.restore.param_groups import put_groups

        # objects that were loaded before may have exchanged the groups, or added some
        optimizer = LiveOptimizer.of(self.key, self.value, self.source, restore.state)
        groups, unfit = optimizer.groups, restore.live.unfit
        names = put_groups(self.key, groups, tree, optimizer.pairs, restore.decode, unfit)
        restore.settings.keep(self.key, self.value, [group for group, _ in groups], names)
        if not self.source.by_master:
            put_plain_states(optimizer, tree, restore.decode, unfit)


def _all_unknown(tree: Any, pairs: NamedGroups) -> str:
    """Why live and saved optimizer have no parameter in common; empty if they have one."""
    saved = [name for group in tree["$optimizer"]["groups"] for name in group["params"]]
    live = [name for group in pairs for name, _ in group]
    if not saved or not live or set(saved) & set(live):
        return ""
    why = (
        "; parameters were saved by number, and which is which cannot be known from the files"
        if saved[0].startswith("state.")
        else ""
    )
    return f"no parameter in common: {saved[0]}, ... there and {live[0]}, ... here{why}"


def _of_no_part(names: list[str], live: Any) -> str:
    """Why state that belongs to no parameter has no place in the live optimizer."""
    why = f"a {type(live).__name__} has no place for it: load it into the plain optimizer that it is of"
    if isinstance(live, CombinedOptimizer):
        number = len(live.parts)
        why = f"whose it is of the {number} optimizers here is not known: hand them over one by one"
    return f"state that belongs to no parameter was saved ({', '.join(names)}); {why}"
