"""Modules: one of torch or of a framework, or a list of pipeline stages under one key.

A save holds parameters and persistent buffers by their names, the results of `get_extra_state`, and further
entries of a module's state_dict() (`state.customised`), which are refused inside an engine of a framework.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import nn

from holdfast.base.errors import FormatError, UsageError, warn_user
from holdfast.core.format.extras import referred
from holdfast.live.kinds.kind import Collecting, Kind
from holdfast.live.sources import Source, Sources
from holdfast.live.state.customised import (
    OWN_EXTRA,
    OwnEntries,
    add_made,
    add_own,
    customised,
    ignored_of,
    refuse_own,
)
from holdfast.live.state.encoding import encode_extra
from holdfast.live.state.ignoring import trainable_marks
from holdfast.live.state.module_wrappers import check_names, first_names
from holdfast.live.state.modules import (
    derives,
    extra_states,
    named_buffers,
    named_parameters,
    submodules,
    unwrap,
)
from holdfast.live.state.named import Collected, NamedTensors, Prepared
from holdfast.live.state.own_errors import naming
from holdfast.live.state.placed import parts_in
from holdfast.live.state.recognising import stages

if TYPE_CHECKING:
    from holdfast.core.checkpoint.opened import Checkpoint
    from holdfast.live.kinds.restoring import Restoring
    from holdfast.live.restore.targets import RestoreOptions


class ModuleKind(Kind):
    """A module, or the stages of a pipeline under one key."""

    saved_as = "module"
    may_redistribute = False

    def __init__(self, key: str, value: Any, given: Any, sources: Sources) -> None:
        super().__init__(key, value, given, sources)
        self.modules = stages(value) or []
        self._own: dict[int, list[OwnEntries]] = {}
        """In a restore: entries of modules beyond parameters and buffers, by the module's id."""
        self._referred: set[str] = set()
        """In a restore: tensors that the extras of modules refer to, by name."""

    @classmethod
    def claims(cls, value: Any, sources: Sources) -> bool:
        return stages(value) is not None

    # -- saving -------------------------------------------------------------------------------------

    def collect(self, to: Collecting) -> None:
        live, first, size = to.live, len(to.live.tensors), _size(to.live)
        for module in self.modules:
            source = self.sources.of(module)
            if to.is_first:
                check_names(self.key, unwrap(module))
            own: list[OwnEntries] = []
            if source.saves_rest:
                own = customised(self.key, module, first=to.is_first)
            elif to.is_first:
                refuse_own(self.key, module, first=True)
            live.modules.setdefault(self.key, []).append(module)
            self._collect_tensors(to, module, source)
            collect_extra_states(to, self.key, module)
            add_own(live, self.key, own)
            add_made(live, self.key, own, to.on_resize)
            if not source.saves_rest:  # its framework makes the optimizers, too
                live.moved.update(islice(live.tensors, first, None))
        if to.is_first and _size(live) == size:
            self._tell_empty()

    def collect_step(self, to: Collecting) -> None:
        for module in self.modules:
            collect_extra_states(to, self.key, module)
            add_made(to.live, self.key, customised(self.key, module), to.on_resize)

    def _collect_tensors(self, to: Collecting, module: nn.Module, source: Source) -> None:
        live, left_out = to.live, set[int]()
        if trainable_marks:
            from holdfast.live.state.trainable import leave_out

            left_out = leave_out(live, self.key, module, source)
        seen: dict[int, str] = {}
        for kind, name, tensor in _tensors(self.key, module):
            if id(tensor) in left_out:
                continue
            first = seen.setdefault(id(tensor), name)
            if first != name:
                live.alias(name, first)
                continue
            master = source.master(tensor)
            if master is None or not master.is_copy:
                add_tensor(live, name, kind, tensor, source, steady=kind == "param")
                if id(tensor) in live.trained:
                    live.moved.update(live.apart.get(name, (name,)))

    def _tell_empty(self) -> None:
        """HoldfastWarning for modules of which nothing is saved.  Torch's own modules without parameters
        have nothing to lose."""
        for module in self.modules:
            if not all(type(part).__module__.startswith("torch.nn.") for part in module.modules()):
                warn_user(
                    f"{self.key!r}: nothing is saved of this {type(module).__qualname__}, for its "
                    "state_dict() is empty: what it keeps must be parameters, persistent buffers or "
                    "get_extra_state() (metrics of torchmetrics: metric.persistent(True))"
                )

    # -- restoring ----------------------------------------------------------------------------------

    def place(self, restore: Restoring) -> Iterable[Any]:
        live, wanted = restore.live, restore.options.wanted
        for module in self.modules:
            source = self.sources.of(module)
            self._place_own(module, source, live, restore.options)
            self._leave_ignored(restore.checkpoint, live, module)
            frozen = _frozen(live, self.key, module)
            check_names(self.key, unwrap(module))
            seen: dict[int, str] = {}
            for kind, name, tensor in _tensors(self.key, module):
                if id(tensor) in frozen or not wanted(name):
                    continue
                first = seen.setdefault(id(tensor), name)
                if first != name:
                    live.alias(name, first)
                else:
                    add_tensor(live, name, kind, tensor, source, steady=True)
        return ()

    def _place_own(
        self, module: nn.Module, source: Source, live: Prepared, options: RestoreOptions
    ) -> None:
        """Add a module's own tensors before its parameters, which some modules move when asked."""
        if not source.saves_rest:
            refuse_own(self.key, module)
        mine = NamedTensors()
        add_own(mine, self.key, self._own_of(module), steady=True)
        live.tensors |= {n: t for n, t in mine.tensors.items() if options.wanted(n)}
        live.aliases |= mine.aliases

    def _own_of(self, module: nn.Module) -> list[OwnEntries]:
        if id(module) not in self._own:
            is_torchs = self.sources.of(module).saves_rest
            self._own[id(module)] = customised(self.key, module) if is_torchs else []
        return self._own[id(module)]

    def _leave_ignored(self, checkpoint: Checkpoint, live: Prepared, module: nn.Module) -> None:
        """Mark saved names that are ignored now as owned, so that no place is looked for."""
        ignored = ignored_of(module)
        if ignored is None:
            return
        start = f"{self.key}."
        names = [n for n in checkpoint.names() if n.startswith(start)]
        live.owned |= {n for n in names if ignored.has(n[len(start) :])}
        for name, tree in checkpoint.manifest.extras.items():
            if name.startswith(start) and name.endswith(OWN_EXTRA) and isinstance(tree, dict):
                path = name[len(start) : -len(OWN_EXTRA)]
                given_up = {entry for entry in tree if ignored.has(path + entry)}
                live.owned |= {start + path + entry for entry in given_up}
                if len(given_up) == len(tree):
                    live.owned.add(name)

    def compare(self, restore: Restoring) -> None:
        for name, part in self._extra_states():
            restore.live.taken.add(name)
            saved = restore.manifest.extras.get(name)
            self._referred |= set(referred(saved))
            restore.compare_objects_in(name, part.get_extra_state, saved)
        self.compare_part(restore)

    def compare_part(self, restore: Restoring) -> None:
        """Compare the values that modules make for their state_dict() with the saved ones."""
        saved = {*restore.manifest.extras, *restore.manifest.per_rank}
        made: dict[str, set[str]] = {}  # by extra, which a wrapper and what it wraps share
        for name, own in self._made(restore.options):
            restore.live.taken.add(name)
            self._referred |= set(referred(restore.manifest.extras.get(name)))
            made.setdefault(name, set()).update(own.made)
            tree = restore.any_tree(name) if name in saved else {}
            lacking = [f"{self.key}.{own.name(e)}" for e in own.made if e not in tree]
            restore.problems.missing += lacking
            if name in restore.manifest.extras:
                from holdfast.live.state.own_loading import unloadable

                for one, why in unloadable(self.key, own, self._readable(restore, own, tree)):
                    restore.differs(one, why)
        for name, entries in made.items():
            tree = restore.any_tree(name) if name in saved else {}
            restore.unexpected(
                name.removesuffix(OWN_EXTRA) + entry for entry in tree if entry not in entries
            )

    def _readable(
        self, restore: Restoring, own: OwnEntries, tree: dict[str, Any]
    ) -> dict[str, Any]:
        """Decode saved values that a module makes and that are wanted.  Values with large tensors are left
        out: they are read when all is known to fit."""
        return {
            entry: restore.decode(value)
            for entry, value in tree.items()
            if self._is_wanted(restore.options, own, entry) and not any(referred(value))
        }

    def has_extra(self) -> bool:
        return False

    def extras(self, restore: Restoring) -> list[str]:
        states = [name for name, _ in self._extra_states()]
        return [self.key, *states, *(name for name, _ in self._made(restore.options))]

    def holds(self, name: str, restore: Restoring) -> bool | None:
        return True if name in self._referred else None

    def _extra_states(self) -> list[tuple[str, nn.Module]]:
        return [(f"{self.key}.{n}", part) for m in self.modules for n, part in extra_states(m)]

    def _made(self, options: RestoreOptions) -> list[tuple[str, OwnEntries]]:
        """The own entries of modules of which some are wanted, by the name of the extra of made values."""
        return [
            (f"{self.key}.{own.name(OWN_EXTRA)}", own)
            for module in self.modules
            for own in self._own_of(module)
            if any(options.wanted(f"{self.key}.{own.name(e)}") for e in (*own.made, *own.tensors))
        ]

    def put(self, restore: Restoring) -> None:
        for name, module in self._extra_states():
            tree = restore.tree(name)
            if tree is not None:
                with naming(name, module, "set_extra_state"):
                    tree = restore.with_objects(name, module.get_extra_state, tree)
                    module.set_extra_state(restore.decode(tree))
        self.put_part(restore)

    def put_part(self, restore: Restoring) -> None:
        """Put back the values that modules make for their state_dict(), by their own ways to load."""
        for name, own in self._made(restore.options):
            tree = restore.tree(name)
            saved = {} if tree is None else restore.decode(tree)
            if not isinstance(saved, dict):
                raise FormatError(f"malformed extras: {name!r} is no state of a module")
            if tree is not None or own.tensors:
                from holdfast.live.state.own_loading import put_own

                wanted = [e for e in saved if self._is_wanted(restore.options, own, e)]
                put_own(self.key, own, {e: saved[e] for e in wanted})
        if restore.is_whole:
            self._tell_loaded(restore)

    def _is_wanted(self, options: RestoreOptions, own: OwnEntries, entry: str) -> bool:
        return entry in own.made and options.wanted(f"{self.key}.{own.name(entry)}")

    def _tell_loaded(self, restore: Restoring) -> None:
        """Let modules derive values from their loaded tensors, inner modules first."""
        told = {id(own.part) for _, own in self._made(restore.options)}
        for module in self.modules:
            is_torchs = self.sources.of(module).saves_rest
            for prefix, part in reversed(list(_deriving(module))) if is_torchs else ():
                name = f"{self.key}.{prefix}"
                if id(part) not in told and any(n.startswith(name) for n in restore.live.tensors):
                    from holdfast.live.state.own_loading import tell_loaded

                    tell_loaded(name.removesuffix("."), part)


