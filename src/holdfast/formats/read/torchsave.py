"""Opening torch.save files as a checkpoint: state dicts, training checkpoints, ranks' files.

    {"model_state_dict": {...}, "optimizer_state_dict": {...}, "epoch": 3}
        -> model.<name>, optim.<parameter>.<state>, extras epoch

A flat dict of tensors is a model.  In other dicts, models and optimizers are recognised by their usual
keys; other values become extras under their keys.  Files of several ranks are first merged to one tree
(`merged_ranks`). Trees are read without running code, tensors only on demand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from holdfast.base.errors import FormatError, NotFound
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.format import extras
from holdfast.core.store import Store
from holdfast.formats.read.byindex import (
    hyper_of,
    is_buffer,
    parameter_shapes,
    proved_names,
    stated_names,
)
from holdfast.formats.read.foreign import Foreign, foreign
from holdfast.formats.read.merged_ranks import ByRank, Tensor, replicated_value, scalar
from holdfast.formats.read.plaindata import plain_value
from holdfast.formats.read.stepnumber import NAMES, step_among
from holdfast.formats.read.torchfiles import trees_of
from holdfast.formats.read.unpickle import UnknownInstance

_MODEL = ("model", "model_state_dict", "state_dict", "model_state", "module")
_OPTIM = (
    "optim", "optimizer", "optimizer_state_dict", "optim_state_dict", "optimizer_state", "opt",
)  # fmt: skip
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def open_torch(store: Store, step: int | None = None) -> Checkpoint:
    """A file of torch.save, or a folder of its shards or ranks, as a checkpoint.

    FormatError, Corrupt or NotFound if files are not whole, are missing or do not belong together.
    """
    return open_trees(store, trees_of(store), step)


def open_trees(
    store: Store, trees: list[Any], step: int | None, software: dict[str, str] | None = None
) -> Checkpoint:
    """Make a checkpoint of merged trees."""
    found = _FileContents(store)
    sections = [s for tree in trees for s in _sections(tree)]
    named = Counter(key for key, _ in sections)
    twice = next((key for key, times in named.items() if times > 1), None)
    if twice is not None:
        raise FormatError(f"{twice!r} is there twice", key=store.url)
    for key, value in sorted(sections, key=lambda s: _is_optimizer(s[1])):  # models first
        found.add(key, value)
    here = step_among(found.steps)
    if step not in (None, here):
        raise NotFound(f"{store.url} is a torch checkpoint of step {here}; it has no step {step}")
    software = found.software() | (software or {})
    return foreign(store, found.tensors, step=here, software=software, extras=found.extras)


# -- keys -----------------------------------------------------------------------------------------


def is_state_dict(value: Any) -> bool:
    """True if a value is like a `Module.state_dict()`: tensors by name, and extra states."""
    if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
        return False
    tensors = {k for k, v in value.items() if isinstance(v, Tensor)}
    return bool(tensors) and all(
        k in tensors or k.endswith("_extra_state") for k, v in value.items()
    )  # fmt: skip


def _is_optimizer(value: Any) -> bool:
    """True if a value is like an `Optimizer.state_dict()`."""
    if not isinstance(value, dict) or value.keys() < {"state", "param_groups"}:
        return False
    state, groups = value.get("state"), value.get("param_groups")
    return isinstance(state, dict) and isinstance(groups, list) and all(
        isinstance(g, dict)
        and isinstance(g.get("params"), list)
        and all(isinstance(p, (int, str)) for p in g["params"])
        for g in groups
    )  # fmt: skip


def _sections(tree: Any) -> Iterator[tuple[str, Any]]:
    """(key, value) of a file's contents, under holdfast's keys for model, optimizer and scheduler."""
    if is_state_dict(tree):
        yield "model", tree
    elif _is_optimizer(tree):
        yield "optim", tree
    elif not isinstance(tree, dict):
        yield "value", tree
    else:
        renamed = _renamed(tree)
        for key, value in tree.items():
            yield from _one_section(renamed.get(key, str(key)), value)


def _one_section(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Split Lightning's lists: `optim`, or `optim0`, `optim1` for several."""
    to = {"optimizer_states": "optim", "lr_schedulers": "scheduler"}.get(key)
    if to is None or not isinstance(value, list):
        yield key, value
        return
    for number, one in enumerate(value):
        yield to + (str(number) if len(value) > 1 else ""), one


