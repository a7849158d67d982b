"""Checkpoints of earlier versions, whose names have components of wrappers in them.

Earlier versions named a weight inside a nested DDP `model.gen.module.0.weight`, and saved each weight of a
Lightning Fabric model twice, as `_forward_module.0.weight` and `_original_module.0.weight`.  The former
name of a live module follows from its structure.  Where a checkpoint has the former name and lacks today's,
its entries are shown under today's name: tensors, extras, and optimizer states.

Nothing is guessed from a name's text, so a user's own `module` is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from torch import nn

from holdfast.base.events import emit
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.format.extras import MADE_OF
from holdfast.core.format.manifest import (
    MODEL_STATES,
    FileEntry,
    Manifest,
    TensorEntry,
    owner_of,
)
from holdfast.live.restore.param_groups import optimizer_body
from holdfast.live.state.module_wrappers import SECOND, TAKEN_OUT, paths
from holdfast.live.state.modules import inside_framework, reshard
from holdfast.live.state.optimizers import LiveOptimizer
from holdfast.live.state.recognising import State, modules_in

Pair = tuple[str, str, int]
"""A live tensor's name, one that it had formerly, and its id."""


def under_live_names(
    checkpoint: Checkpoint,
    modules: Sequence[tuple[str, nn.Module]],
    optimizers: Iterable[LiveOptimizer],
    *,
    of_fabric: bool,
) -> Checkpoint:
    """The checkpoint, or a view of it with former names replaced by the live ones.  `modules` and
    `optimizers`: those of the state, the modules with their keys.  `of_fabric`: it has names of Fabric."""
    pairs: dict[str, list[Pair]] = {}
    for key, module in modules:
        pairs.setdefault(key, []).extend(_pairs(module, of_fabric))
    names = _names(checkpoint, pairs, optimizers)
    if not names.of_module and not names.of_optimizer:
        return checkpoint
    emit("restore.renamed", step=checkpoint.step, keys=[*names.of_module, *names.of_optimizer])
    return Renamed(checkpoint, names)


def are_former(state: State, names: Iterable[str]) -> bool:
    """True if a tensor of a module, or a parameter, formerly had one of these names, with a key."""
    pairs = [pair for _, module in modules_in(state) for pair in _pairs(module, True)]
    former = {old for new, old, _ in pairs if old != new}
    rest = [name.partition(".")[2] for name in names]
    return any(name in former or name.partition(".")[2] in former for name in rest)


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module at which names formerly began."""
    while True:
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            module = module.module
        elif (inside := inside_framework(module)) is not None:
            module = inside
        elif hasattr(module, "_orig_mod"):
            module = module._orig_mod
        else:
            return module


def _pairs(module: nn.Module, of_fabric: bool) -> Iterator[Pair]:
    """Yield each name of a module's tensors and extra states with each of its former names."""
    reshard(module)
    for prefix, path, part in paths(_unwrapped(module), second=True):
        old = "".join(f"{c}." for c in path.split(".")[:-1] if c not in TAKEN_OUT)
        for name, value in [
            *part._parameters.items(),
            *part._buffers.items(),
            ("_extra_state", part),
        ]:
            new = prefix + name
            yield new, old + name, id(value)
            for former in _under_fabric(new) if of_fabric else ():
                yield new, former, id(value)


def _under_fabric(name: str) -> Iterator[str]:
    """Yield the names that a tensor had under Fabric, wrapped around its module or any above: with one rank
    and with several."""
    components = name.split(".")
    for i in range(len(components)):
        for wrapper in (SECOND, "_forward_module", "_forward_module.module"):
            yield ".".join([*components[:i], wrapper, *components[i:]])


def _names(
    checkpoint: Checkpoint, pairs: dict[str, list[Pair]], optimizers: Iterable[LiveOptimizer]
) -> NewNames:
    """New names for the entries of a checkpoint."""
    manifest = checkpoint.manifest
    known = {*checkpoint.names(), *manifest.extras, *manifest.per_rank}
    found = {key: _of_module(key, known, some) for key, some in pairs.items()}
    of_optimizer: dict[str, dict[str, str]] = {}
    for one in optimizers:
        served = {key: some for key, some in pairs.items() if one.serves(i for *_, i in some)}
        if names := _of_optimizer(_parameters(checkpoint, one.key), served, one.names):
            of_optimizer[one.key] = names
    return NewNames({key: names for key, names in found.items() if names}, of_optimizer)


@dataclass(frozen=True)
class NewNames:
    """New names for the entries of a checkpoint; names that stay are not listed."""

    of_module: dict[str, dict[str, str]]
    """For each key of modules, new names by former names, both without the key."""
    of_optimizer: dict[str, dict[str, str]]
    """For each key of an optimizer, new names of parameters by former names."""
    of_values: dict[str, str] = field(default_factory=dict)
    """New names of parameters that were saved with an optimizer, and are values of the state now."""

    def new(self, name: str, state: str) -> str:
        """The new name of a tensor whose entry in the manifest has this `state`."""
        if name in self.of_values:
            return self.of_values[name]
        key, _, rest = name.partition(".")
        if key in self.of_module:
            return f"{key}.{self.of_module[key].get(rest, rest)}"
        names = self.of_optimizer.get(key)
        if names is None:
            return name
        param = owner_of(rest, state)
        if param != rest:
            return f"{key}.{names.get(param, param)}.{state}"
        starts = [old for old in names if rest.startswith(f"{old}.")]
        if not starts:
            return name
        old = max(starts, key=len)  # a tensor in a list that is the state of a parameter
        return f"{key}.{names[old]}{rest[len(old) :]}"