def add_tensor(
    live: NamedTensors, name: str, kind: str, tensor: Any, source: Source, *, steady: bool
) -> None:
    """Add a parameter or buffer, or its master, if it has one."""
    master = source.master(tensor)
    if master is None:
        live.add(name, kind, tensor, steady=steady)
        return
    live.add_parts(name, kind, parts_in(master, master.tensor, name), master.tensor, steady=steady)
    if master.is_padded:
        live.padded.add(name)


def collect_extra_states(to: Collecting, key: str, module: nn.Module) -> None:
    """Add the extra states of modules (`get_extra_state`)."""
    live = to.live
    for name, part in extra_states(module):
        full = f"{key}.{name}"
        others = live.modules.get(key, [])[:-1] if full in live.extras else []
        if others and not any((name, part) in extra_states(one) for one in others):
            raise UsageError(f"two different modules have an extra state named {full!r}")
        if full in to.on_resize:
            live.rules[full] = to.on_resize[full]
        with naming(full, part, "get_extra_state"):
            saved = part.get_extra_state()
        live.extras[full] = encode_extra(live, full, saved, inline=True)


def _tensors(key: str, module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield (kind, name, tensor) of parameters and persistent buffers; a tied one comes once per name."""
    yield from (("param", f"{key}.{name}", p) for name, p in named_parameters(module))
    yield from (("buffer", f"{key}.{name}", b) for name, b in named_buffers(module))


def _size(live: Collected) -> int:
    return len(live.tensors) + len(live.aliases) + len(live.extras)


def _frozen(live: Prepared, key: str, module: nn.Module) -> set[int]:
    """Note parameters that `trainable_only` leaves out; return their ids."""
    if not trainable_marks:
        return set()
    from holdfast.live.state.trainable import find_frozen

    return find_frozen(live, key, module)


def _deriving(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The submodules that may derive values when they are loaded, with the prefixes of their names."""
    root = unwrap(module)
    return first_names(root, {part for part in submodules(root) if derives(part)})