def _renamed(tree: dict[Any, Any]) -> dict[Any, str]:
    """holdfast's key for each key that changes: `model`, `optim`, others without `_state_dict`."""
    out: dict[Any, str] = {}
    for ours, names, fits in (("model", _MODEL, _has_tensors), ("optim", _OPTIM, _is_optimizer)):
        found = [k for k in names if k in tree and fits(tree[k])]
        if found and ours not in tree:
            out[found[0]] = ours
    taken = {*tree, *out.values()}
    for key in tree:
        short = str(key).removesuffix("_state_dict")
        if key not in out and short and short not in taken:
            out[key] = short
            taken.add(short)
    return out


def _has_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_tensors(v) for v in value.values())
    return isinstance(value, Tensor)


# -- names ----------------------------------------------------------------------------------------


def clean_names(names: list[str]) -> dict[str, str]:
    """Map names in a file to the module's own, without prefixes of compilation and wrappers."""
    found = {n: ".".join(p for p in n.split(".") if p not in _WRAPPERS) for n in names}
    if found and all(n.startswith("module.") for n in found.values()):  # DistributedDataParallel
        found = {k: n.removeprefix("module.") for k, n in found.items()}
    return found


@dataclass
class _FileContents:
    """Tensors, under holdfast's names, and extras of a file."""

    store: Store
    tensors: list[Foreign] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)
    model: list[tuple[str, Tensor]] = field(default_factory=list)
    """The model's tensors in order."""
    steps: dict[str, Any] = field(default_factory=dict)
    """Values that may be the step, by key."""

    def add(self, key: str, value: Any) -> None:
        if key == "model" and is_state_dict(value):
            own = {
                n
                for n, v in value.items()
                if isinstance(v, Tensor) and is_buffer(n, v.dtype, value)
            }
            alike = {n: v for n, v in value.items() if n not in own}  # buffers may differ by rank
            value = value | replicated_value(self.store, alike, key)
        elif key == "model" or key in (*_OPTIM, *NAMES) or _is_optimizer(value):
            value = replicated_value(self.store, value, key)
        if key in NAMES:
            self.steps[key] = self._number(value)
        if _is_optimizer(value):
            self._add_optimizer(key, value)
        elif key == "model" and is_state_dict(value):
            self._add_model(key, value)
        elif isinstance(value, Tensor) and not value.of_each:
            self._add_tensor(key, "tensor", value)
        else:
            self.extras[key] = self._encoded(key, value)

    def _number(self, value: Any) -> Any:
        plain_one = isinstance(value, Tensor) and not value.shape and "int" in value.dtype
        return scalar(self.store, value.whole[0]) if plain_one and value.whole else value

    def software(self) -> dict[str, str]:
        version = self.extras.get("pytorch-lightning_version")
        return {"pytorch-lightning": version} if isinstance(version, str) else {}

    def _add_tensor(self, name: str, state: str, tensor: Tensor) -> None:
        first, *copies = tensor.sets
        replica = "replicated" if copies else "unique"
        self.tensors.append(
            Foreign(name, tensor.dtype, tensor.shape, state, first, replica, tuple(copies))  # type: ignore[arg-type]
        )

    def _add_model(self, key: str, value: dict[str, Any]) -> None:
        names = clean_names(list(value))
        for name, item in value.items():
            if "_flat_param" in name:
                raise FormatError(
                    f"{key}.{name}: FSDP1's LOCAL_STATE_DICT, which does not say what is in it",
                    hint="save with StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT",
                )
            if isinstance(item, Tensor):
                self._add_tensor(f"{key}.{names[name]}", "param", item)
                self.model.append((names[name], item))
            else:
                full = f"{key}.{names[name]}"
                self.extras[full] = self._encoded(full, item)

    def _encoded(self, key: str, value: Any) -> Any:
        """Encode a value for extras; its tensors become tensors of the checkpoint."""

        def on_other(leaf: Any, path: str) -> Any:
            if isinstance(leaf, ByRank):
                ranks = [self._encoded(f"{key}.{path}.{r}", v) for r, v in enumerate(leaf.values)]
                return {"ranks": ranks}
            if isinstance(leaf, UnknownInstance):
                return extras.encode(plain_value(leaf), on_other, path)
            if not isinstance(leaf, Tensor):
                raise FormatError(f"{key}.{path}: a {type(leaf).__name__}")
            name = f"{key}.{path}" if path else key
            if not leaf.of_each:
                self._add_tensor(name, "tensor", leaf)
                return {"$at": name}
            for rank, parts in enumerate(leaf.sets):
                one = Tensor(leaf.dtype, leaf.shape, (parts,))
                self._add_tensor(f"{name}.{rank}", "tensor", one)
            return {"ranks": [{"$at": f"{name}.{r}"} for r in range(len(leaf.sets))]}

        return extras.encode(value, on_other)

    # -- optimizers -------------------------------------------------------------------------------

    def _add_optimizer(self, key: str, value: dict[str, Any]) -> None:
        """Add states under parameter names; under `state.<number>` if names are unknown."""
        names = self._names(value)
        rest: dict[str, dict[str, Any]] = {}
        for param, states in value["state"].items():
            name = names(param)
            if not isinstance(states, dict):
                raise FormatError(f"{key}: the state of {name!r} is no dict")
            for state, item in states.items():
                full = f"{key}.{name}.{state}"
                if isinstance(item, Tensor):
                    self._add_tensor(full, str(state), item)
                else:
                    rest.setdefault(name, {})[str(state)] = self._encoded(full, item)
        groups = [
            {
                "params": [names(p) for p in group["params"]],
                "hyper": self._encoded(f"{key}.param_groups[{i}]", hyper_of(group)),
            }
            for i, group in enumerate(value["param_groups"])
        ]
        self.extras[key] = {"$optimizer": {"groups": groups, "state": rest}}
        for name, item in value.items():  # in the file's order, which is that of all ranks
            if name not in ("state", "param_groups"):  # such as fairseq's loss_scale
                full = f"{key}.{name}"
                self.extras[full] = self._encoded(full, item)

    def _names(self, value: dict[str, Any]) -> Callable[[Any], str]:
        """Return the function that names an optimizer's parameter, given its number or name."""
        groups = value["param_groups"]
        numbers = [p for g in groups for p in g["params"]]
        if all(isinstance(p, str) for p in [*numbers, *value["state"]]):
            known: dict[Any, str] | None = dict(zip(numbers, numbers))
        else:
            known = stated_names(groups)
        if known is not None:
            unwrapped = clean_names(list(known.values()))
            return lambda p: unwrapped[known[p]] if p in known else str(p)
        proved = self._proved(value) or {}
        return lambda p: proved.get(p, f"state.{p}")

    def _proved(self, value: dict[str, Any]) -> dict[int, str] | None:
        shapes = {}
        for number, states in value["state"].items():
            large = [v.shape for v in _tensors(states) if v.shape]
            if len(set(large)) == 1:
                shapes[number] = large[0]
        groups = [g["params"] for g in value["param_groups"]]
        return proved_names(groups, shapes, _parameters(self.model))


def _tensors(states: Any) -> list[Tensor]:
    return [v for v in states.values() if isinstance(v, Tensor)] if isinstance(states, dict) else []


def _parameters(model: list[tuple[str, Tensor]]) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of possible parameters in a state dict, tied ones once at their first name,
    as in `parameters()`."""
    once: dict[str, tuple[str, Tensor]] = {}
    for name, tensor in model:
        once.setdefault(name if tensor.same is None else tensor.same, (name, tensor))
    return parameter_shapes([(n, t.dtype, t.shape) for n, t in once.values()])