def _of_module(key: str, known: set[str], pairs: Iterable[Pair]) -> dict[str, str]:
    return {
        old: new
        for new, old, _ in pairs
        if old != new and f"{key}.{old}" in known and f"{key}.{new}" not in known
    }


def _of_optimizer(
    known: set[str], served: dict[str, list[Pair]], all_names: dict[int, list[str]]
) -> dict[str, str]:
    """New names of an optimizer's parameters by former names.  Both may begin with the module's key."""
    found: dict[str, set[str]] = {}
    for key, pairs in served.items():
        for new, old, i in pairs:
            names = all_names.get(i, ())
            target = new if new in names else f"{key}.{new}"
            if target in names and target not in known:
                for former in (old, f"{key}.{old}"):
                    if former in known:
                        found.setdefault(former, set()).add(target)
    return {old: new for old, (new, *more) in found.items() if not more}


def _parameters(checkpoint: Checkpoint, key: str) -> set[str]:
    """Names of parameters that an optimizer's groups and states were saved under."""
    groups = optimizer_body(checkpoint, key).get("groups", ())
    found = {name for group in groups for name in group["params"]}
    start = f"{key}."
    for t in checkpoint.manifest.tensors:
        if t.state not in MODEL_STATES and t.name.startswith(start):
            found.add(owner_of(t.name, t.state)[len(start) :])
    return found


class Renamed(Checkpoint):
    """A view of a checkpoint under other names.  Its data lie where they did."""

    def __init__(self, checkpoint: Checkpoint, names: NewNames) -> None:
        self.store, self.images = checkpoint.store, checkpoint.images
        self.format, self.others = checkpoint.format, checkpoint.others
        self.refused = checkpoint.refused
        self._names = names
        self._tensors: dict[str, str] = {}
        """New names of tensors by former ones."""
        self.manifest = self._renamed(checkpoint.manifest)

    def file_extras(self, file: FileEntry) -> dict[str, Any]:
        return self._extras(super().file_extras(file))

    def _renamed(self, manifest: Manifest) -> Manifest:
        tensors: list[TensorEntry] = []
        states: dict[str, str] = {}
        for t in manifest.tensors:
            self._tensors[t.name] = self._names.new(t.name, t.state)
            states[t.name] = t.state
            tensors.append(msgspec.structs.replace(t, name=self._tensors[t.name]))
        for alias, to in manifest.aliases.items():
            self._tensors[alias] = self._names.new(alias, states[to])
        own = {t.name for t in tensors}
        aliases = {self._tensors[a]: self._tensors[to] for a, to in manifest.aliases.items()}
        new = msgspec.structs.replace(
            manifest,
            tensors=tuple(tensors),
            aliases={a: to for a, to in aliases.items() if a not in own},
            extras=self._extras(manifest.extras),
            per_rank={self._key(k): rule for k, rule in manifest.per_rank.items()},
        )
        new.__dict__["placement"] = manifest.placement  # it goes by the former names
        return new

    def _key(self, name: str) -> str:
        is_of_tensor = name.endswith(("_extra_state", MADE_OF))
        return self._names.new(name, "param") if is_of_tensor else name

    def _extras(self, extras: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for name, tree in extras.items():
            params = self._names.of_optimizer.get(name)
            is_optimizer = isinstance(tree, dict) and "$optimizer" in tree
            found[self._key(name)] = self._tree(
                _optimizer(tree, params) if params and is_optimizer else tree
            )
        return found

    def _tree(self, tree: Any) -> Any:
        """A tree of extras, with references to tensors by their new names."""
        if isinstance(tree, dict):
            if len(tree) == 1 and isinstance(tree.get("$at"), str):
                return {"$at": self._tensors.get(tree["$at"], tree["$at"])}
            return {k: self._tree(v) for k, v in tree.items()}
        return [self._tree(v) for v in tree] if isinstance(tree, list) else tree


def _optimizer(tree: Any, names: dict[str, str]) -> Any:
    """An optimizer's extras, with the new names of its parameters."""
    body = tree["$optimizer"]
    groups = [
        {**group, "params": list(dict.fromkeys(names.get(n, n) for n in group["params"]))}
        for group in body["groups"]
    ]
    states = {names.get(n, n): value for n, value in body["state"].items()}
    found = {**body, "groups": groups, "state": states}
    for what in ("order", "plain"):
        if what in body:
            found[what] = {names.get(n, n): value for n, value in body[what].items()}
    return {"$optimizer": found}
