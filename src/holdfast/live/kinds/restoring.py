"""A restore, as kinds see it: the saved extras, the differences found so far, and memory to read into.

Extras are compared, and refused where they do not fit, before anything is read.  They are put back when all
tensors are there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch

from holdfast.base.errors import FormatError, RuleError, StateMismatch
from holdfast.base.events import emit
from holdfast.base.suggest import did_you_mean
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.rows import Want
from holdfast.core.format.extras import ORDER
from holdfast.core.format.manifest import Manifest
from holdfast.core.group import Group
from holdfast.core.layout import Box, whole
from holdfast.live.kinds.kind import Kind
from holdfast.live.kinds.object import ObjectKind
from holdfast.live.restore.decoding import check_extras, decode_value
from holdfast.live.restore.filling import Claims, Filling, keep_missing
from holdfast.live.restore.mismatches import Mismatch, Problems, differs
from holdfast.live.restore.nested import (
    Nested,
    homeless_in,
    load_object,
    nested,
    not_its_state,
    object_tensors,
    with_live,
    with_tensors,
)
from holdfast.live.restore.param_groups import GroupSettings
from holdfast.live.restore.targets import RestoreOptions, empty_alike, target_of
from holdfast.live.restore.written import WrittenByLoads
from holdfast.live.state.encoding import RESIZE_RULES, outline_tensor
from holdfast.live.state.named import Prepared
from holdfast.live.state.optimizers import tensors_in
from holdfast.live.state.placed import local_of, place, torch_dtype
from holdfast.live.state.recognising import State

_RULES = ", ".join(RESIZE_RULES)


class Restoring:
    """One restore on this rank."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        state: State,
        kinds: Mapping[str, Kind],
        live: Prepared,
        group: Group,
        options: RestoreOptions,
    ) -> None:
        self.checkpoint = checkpoint
        self.state = state
        """The values by key.  A value that cannot be filled in place is replaced here."""
        self.kinds = kinds
        self.live = live
        self.group = group
        self.options = options
        self.is_resized = False
        """True if the mesh of ranks is another than that of the save."""
        self.is_whole = True
        """True for a full step; a record has no optimizer states."""
        self.problems = Problems()
        """Differences between saved and live extras."""
        self.wants: list[Want] = []
        self.moved: set[str] = set()
        """Keys of per-rank values whose ranks have other parts than they had."""
        self.claims = Claims()
        """Live containers, arrays and objects, with the saved tree of each."""
        self.settings = GroupSettings(checkpoint.step)
        self.filling = Filling(checkpoint.step, live.tensors.values())
        self._loaded: dict[str, torch.Tensor] = {}
        self._alike: dict[str, torch.Tensor] = {}
        """Live tensors of objects that saved tensors go to, by name."""
        live.keys = set(kinds)

    @property
    def manifest(self) -> Manifest:
        return self.checkpoint.manifest

    # -- saved extras ------------------------------------------------------------------------------

    @cached_property
    def own(self) -> dict[str, Any]:
        """Extras that the rank of this number saved for itself; none if the mesh is another."""
        if not self.manifest.per_rank or self.is_resized:
            return {}
        own = self.checkpoint.rank_extras(self.group.rank)
        check_extras(own, self.kinds)
        return own

    def is_saved(self, name: str) -> bool:
        """True if an extra was saved, by all ranks together or by each for itself."""
        return name in self.manifest.extras or name in self.manifest.per_rank

    def of_all(self, name: str) -> Iterator[Any]:
        """Yield the versions of an extra that ranks saved for themselves, in rank order."""
        for rank in sorted(self.manifest.file_of):
            own = self.checkpoint.rank_extras(rank)
            if name in own:
                yield own[name]

    def any_tree(self, name: str) -> dict[str, Any]:
        """Encoded values that a module made for its state_dict(): this rank's, else the first rank's."""
        if name in self.manifest.extras:
            tree = self.manifest.extras[name]
        else:
            ranks = self.manifest.file_of
            rank = self.group.rank if self.group.rank in ranks else min(ranks)
            tree = self.checkpoint.rank_extras(rank).get(name, {})
        if not isinstance(tree, dict):
            raise FormatError(f"malformed extras: {name!r} is no state of a module")
        return tree

    def tree(self, name: str) -> Any:
        """An extra that is part of a value, as this rank gets it; None if it gets none."""
        if not (self.is_resized and name in self.manifest.per_rank):
            return self.own.get(name, self.manifest.extras.get(name))
        rule = self.told_rule(name)
        return next(self.of_all(name), None) if rule in ("rank0", "same") else None

    def decode(self, tree: Any, live: Any = None) -> Any:
        """Decode a saved tree.  Its tensors are those that were read, else those of `live`."""
        known = dict(tensors_in(live)) if live is not None else {}

        def tensor(name: str) -> Any:
            found = self._loaded.get(name)
            return known[name.split(".", 1)[1]] if found is None else found

        return decode_value(tree, tensor)

    # -- finding differences -----------------------------------------------------------------------

    def find(self) -> None:
        """Compare all extras, and find memory for tensors in the states of objects."""
        if self.options.only is not None:
            for kind in self.kinds.values():
                kind.compare_part(self)
        else:
            check_extras(self.manifest.extras, self.kinds)
            for key, kind in self.kinds.items():
                if self.options.strict and key in self.manifest.extras:
                    tree = self.manifest.extras[key]
                    self.problems.found += self.claims.problems(key, kind.value, tree)
                kind.compare(self)
                if kind.has_extra() and not self.is_saved(key):
                    self._note_missing(key, kind)
            for kind in self.kinds.values():
                kind.compare_with_others(self)
        self._find_memory()

    def _note_missing(self, key: str, kind: Kind) -> None:
        if getattr(kind.value, "on_resize", None) == "fresh":
            return
        if not self.options.strict:
            self.problems.missing.append(key)
            return
        hint = did_you_mean(key, [*self.manifest.extras, *self.manifest.per_rank])
        self.problems.found.append(Mismatch("missing", key, f" ({hint})" if hint else ""))

    def differs(self, name: str, said: str) -> None:
        """Note that the saved value of a name does not fit the live one; `said` is the reason."""
        self.problems.found.append(differs(name, said))

    def unexpected(self, names: Iterable[str]) -> None:
        """Note saved names that have no place in the live state."""
        self.problems.unexpected += [
            Mismatch("unexpected", name)
            for name in names
            if name not in self.live.owned and self.options.wanted(name)
        ]

    def lacks(self, name: str, line: str) -> None:
        """Note, in the framework's words, a value that this run needs and an extra lacks."""
        self.problems.found.append(Mismatch("said", name, line))

    def compare_object(self, path: str, value: Any, tree: Any) -> None:
        """Compare the saved tree with the live object of its place, which has a state_dict()."""
        self.problems.found += not_its_state(path, value, tree)
        self.compare_objects_in(path, value.state_dict, tree)

    def compare_objects_in(self, path: str, ask: Callable[[], Any], tree: Any) -> None:
        """Find saved states of objects in a tree that have no live object.  `ask()`: the live state."""
        self._note_homeless(homeless_in(path, ask, tree))

    def compare_nested(self, key: str, value: Any, tree: Any) -> Nested:
        """Compare the objects inside a list or dict with the saved trees of their places."""
        found = nested(key, value, tree)
        self.problems.found += found.missing
        self._note_homeless(found.homeless)
        for slot in found.slots:
            self.compare_objects_in(slot.path, slot.live.state_dict, slot.tree)
        return found

    def _note_homeless(self, homeless: list[Mismatch]) -> None:
        """Note saved states whose objects the state lacks: problems or, without `strict`, told once, for
        their plain values are put in the places of the objects."""
        if self.options.strict:
            self.problems.found += homeless
        else:
            self.problems.unexpected += [
                Mismatch("unexpected", one.name, f": {one.said}; its values are put there")
                for one in homeless
            ]

    # -- memory for tensors that have no place of their own -----------------------------------------

    def _find_memory(self) -> None:
        """Find memory for tensors in the states of objects, and for those that a user's dict lacks, which a
        strict load does not expect."""
        live, names = self.live, [*self.checkpoint.object_tensors, *self.of_each_rank]
        self._alike = self._in_objects(set(names)) if self.options.only is None else {}
        for name in names:
            kind = self.kinds.get(name.split(".", 1)[0])
            if kind is None or name in live.tensors or name in live.apart:
                continue
            is_held = kind.holds(name, self)
            if is_held:
                live.owned.add(name)
            if is_held or (is_held is False and not self.options.strict):
                tensor, box = kind.memory_for(name, self)
                self._loaded[name] = tensor
                if box.size:
                    dtype, index = self.checkpoint.info(name).dtype, self.checkpoint.index(name)
                    self.wants.append(Want(index, box, target_of(local_of(tensor), dtype, name)))

    @cached_property
    def of_each_rank(self) -> list[str]:
        """Sharded tensors in the states of objects that each rank saved for itself."""
        kept = [kind for key, kind in self.kinds.items() if key in self.manifest.per_rank]
        begins = tuple(f"{path}." for kind in kept for path, _ in kind.objects())
        return [name for name in self.manifest.by_name if name.startswith(begins)]

    def _in_objects(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Live tensors, by name, of the objects that some of the saved tensors `names` go to.  Each object
        is asked for its state_dict(), in one order on all ranks."""
        found: dict[str, torch.Tensor] = {}
        for kind in self.kinds.values() if names else ():
            for path, one in kind.objects():
                if any(name.startswith(f"{path}.") for name in names):
                    tree = kind.saved_state(path, self.checkpoint)
                    found |= object_tensors(path, one.state_dict, tree)
        return found

    def memory_alike(self, name: str) -> tuple[torch.Tensor, Box]:
        """Memory for a tensor in an object's state, with the device and the cuts of its live tensor."""
        info, alike = self.checkpoint.info(name), self._alike.get(name)
        dtype = torch_dtype(info.dtype)
        if alike is not None and (made := empty_alike(alike, info.shape, dtype)) is not None:
            return made, place(made, name).box
        return torch.empty(info.shape, dtype=dtype), whole(info.shape)

    def with_alike(self, key: str, tree: Any) -> Any:
        """A saved tree whose tensors go to the devices of the live tensors in the same places."""
        return with_tensors(key, tree, self._put_alike) if self._alike else tree

    def _put_alike(self, name: str, tree: Any) -> Any:
        """Load an inline tensor with the device and cuts of the live one of its name, if there is one, and
        refer to it by name."""
        alike, tensor = self._alike.get(name), outline_tensor(tree["$tensor"])
        if alike is None or (made := empty_alike(alike, tuple(tensor.shape), tensor.dtype)) is None:
            return tree
        part = place(made, name)
        part.local.copy_(tensor[part.box.within((0,) * tensor.ndim)])
        self._loaded[name] = made
        return {"$at": name}

    # -- rules for what each rank has saved for itself ----------------------------------------------

    def check_rules(self, is_resized: bool) -> None:
        """RuleError, on all ranks alike, for an extra without a rule for the new mesh.  Collective."""
        self.is_resized, per_rank = is_resized, self.manifest.per_rank
        self.moved = set(per_rank) if is_resized else self._lying_otherwise()
        if not self.moved or self.options.only is not None:
            return
        known = {name for kind in self.kinds.values() for name in kind.extras(self)}
        moved = [name for name in per_rank if name in known and name in self.moved]
        lost = [name for name in moved if self.rule(name) is None]
        if lost:
            named = [f"{name!r}{self._differing(name)}" for name in lost]
            raise RuleError(
                f"{', '.join(named)}: saved by each rank of [{self.manifest.layout}] for itself; "
                f"what becomes of it on {self.group.size} rank(s) arranged differently is not declared",
                step=self.checkpoint.step,
                hint=f"pass on_resize={{{lost[0]!r}: RULE}} with RULE one of {_RULES}",
            )
        for name in moved:
            kind = self.kinds[name.partition(".")[0]]
            if self.rule(name) == "redistribute" and not kind.redistributes(name):
                why = "has no method redistribute(states, rank, world_size)"
                of_kind = f"is of kind {kind.saved_as}, whose methods are not called for that"
                raise RuleError(
                    f"{name!r} {why if kind.may_redistribute else of_kind}",
                    hint=f"{'write one, or ' * kind.may_redistribute}choose another rule of {_RULES}",
                )

    def _lying_otherwise(self) -> set[str]:
        """Keys of optimizers with values per rank whose ranks have other parts of the parameters now.

        Every rank votes on each key, also one without that optimizer.  An optimizer's extra has no rule.
        """
        return {
            key
            for key, rule in self.manifest.per_rank.items()
            if rule is None
            and self.group.any(key in self.kinds and self.kinds[key].lies_otherwise(self))
        }

    def _differing(self, name: str) -> str:
        return self.kinds[name].differing(self.checkpoint) if name in self.kinds else ""

    def rule(self, name: str) -> str | None:
        """The rule for an extra, as declared by the caller, the object, its module or the save."""
        own = getattr(self.state.get(name), "on_resize", None)
        of_module = self.options.on_resize.get(name.partition(".")[0]) if "." in name else None
        declared = self.options.on_resize.get(name) or own or of_module
        return declared or self.manifest.per_rank.get(name)

    def told_rule(self, name: str) -> str | None:
        """Like `rule`, with an event: the rule is followed now."""
        rule = self.rule(name)
        emit("extras.resized", key=name, rule=rule)
        return rule

    # -- putting back -------------------------------------------------------------------------------

    def put_state(self, key: str, value: Any, tree: Any) -> None:
        """Load an object's saved tree by its `load_state_dict`."""
        load_object(key, value, self.with_alike(key, tree), self.decode)

    def with_objects(self, path: str, ask: Callable[[], Any], tree: Any) -> Any:
        """Load the objects in the live state `ask()`; return the saved tree with the objects in it."""
        return with_live(path, ask, tree, self.decode)

    def put_values(self, key: str, live: Any, tree: Any) -> None:
        """Put saved values into the user's own containers.  Tensors inside are loaded, objects stay."""
        tree = self.with_alike(key, tree)
        inside = nested(key, live, tree)
        if inside.missing:
            raise StateMismatch("; ".join(one.text for one in inside.missing))
        inside.put(self.decode)
        found = self.decode(inside.tree, live)
        if isinstance(live, dict) and isinstance(found, dict) and not self.options.strict:
            if not self.filling.has(live):
                keep_missing(live, found)
        self.state[key] = self.filling.put(key, live, tree, found)

    def put(self) -> None:
        """Put all extras back, the generators of random numbers last."""
        if self.options.only is not None:
            for kind in self.kinds.values():
                kind.put_part(self)
            return
        if any(n.endswith(f".{ORDER}") for n in (*self.manifest.extras, *self.manifest.per_rank)):
            from holdfast.live.restore.loader_orders import put_orders

            objects = {key: list(kind.objects()) for key, kind in self.kinds.items()}
            put_orders(self.checkpoint, objects, self.own, self.rule)
        having = [key for key, kind in self.kinds.items() if isinstance(kind, ObjectKind)]
        written = WrittenByLoads(self.live, self.state, self.checkpoint.step) if having else None
        for key in sorted(self.kinds, key=lambda k: (k == "rng", k)):
            self.kinds[key].put(self)
            self.settings.put_back(key)
            if written is not None:
                (written.look if key in having else written.accept)(key)
        if not self.group.rank or self.manifest.per_rank:
            self.filling.tell(self.group.rank)
        self.settings.tell()
