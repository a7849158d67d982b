"""Putting extras back: the non-tensor part of a restore.

Planned, and refused where it must be, before any tensor is read; put back when all are there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only, tree_map_with_path

from holdfast.base.errors import FormatError, RuleError, StateMismatch, warn_user
from holdfast.base.events import emit
from holdfast.base.suggest import did_you_mean
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.rows import Want
from holdfast.core.format import extras
from holdfast.core.format.extras import DCP_NAMES, ORDER, referred
from holdfast.core.group import Group
from holdfast.core.layout import Box, whole
from holdfast.live.restore.filling import Claims, Filling
from holdfast.live.restore.groups import (
    HOW,
    beside_plain,
    goes_by_number,
    match_groups,
    moved_groups,
)
from holdfast.live.restore.mismatches import Mismatch, Problems, differs
from holdfast.live.restore.nested import (
    LIVE,
    OBJECT,
    Nested,
    StateSlot,
    homeless_in,
    is_object,
    nested,
    not_its_state,
    objects,
    put_state,
    tensors_of,
    with_live,
    with_tensors,
)
from holdfast.live.restore.readable import check_extras
from holdfast.live.restore.settings import GroupSettings, in_kind_of
from holdfast.live.restore.targets import (
    RestoreOptions,
    counts_stay,
    empty_alike,
    empty_in,
    only_tensors,
    target_of,
)
from holdfast.live.restore.written import WrittenByLoads
from holdfast.live.sources import Group as ParamGroup
from holdfast.live.sources import Source
from holdfast.live.state.customised import OWN, Own, customised
from holdfast.live.state.deriving import derives, tell_loaded
from holdfast.live.state.live import (
    RULES,
    Live,
    State,
    extra_states,
    in_order,
    is_optimizer,
    is_stateful,
    outline_tensor,
    parts_of,
    stages,
    unwrap,
)
from holdfast.live.state.optimizers import (
    common_name,
    holder_of,
    named_groups,
    param_names,
    tensors_in,
)
from holdfast.live.state.own_errors import naming
from holdfast.live.state.placed import local_of, place, torch_dtype
from holdfast.live.state.several import Several
from holdfast.live.state.wrapped import stepping
from holdfast.live.state.wrappers import parts

_RULES = ", ".join(RULES)
MAX_SHOWN = 10
"""Names that a warning shows."""

_restored_dicts: set[str] = set()
"""Keys of the dicts that this process has restored."""


class ExtrasRestorer:
    """The non-tensor part of a restore: planned before anything is written, put back at the end."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        state: State,
        live: Live,
        group: Group,
        options: RestoreOptions,
    ) -> None:
        self.checkpoint = checkpoint
        self.state = state
        self.group = group
        self.options = options
        self.resized = False
        self._moved: set[str] = set()
        """Optimizers of which each rank has its own values, on as many ranks with other parts of them."""
        self.is_whole = True
        """True if optimizers' states are in the checkpoint; in a record they are not."""
        self.problems = Problems()
        """Differences between what is saved and what is live, outside of tensors."""
        self.wants: list[Want] = []
        self._loaded: dict[str, torch.Tensor] = {}
        self._params: dict[str, dict[str, torch.Tensor]] = {}
        """Parameters by what names of their states begin with, by key of optimizers looked at."""
        self._nested: dict[str, Nested] = {}
        """Objects inside lists and dicts, by key of the state."""
        self._alike: dict[str, torch.Tensor] = {}
        """Tensors that objects have now, by name, of those objects to which saved tensors go."""
        self._live = live
        self._filling = Filling(checkpoint.step, live.tensors.values())
        self._settings = GroupSettings(checkpoint.step)
        self.claims = Claims()
        """Containers, arrays and objects of the state that have places in the step."""
        live.keys = set(state)
        if options.only is None:
            check_extras(checkpoint.manifest.extras, state)
            self._find_missing()
            self._find_moved_groups()
        self._find_missing_in_modules(live)
        self._plan_tensors(live)

    def _find_missing(self) -> None:
        manifest, claims = self.checkpoint.manifest, self.claims
        for key, value in in_order(self.state).items():
            if self.options.strict:
                self.problems.found += self._lacking(f"{key}.engine", self._live.sources.of(value))
            if self.options.strict and key in manifest.extras:
                self.problems.found += claims.problems(key, value, manifest.extras[key])
            if is_optimizer(value) and key in manifest.extras:
                pairs = self._named_groups(value)
                match_groups(key, manifest.extras[key], pairs)
                self._note_homeless(self._homeless_in_states(key, value, pairs))
                if self.options.strict:
                    self.problems.found += _all_unknown(key, manifest.extras[key], pairs)
            if isinstance(value, (dict, list, tuple)) and key in manifest.extras:
                found = self._nested[key] = nested(key, value, manifest.extras[key])
                self.problems.found += found.missing
                self._note_homeless(found.homeless)
                for slot in found.slots:
                    self._note_homeless(homeless_in(slot.path, slot.live.state_dict, slot.tree))
            if key in manifest.extras and is_object(value) and not is_optimizer(value):
                self.problems.found += not_its_state(key, value, manifest.extras[key])
                self._note_homeless(homeless_in(key, value.state_dict, manifest.extras[key]))
            if is_optimizer(value) and not self._has_common(value):
                self.problems.found += self._common_without_place(key, value)
            plain = stages(value) is None and not only_tensors(value)
            optional = getattr(value, "on_resize", None) == "fresh"
            if plain and key not in manifest.extras and key not in manifest.per_rank:
                if not optional and self.options.strict:
                    hint = did_you_mean(key, [*manifest.extras, *manifest.per_rank])
                    near = f" ({hint})" if hint else ""
                    self.problems.found.append(Mismatch("missing", key, near))
                elif not optional:
                    self.problems.missing.append(key)

    def _lacking(self, name: str, source: Source) -> list[Mismatch]:
        """Differences of a framework with its counters, loss scalers and the like, if there are any."""
        tree = self.checkpoint.manifest.extras.get(name)
        if source.saves_rest or tree is None:
            return []
        lacking = source.lacking(self._decode(tree))
        return [Mismatch("said", name, f"{name}.{text}") for text in lacking]

    def _note_homeless(self, homeless: list[Mismatch]) -> None:
        """States of objects that are not here: a problem or, if the load is not strict, told once."""
        if self.options.strict:
            self.problems.found += homeless
        else:
            self.problems.unexpected += [
                Mismatch("unexpected", one.name, f": {one.said}") for one in homeless
            ]

    def _find_moved_groups(self) -> None:
        """Find objects that would give an optimizer's groups each other's rates at their next step."""
        saved = self.checkpoint.manifest.extras
        if self.checkpoint.format == "dcp" or DCP_NAMES in saved:
            return  # whose groups, if they were flattened, have no numbers
        found: list[Mismatch] = []
        nested_ones = [(s.path, s.live) for one in self._nested.values() for s in one.slots]
        objects = [one for one in (*self.state.items(), *nested_ones) if is_object(one[1])]
        for key, optimizer in self.state.items():
            having = [path for path, one in objects if goes_by_number(one, optimizer)]
            if having and is_optimizer(optimizer) and key in saved:
                if moved := moved_groups(key, saved[key], self._named_groups(optimizer)):
                    why = (
                        f"groups {moved} were saved by another number with other rates, and "
                        f"{', '.join(having)} goes by their number: give the groups in the order in which "
                        "they were saved"
                    )
                    found.append(differs(key, why))
        if self.options.strict:
            self.problems.found += found
        elif found and not self.group.rank:
            warn_user("; ".join(one.text for one in found))

    def _homeless_in_states(
        self, key: str, optimizer: Any, pairs: list[list[tuple[str, torch.Tensor]]]
    ) -> list[Mismatch]:
        """Objects' states that were saved in an optimizer's states, where there is no object."""
        saved, source = (
            self.checkpoint.manifest.extras[key]["$optimizer"],
            self._live.sources.of(optimizer),
        )
        found: list[Mismatch] = []
        for name, p in (one for params in pairs for one in params if not source.by_master):
            inner, tensor = holder_of(optimizer, p, source.master(p))
            states = {} if inner is None else inner.state.get(tensor, {})
            for state, tree in saved.get("state", {}).get(name, {}).items():
                found += homeless_in(f"{key}.{name}.{state}", partial(states.get, state), tree)
        return found

    def _has_common(self, optimizer: Any) -> bool:
        """True if an optimizer can have state that belongs to no parameter, and that is saved."""
        plain = isinstance(optimizer, Optimizer) and not isinstance(optimizer, Several)
        return plain and self._live.sources.of(optimizer).saves_rest

    def _common_without_place(self, key: str, optimizer: Any) -> list[Mismatch]:
        """A difference if state that belongs to no parameter was saved, by whichever rank."""
        name, manifest = common_name(key), self.checkpoint.manifest
        trees = [manifest.extras[name]] if name in manifest.extras else []
        trees += self._of_all(name) if name in manifest.per_rank else []
        found = [_checked(name, extras.decode(tree, lambda *_: None)) for tree in trees]
        names = list(dict.fromkeys(repr(k) for common in found for k in common["state"]))
        return [_of_no_part(key, names, optimizer)] if names else []

    def _saved_of(self, name: str) -> dict[str, Any]:
        """Saved values that a module made for its state_dict(), encoded, from the extra `name`."""
        manifest = self.checkpoint.manifest
        if name in manifest.extras:
            tree = manifest.extras[name]
        else:  # another rank's, where this one had none
            rank = self.group.rank if self.group.rank in manifest.file_of else min(manifest.file_of)
            tree = self.checkpoint.rank_extras(rank).get(name, {})
        if not isinstance(tree, dict):
            raise FormatError(f"malformed extras: {name!r} is no state of a module")
        return tree

    def _find_missing_in_modules(self, live: Live) -> None:
        manifest, options = self.checkpoint.manifest, self.options
        saved = {*manifest.extras, *manifest.per_rank}
        for key, value in self.state.items():
            if self.options.only is None:
                for name, part in self._module_states(key, value):
                    live.taken.add(name)
                    saved_state = manifest.extras.get(name)
                    self._note_homeless(homeless_in(name, part.get_extra_state, saved_state))
            made: dict[str, set[str]] = {}  # by extra, which a wrapper and what it wraps share
            for name, own in self._made(key, value):
                live.taken.add(name)
                made.setdefault(name, set()).update(own.made)
                tree = self._saved_of(name) if name in saved else {}
                self.problems.missing += [f"{key}.{own.name(e)}" for e in own.made if e not in tree]
                if name in manifest.extras:
                    from holdfast.live.state.made import unloadable

                    lost = unloadable(key, own, self._readable(key, own, tree))
                    self.problems.found += [differs(one, why) for one, why in lost]
            for name, entries in made.items():
                tree = self._saved_of(name) if name in saved else {}
                more = [name.removesuffix(OWN) + entry for entry in tree if entry not in entries]
                self.problems.unexpected += [
                    Mismatch("unexpected", n)
                    for n in more
                    if n not in live.owned and options.wanted(n)
                ]

    def _readable(self, key: str, own: Own, tree: dict[str, Any]) -> dict[str, Any]:
        """Saved values, decoded, that a module makes and that are wanted; without those with large tensors,
        which are read when it is known that all fits."""
        return {
            entry: self._decode(value)
            for entry, value in tree.items()
            if entry in own.made
            and self.options.wanted(f"{key}.{own.name(entry)}")
            and not any(referred(value))
        }

    def _plan_tensors(self, live: Live) -> None:
        """Tensors inside the state_dict of objects, and those that a user's dict lacks, get memory of
        their own; the latter are unexpected unless strict is off."""
        in_modules = set(self._tensors_of_modules())
        of_each = self._tensors_of_each_rank()
        saved = self.checkpoint.manifest.extras
        self._alike = self._in_objects({*self.checkpoint.object_tensors, *of_each})
        unnamed = {name for key in self.state for name in _in_unnamed(saved.get(key))}
        for name in (*self.checkpoint.object_tensors, *of_each):
            key = name.split(".", 1)[0]
            if key not in self.state or name in live.tensors or name in live.apart:
                continue
            of_object = is_stateful(self.state[key])
            of_object = of_object or (key in self._nested and self._nested[key].has(name))
            of_object = of_object or name in of_each
            of_object = of_object or name in unnamed  # which has as many as it had then
            if stages(self.state[key]) is not None or self.options.only is not None:
                if name not in in_modules:
                    continue
                of_object = True
            if of_object:
                live.owned.add(name)
            if of_object or not self.options.strict:
                tensor, box = self._memory_for(name)
                self._loaded[name] = tensor
                index = self.checkpoint.index(name)
                if box.size:
                    dtype = self.checkpoint.info(name).dtype
                    self.wants.append(Want(index, box, target_of(local_of(tensor), dtype, name)))

    def _memory_for(self, name: str) -> tuple[torch.Tensor, Box]:
        """Memory for a tensor in the state of an object, and which part of it that has."""
        info, value = self.checkpoint.info(name), self.state[name.split(".", 1)[0]]
        box, dtype, alike = whole(info.shape), torch_dtype(info.dtype), self._alike.get(name)
        if info.shape and callable(rows := getattr(value, "rows_of_rank", None)):
            first, last = rows(info.shape[0])  # the object knows which it needs
            box = Box((first, *box.start[1:]), (last, *box.stop[1:]))
        elif alike is not None and (made := empty_alike(alike, info.shape, dtype)) is not None:
            return made, place(made, name).box
        tensor = torch.empty(box.shape, dtype=dtype)
        p = self._param_of(name)
        if isinstance(p, DTensor):
            tensor = self._beside(name, p, tensor)
            box = place(tensor, name).box if isinstance(tensor, DTensor) else box
        return tensor, box

    def _in_objects(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Tensors that objects of the state have now, by name, of those objects that some of the saved
        tensors `names` go to; these are asked for their state_dict(), in one order on all ranks."""
        slots = {s.path: s.tree for one in self._nested.values() for s in one.slots}
        found: dict[str, torch.Tensor] = {}
        for key, value in (
            in_order(self.state).items() if names and self.options.only is None else ()
        ):
            for path, one in objects(value, key) if not is_optimizer(value) else ():
                if any(name.startswith(f"{path}.") for name in names):
                    tree = slots.get(path, self.checkpoint.manifest.extras.get(path))
                    found |= tensors_of(path, one.state_dict, tree)
        return found

    def _put_alike(self, name: str, tree: Any) -> Any:
        """Refer to a tensor that lies in the state of an object by name, if the object has one there now,
        and have it loaded as that is."""
        alike, tensor = self._alike.get(name), outline_tensor(tree["$tensor"])
        if alike is None or (made := empty_alike(alike, tuple(tensor.shape), tensor.dtype)) is None:
            return tree
        part = place(made, name)
        part.local.copy_(tensor[part.box.within((0,) * tensor.ndim)])
        self._loaded[name] = made
        return {"$at": name}

    def _tensors_of_each_rank(self) -> list[str]:
        """Tensors in the states of objects that each rank has saved for itself: sharded ones."""
        kept = [(k, v) for k, v in self.state.items() if k in self.checkpoint.manifest.per_rank]
        inside = [path for k, v in kept if not is_optimizer(v) for path, _ in objects(v, k)]
        begins = tuple(f"{path}." for path in inside)
        return [name for name in self.checkpoint.manifest.by_name if name.startswith(begins)]

    def _beside(self, name: str, p: DTensor, plain: torch.Tensor) -> torch.Tensor:
        """Memory for a tensor in a list that is a state of a parameter; `plain` if it is to be whole."""
        if tuple(p.shape) == tuple(plain.shape):  # cut as it is
            return torch.empty_like(p, dtype=plain.dtype, requires_grad=False)
        key, _, rest = name.partition(".")
        known = beside_plain(self.checkpoint, key)
        if (
            known is None
            or not plain.ndim
            or any(
                rest.startswith(f"{param}.{state}.")
                for param, some in known.items()
                for state in some
            )
        ):
            return plain
        from holdfast.live.restore.beside import empty_beside

        return empty_beside(self.checkpoint, name, p, plain.dtype)

    def _tensors_of_modules(self) -> Iterator[str]:
        """Names of tensors in what modules of the state have besides their own tensors."""
        for key, value in self.state.items():
            states = self._module_states(key, value) if self.options.only is None else []
            for name, _ in (*states, *self._made(key, value)):
                yield from referred(self.checkpoint.manifest.extras.get(name))

    def _made(self, key: str, value: Any) -> list[tuple[str, Own]]:
        """Modules that have something of their own that is wanted, by the name of the extra of its made
        values."""
        return [
            (f"{key}.{own.name(OWN)}", own)
            for module in stages(value) or ()
            for own in self._own_of(key, module)
            if any(self.options.wanted(f"{key}.{own.name(e)}") for e in (*own.made, *own.tensors))
        ]

    def _own_of(self, key: str, module: nn.Module) -> list[Own]:
        if id(module) not in self._live.own:
            saves_rest = self._live.sources.of(module).saves_rest
            self._live.own[id(module)] = customised(key, module) if saves_rest else []
        return self._live.own[id(module)]

    def _param_of(self, name: str) -> torch.Tensor | None:
        """The parameter in whose optimizer's state a tensor is, in a list, say."""
        key = name.split(".", 1)[0]
        if key not in self._params:
            value = self.state[key]
            groups = self._named_groups(value) if is_optimizer(value) else ()
            self._params[key] = {f"{key}.{n}.": p for pairs in groups for n, p in pairs}
        found = [start for start in self._params[key] if name.startswith(start)]
        return self._params[key][max(found, key=len)] if found else None

    def _named_groups(self, optimizer: Any) -> list[list[tuple[str, torch.Tensor]]]:
        groups = self._live.sources.of(optimizer).groups(optimizer)
        return named_groups(groups, param_names(self.state, groups))

    def check_rules(self) -> None:
        """RuleError, on every rank alike, for an extra that has no rule for the new mesh."""
        self._find_moved()
        if not (self.resized or self._moved) or self.options.only is not None:
            return
        known = {*self.state, *map(common_name, self.state)}
        for key, value in self.state.items():
            known |= {name for name, _ in self._module_states(key, value)}
            known |= {name for name, _ in self._made(key, value)}
        lost = [
            key
            for key in self.checkpoint.manifest.per_rank
            if key in known and self._rule(key) is None and (self.resized or key in self._moved)
        ]
        if lost:
            saved, here = self.checkpoint.manifest.layout, self.group.size
            named = [f"{key!r}{self._differing(key)}" for key in lost]
            raise RuleError(
                f"{', '.join(named)}: saved by each rank of [{saved}] for itself; "
                f"what becomes of it on {here} rank(s) arranged differently is not declared",
                step=self.checkpoint.step,
                hint=f"pass on_resize={{{lost[0]!r}: RULE}} with RULE one of {_RULES}",
            )
        for key in self.checkpoint.manifest.per_rank:
            is_elsewhere = self.resized or key in self._moved
            if key in known and is_elsewhere and self._rule(key) == "redistribute":
                if not callable(getattr(self.state.get(key), "redistribute", None)):
                    raise RuleError(
                        f"{key!r} has no method redistribute(states, rank, world_size)",
                        hint=f"write one, or choose another rule of {_RULES}",
                    )

    def _find_moved(self) -> None:
        """Find optimizers of which ranks have their own values, and other parts.

        Collective: all ranks speak of each key, also those that have no such optimizer.
        """
        for key, rule in self.checkpoint.manifest.per_rank.items() if not self.resized else ():
            if rule is None and self.group.any(
                self._lies_otherwise(key)
            ):  # an optimizer's has no rule
                self._moved.add(key)

    def _lies_otherwise(self, key: str) -> bool:
        """True if this rank has other parts of the parameters of an optimizer than were saved here."""
        optimizer = self.state.get(key)
        if not is_optimizer(optimizer):
            return False
        from holdfast.live.restore.ranks import lies_otherwise

        params = {id(p) for pairs in self._named_groups(optimizer) for _, p in pairs}
        mine = [t for t in self._live.tensors.values() if id(t.source) in params]
        return lies_otherwise(self.checkpoint, mine, self.group.rank)

    def _differing(self, key: str) -> str:
        """Words for the values of an optimizer that ranks differ in; empty for what is no optimizer."""
        if not is_optimizer(self.state.get(key)):
            return ""
        from holdfast.live.restore.ranks import differing

        return differing(self.checkpoint, key)

    def _rule(self, key: str) -> str | None:
        own = getattr(self.state.get(key), "on_resize", None)
        of_module = self.options.on_resize.get(key.partition(".")[0]) if "." in key else None
        declared = self.options.on_resize.get(key) or own or of_module
        return declared or self.checkpoint.manifest.per_rank[key]

    def put(self) -> None:
        """Put everything back, RNG last."""
        manifest = self.checkpoint.manifest
        own = self._own()
        for key, value in self.state.items() if self.options.only is not None else ():
            self._put_made(key, value, own)
        if self.options.only is not None:
            return
        if any(name.endswith(f".{ORDER}") for name in (*manifest.extras, *manifest.per_rank)):
            from holdfast.live.restore.orders import put_orders

            put_orders(self.checkpoint, self.state, own, self.options.on_resize)
        objects = [k for k, v in self.state.items() if is_object(v) and not is_optimizer(v)]
        written = WrittenByLoads(self._live, self.state, self.checkpoint.step) if objects else None
        for key in sorted(self.state, key=lambda k: (k == "rng", k)):
            self._put_key(key, self.state[key], own)
            self._settings.put_back(key)
            if written is not None and key in objects:
                written.look(key)
        if not self.group.rank or manifest.per_rank:
            self._filling.tell()
        self._settings.tell()

    def _put_key(self, key: str, value: Any, own: dict[str, Any]) -> None:
        """Put back all that is not a tensor of its own of one value of the state."""
        manifest = self.checkpoint.manifest
        for name, module in self._module_states(key, value):
            tree = self._tree(name, own)
            if tree is not None:
                with naming(name, module, "set_extra_state"):
                    tree = with_live(name, module.get_extra_state, tree, self._decode)
                    module.set_extra_state(self._decode(tree))
        self._put_made(key, value, own)
        if stages(value) is not None:
            return  # of a foreign dict of tensors; those alone make up a module
        self._put_engine(f"{key}.engine", self._live.sources.of(value), own)
        common = common_name(key)
        if self.is_whole and (common in manifest.extras or common in manifest.per_rank):
            if self._has_common(value):
                restore_common_state(value, self._common(common, own))
        if key in manifest.per_rank:
            self._put_own(key, value, own)
        elif key in manifest.extras:
            self._put_one(key, value, manifest.extras[key])

    def _module_states(self, key: str, value: Any) -> list[tuple[str, nn.Module]]:
        return [
            (f"{key}.{name}", part) for m in stages(value) or () for name, part in extra_states(m)
        ]

    def _put_engine(self, name: str, source: Source, own: dict[str, Any]) -> None:
        """Put back a framework's counters, loss scaler and the like, if the checkpoint has them."""
        tree = own.get(name, self.checkpoint.manifest.extras.get(name))
        if not source.saves_rest and tree is not None:
            source.put_extras(self._decode(tree))

    def _put_made(self, key: str, value: Any, own: dict[str, Any]) -> None:
        """Put back what modules make for their state_dict(), by their own ways to load."""
        for name, one in self._made(key, value):
            tree = self._tree(name, own)
            saved = {} if tree is None else self._decode(tree)
            if not isinstance(saved, dict):
                raise FormatError(f"malformed extras: {name!r} is no state of a module")
            wanted = {e for e in saved if self.options.wanted(f"{key}.{one.name(e)}")}
            if tree is not None or one.tensors:
                from holdfast.live.state.made import put_own

                put_own(key, one, {e: v for e, v in saved.items() if e in one.made and e in wanted})
        if self.is_whole:
            self._tell_loaded(key, value)

    def _tell_loaded(self, key: str, value: Any) -> None:
        """Let modules derive what they derive when they are loaded, the inner ones first."""
        told = {id(own.part) for _, own in self._made(key, value)}
        for module in stages(value) or ():
            for prefix, part in reversed(list(self._deriving(module))):
                name = f"{key}.{prefix}"
                if id(part) not in told and any(n.startswith(name) for n in self._live.tensors):
                    tell_loaded(name.removesuffix("."), part)

    def _deriving(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Submodules that may derive something when they are loaded, with what their names begin with."""
        root = unwrap(module)
        is_torchs = self._live.sources.of(module).saves_rest
        few = {part for part in parts_of(root) if is_torchs and derives(part)}
        for prefix, part in parts(root) if few else ():
            if part in few:
                few.remove(part)
                yield prefix, part

    def _tree(self, name: str, own: dict[str, Any]) -> Any:
        """An extra that is part of a value of the state, as this rank is to have it; None if it is not."""
        if not (self.resized and name in self.checkpoint.manifest.per_rank):
            return own.get(name, self.checkpoint.manifest.extras.get(name))
        rule = self._rule(name)
        emit("extras.resized", key=name, rule=rule)
        return next(self._of_all(name), None) if rule in ("rank0", "same") else None

    def _common(self, name: str, own: dict[str, Any]) -> Any:
        """An optimizer's state that no parameter has, as `add_common` has it; None if there is none."""
        tree = self._tree(name, own)
        return None if tree is None else _checked(name, self._decode(tree))

    def _own(self) -> dict[str, Any]:
        if not self.checkpoint.manifest.per_rank or self.resized:
            return {}
        own = self.checkpoint.rank_extras(self.group.rank)
        check_extras(own, self.state)
        return own

    def _put_own(self, key: str, value: Any, own: dict[str, Any]) -> None:
        if not self.resized and key not in self._moved:
            if key in own:
                self._put_one(key, value, own[key])
            return
        rule = self._rule(key)
        emit("extras.resized", key=key, rule=rule)
        if rule in ("rank0", "same") and is_optimizer(value):
            from holdfast.live.restore.ranks import of_first

            self._put_one(key, value, of_first(self.checkpoint, key))
        elif rule in ("rank0", "same"):
            first = next(iter(self._of_all(key)), None)
            if first is not None:
                self._put_one(key, value, first)
        elif rule == "redistribute":
            states = [self._decode(tree) for tree in self._of_all(key)]
            with naming(key, value, "redistribute"):
                value.redistribute(states, self.group.rank, self.group.size)

    def _of_all(self, key: str) -> Iterator[Any]:
        """Yield the saved value of each rank that had this key, in rank order."""
        for rank in sorted(self.checkpoint.manifest.file_of):
            own = self.checkpoint.rank_extras(rank)
            if key in own:
                yield own[key]

    def _put_one(self, key: str, value: Any, tree: Any) -> None:
        if is_optimizer(value):
            source = self._live.sources.of(value)
            pairs, groups = self._named_groups(value), source.groups(value)
            names = put_groups(key, groups, tree, pairs, self._decode, self._live.unfit)
            self._settings.keep(key, value, [group for group, _ in groups], names)
            if not source.by_master:
                put_plain_states(key, value, source, tree, pairs, self._decode, self._live.unfit)
            return
        tree = with_tensors(key, tree, self._put_alike) if self._alike else tree
        if is_stateful(value):
            put_state(key, value, tree, self._decode)
        else:
            self.state[key] = self._merge(key, value, tree)

    def _merge(self, key: str, live: Any, tree: Any) -> Any:
        """Put saved values into the user's own containers; tensors there are loaded, and objects stay."""
        inside = nested(key, live, tree)
        if inside.missing:
            raise StateMismatch("; ".join(one.text for one in inside.missing))
        inside.put(self._decode)
        found = self._decode(inside.tree, live)
        if isinstance(live, dict) and isinstance(found, dict) and not self._filling.has(live):
            if not self.options.strict:
                _keep_missing(live, found)
            self._tell_removed(key, [name for name in live if name not in found])
        return self._filling.put(key, live, tree, found)

    def _tell_removed(self, key: str, names: list[Any]) -> None:
        """HoldfastWarning of what is removed from a dict, at the first restore of its key in this process:
        later ones go back to where the run was before it had added them."""
        if names and key not in _restored_dicts and not self.group.rank:
            shown = ", ".join(map(repr, names[:MAX_SHOWN])) + ", ..." * (len(names) > MAX_SHOWN)
            warn_user(
                f"{key}: step {self.checkpoint.step} has nothing of {shown}, which is taken from the dict",
                hint="set what a new version of a script has added after the restore, or ask by get()",
            )
        _restored_dicts.add(key)

    def _decode(self, tree: Any, live: Any = None) -> Any:
        known = dict(_with_paths(live))

        def tensor(name: str) -> Any:
            found = self._loaded.get(name)
            return known[name.split(".", 1)[1]] if found is None else found

        return decode_value(tree, tensor)


def decode_value(tree: Any, tensor: Callable[[str], Any] | None = None) -> Any:
    """Undo `state.live.encode`.  `tensor`: of a name, the tensor that lies elsewhere; None if none does."""

    def on_other(tag: str, body: Any) -> Any:
        if tag == "$tensor":
            return outline_tensor(body)
        if tag == "$at" and tensor is not None:
            return tensor(body)
        if tag == LIVE and isinstance(body, StateSlot):
            return body.live
        if tag == OBJECT:
            return extras.decode(body, on_other)
        if tag == "$dtype":
            return torch_dtype(body)
        if tag == "$quantized":
            from holdfast.live.state.quantised import quantised

            return quantised(extras.decode(body, on_other))
        raise FormatError(f"malformed extras: unknown tag {tag!r}")

    return extras.decode(tree, on_other)


def _keep_missing(live: dict[Any, Any], found: dict[Any, Any]) -> None:
    """Add to what was saved the tensors that it lacks, which were told as left as they are."""
    for key, value in live.items():
        if key not in found:
            found.update({key: value} if any(True for _ in tensors_in(value)) else {})
        elif isinstance(value, dict) and isinstance(found[key], dict):
            _keep_missing(value, found[key])


def _in_unnamed(tree: Any) -> Iterator[str]:
    """Names of tensors that the deques and sets in a value hold."""
    if isinstance(tree, dict) and len(tree) == 1 and set(tree) <= {"$deque", "$set", "$frozenset"}:
        yield from referred(tree)
    elif isinstance(tree, (dict, list)):
        for one in tree.values() if isinstance(tree, dict) else tree:
            yield from _in_unnamed(one)


def _with_paths(live: Any) -> Iterable[tuple[str, torch.Tensor]]:
    return tensors_in(live) if live is not None else ()


def _all_unknown(
    key: str, tree: Any, pairs: list[list[tuple[str, torch.Tensor]]]
) -> list[Mismatch]:
    """A difference if no parameter of a live optimizer is one of the saved optimizer's."""
    saved = [name for group in tree["$optimizer"]["groups"] for name in group["params"]]
    live = [name for group in pairs for name, _ in group]
    if not saved or not live or set(saved) & set(live):
        return []
    why = (
        "; parameters were saved by number, and which is which cannot be known from the files"
        if saved[0].startswith("state.")
        else ""
    )
    both = f"{saved[0]}, ... there and {live[0]}, ... here"
    return [differs(key, f"no parameter in common: {both}{why}")]


def put_groups(
    key: str,
    groups: list[ParamGroup],
    tree: Any,
    pairs: list[list[tuple[str, torch.Tensor]]],
    decode: Callable[[Any], Any],
    unfit: Collection[int] = (),
    *,
    as_recorded: bool = False,
) -> list[list[str]]:
    """Set each group's hyper-parameters from the saved group that its parameters were in; return the names
    of those that were set.

    Tensors are filled, also with a plain number: a script or a captured graph may hold them.
    `as_recorded`: settings are of the kind that the recorded step was computed with.  `unfit`: by id,
    parameters whose states were another optimizer's, as then the hyper-parameters of their groups were.
    """
    saved = tree["$optimizer"]["groups"]
    filled: dict[int, torch.Tensor] = {}
    names: list[list[str]] = []
    for (group, params), source in zip(groups, match_groups(key, tree, pairs)):
        names.append([])
        if source is not None and not any(id(p) in unfit for p in params):
            hyper = decode(with_live(key, partial(dict, group), saved[source]["hyper"], decode))
            for name in (n for n in hyper if n not in HOW or n not in group):
                names[-1].append(name)
                live, value = group.get(name), hyper[name]
                value = value if as_recorded else in_kind_of(live, value)
                if not _fill(live, value, filled):
                    group[name] = value
    return names


def _fill(live: Any, value: Any, filled: dict[int, torch.Tensor]) -> bool:
    """Write `value` to a tensor that is there; False if that cannot be.  `filled`: values that tensors got
    so far, by id, for groups that share one may have been saved with different values."""
    if not isinstance(live, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    if (live.shape, live.dtype) != (value.shape, value.dtype):
        return False
    if not torch.equal(filled.setdefault(id(live), value), value):
        return False
    with torch.no_grad():
        live.copy_(value)
    return True


def _checked(name: str, common: Any) -> dict[str, Any]:
    """Return `common` if it is what `add_common` saves; FormatError if it is something else."""
    if not (isinstance(common, dict) and {"state", "on_device"} <= set(common)):
        raise FormatError(f"malformed extras: {name!r} is no state of an optimizer")
    return common


def _of_no_part(key: str, names: list[str], live: Any) -> Mismatch:
    """The difference: no place for state of an optimizer that belongs to no parameter."""
    why = f"a {type(live).__name__} has no place for it: load it into the plain optimizer that it is of"
    if isinstance(live, Several):
        number = len(live.parts)
        why = f"whose it is of the {number} optimizers here is not known: hand them over one by one"
    return differs(key, f"state that belongs to no parameter was saved ({', '.join(names)}); {why}")


def restore_common_state(optimizer: Optimizer, saved: dict[str, Any] | None) -> None:
    """Put back state that belongs to no parameter: what was not saved is deleted; tensors are filled where
    they are, for a captured graph may hold them."""
    state: dict[Any, Any] = stepping(optimizer).state
    found, on_device = ({}, []) if saved is None else (saved["state"], saved["on_device"])
    for key in [k for k in state if not isinstance(k, torch.Tensor) and k not in found]:
        del state[key]
    params = (p for group in optimizer.param_groups for p in group["params"])
    device = next((local_of(p).device for p in params), torch.device("cpu"))
    for key, value in found.items():
        if key in on_device:
            value = tree_map_only(torch.Tensor, lambda t: t.to(device), value)
        if not _fill(state.get(key), value, {}):
            state[key] = value


def put_in_order(value: Any, state: str, lies: dict[str, list[int]]) -> None:
    """Let tensors inside a state lie in memory as they did, in place.  `lies`: orders of dims, by path."""
    for path, tensor in tensors_in(value, state) if lies else ():
        if path in lies:
            new = empty_in(lies[path], tuple(tensor.shape), tensor.dtype, tensor.device, path)
            tensor.data = new.copy_(tensor)


def on_device_of(p: torch.Tensor, value: Any, group: dict[str, Any]) -> Any:
    """Return a state with tensors in lists and dicts on its parameter's device, as torch's optimizers load
    them: all but counts under the name "step", where these stay."""
    stays = counts_stay(group)

    def moved(path: tuple[Any, ...], one: Any) -> Any:
        is_count = bool(path) and getattr(path[-1], "key", None) == "step" and stays
        return one if is_count or not isinstance(one, torch.Tensor) else one.to(p.device)

    return tree_map_with_path(moved, value)


def put_plain_states(
    key: str,
    optimizer: Optimizer,
    source: Source,
    tree: Any,
    pairs: list[list[tuple[str, torch.Tensor]]],
    decode: Callable[[Any], Any],
    unfit: Collection[int] = (),
) -> None:
    """Put back what an optimizer keeps of a parameter beside tensors.  `unfit`: ids of those left out."""
    for (group, _), params in zip(source.groups(optimizer), pairs):
        for name, p in params:
            if id(p) in unfit:
                continue
            inner, tensor = holder_of(optimizer, p, source.master(p))
            if inner is None:
                continue
            body = tree["$optimizer"]
            plain = body["plain"].get(name, ()) if "plain" in body else None
            lies = body.get("order", {}).get(name, {})
            for state, value in body["state"].get(name, {}).items():
                where = f"{key}.{name}.{state}"
                ask = partial(inner.state.get(tensor, {}).get, state)
                found = decode(with_live(where, ask, value, decode))
                if not isinstance(p, DTensor):
                    put_in_order(found, state, lies)
                if isinstance(p, DTensor) and plain is not None and state not in plain:
                    from holdfast.live.restore.beside import on_mesh_of

                    found = on_mesh_of(p, found)
                if tensor.device.type != "cpu":
                    found = on_device_of(tensor, found, group)
                inner.state[tensor][state] = found
