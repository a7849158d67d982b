"""The places to which a restore puts tensors: live memory, made where it is missing.

Tensors on the meta device are materialised; optimizers get the state tensors that were saved, cut like
their parameters.  Nothing is read here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.base.errors import FormatError, HoldfastError
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.rows import RAW, Array, ArrayTarget, Target
from holdfast.core.format.extras import MADE_OF
from holdfast.core.format.manifest import TensorEntry
from holdfast.core.layout import Mesh
from holdfast.live.restore.expected import Fitting
from holdfast.live.restore.groups import memory_orders, plain_states
from holdfast.live.restore.landing import copy_in
from holdfast.live.sources import Master
from holdfast.live.state.arrays import array_of
from holdfast.live.state.customised import OWN, add_own, customised, ignored_of, refuse_own
from holdfast.live.state.ignoring import trainable_marks
from holdfast.live.state.kinds import PLAIN, check_kind, writing
from holdfast.live.state.live import (
    Live,
    State,
    add_tensor,
    is_optimizer,
    is_stateful,
    named_buffers,
    named_parameters,
    sources_in,
    stages,
    unwrap,
)
from holdfast.live.state.optimizers import (
    KINDS,
    add_state,
    add_ties,
    all_param_names,
    holder_of,
    named_groups,
    own_params,
    tensors_in,
)
from holdfast.live.state.placed import is_apart, memory_of, place, torch_dtype
from holdfast.live.state.wrappers import check_names


@dataclass(frozen=True)
class RestoreOptions:
    """Options of a restore: what may differ between checkpoint and live state."""

    only: tuple[str, ...] | None = None
    cast: bool = False
    strict: bool = True
    on_resize: dict[str, str] = field(default_factory=dict)
    mesh: Mesh | None = None
    """The live mesh, if the user named one."""
    kept: list[str] = field(default_factory=list)
    """Names of what this rank's live state has and a restore with these options left as it was."""

    def wanted(self, name: str) -> bool:
        return self.only is None or any(fnmatchcase(name, p) for p in self.only)


@dataclass(frozen=True)
class TorchTarget:
    """A live tensor that takes values by `copy_`: on a device, or with a bit that says how to read it."""

    tensor: torch.Tensor
    dtype: torch.dtype

    def memory(self) -> memoryview | None:
        return None

    def put(self, at: tuple[slice, ...], values: Array) -> None:
        with writing(self.tensor):
            copy_in(self.tensor[at], self.dtype, values)


def target_of(local: torch.Tensor, dtype: str, name: str) -> Target:
    """The memory of a live local tensor, for values of the saved dtype of tensor `name`."""
    saved = torch_dtype(dtype)
    if local.dtype != saved:
        from holdfast.live.restore.casting import CastTarget

        return CastTarget(local.detach(), saved, name)
    if local.is_cpu and not (local.is_conj() or local.is_neg()):
        array = array_of(local)
        return ArrayTarget(array.view(RAW[array.itemsize]))
    return TorchTarget(local.detach(), saved)


def _entry(checkpoint: Checkpoint, name: str) -> TensorEntry | None:
    index = checkpoint.manifest.find(name)
    return None if index is None else checkpoint.manifest.tensors[index]


def is_known(checkpoint: Checkpoint, name: str) -> bool:
    return checkpoint.manifest.find(name) is not None


def targets(
    checkpoint: Checkpoint, state: State, options: RestoreOptions
) -> tuple[Live, list[Change]]:
    """Every live tensor that the checkpoint may fill, with the optimizer states to be made for it.

    Those of masters that serve several weights are `holdfast.live.restore.masters`'.
    """
    live = Live(sources=sources_in(state), saved=partial(_entry, checkpoint))
    changes: list[Change] = []
    for key, value in state.items():
        for module in stages(value) or ():
            source = live.sources.of(module)
            if source.saves_rest:
                _add_own(live, key, module, options)
            else:
                refuse_own(key, module)
            _leave_ignored(checkpoint, live, key, module)
            frozen = _frozen(live, key, module)
            seen: dict[int, str] = {}
            check_names(key, unwrap(module))
            for kind, pairs in (
                ("param", named_parameters(module)),
                ("buffer", named_buffers(module)),
            ):
                for name, tensor in pairs:
                    full = f"{key}.{name}"
                    if id(tensor) in frozen or not options.wanted(full):
                        continue
                    first = seen.setdefault(id(tensor), full)
                    if first != full:
                        live.alias(full, first)
                    else:
                        add_tensor(live, full, kind, tensor, source.master(tensor), steady=True)
        source = live.sources.of(value)
        if is_optimizer(value) and not source.by_master:
            groups = source.groups(value)
            names = all_param_names(state, groups)
            changes += _optimizer_targets(checkpoint, live, key, value, names, options)
            for name, p in own_params(state, key, groups, names) if source.saves_rest else ():
                if options.wanted(name):
                    live.add(name, "param", p, steady=True)
        elif isinstance(value, torch.Tensor) and options.wanted(key):
            live.add(key, "tensor", value, steady=True)
        elif not is_stateful(value) and stages(value) is None:
            for path, tensor in tensors_in(value):
                if options.wanted(f"{key}.{path}"):
                    live.add(f"{key}.{path}", "tensor", tensor, steady=True)
    return live, changes


def _frozen(live: Live, key: str, module: nn.Module) -> set[int]:
    """Note which parameters are left out; return their ids."""
    if not trainable_marks:
        return set()
    from holdfast.live.state.trainable import find_frozen

    return find_frozen(live, key, module)


def _add_own(live: Live, key: str, module: nn.Module, options: RestoreOptions) -> None:
    """Add what modules have of their own, before the rest, which some of them move when asked."""
    found = customised(key, module)
    mine = Live()
    add_own(mine, key, found, steady=True)
    live.tensors |= {n: t for n, t in mine.tensors.items() if options.wanted(n)}
    live.aliases |= mine.aliases
    live.own[id(module)] = found


def _leave_ignored(checkpoint: Checkpoint, live: Live, key: str, module: nn.Module) -> None:
    """Mark what was saved under names that are ignored now, so that it is not looked for."""
    if (ignored := ignored_of(module)) is not None:
        start = f"{key}."
        names = [n for n in checkpoint.names() if n.startswith(start)]
        live.owned |= {n for n in names if ignored.has(n[len(start) :])}
        for name, tree in checkpoint.manifest.extras.items():
            if name.startswith(start) and name.endswith(OWN) and isinstance(tree, dict):
                path = name[len(start) : -len(OWN)]
                given_up = {entry for entry in tree if ignored.has(path + entry)}
                live.owned |= {start + path + entry for entry in given_up}
                if len(given_up) == len(tree):
                    live.owned.add(name)


def only_tensors(value: Any) -> bool:
    """True if a value is a tensor, or a dict or list of nothing else: its names say all of it."""
    if isinstance(value, dict):
        return bool(value) and all(map(only_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(only_tensors, value))
    return isinstance(value, torch.Tensor)


def saved_states(checkpoint: Checkpoint, key: str) -> dict[str, list[str]]:
    """States saved under an optimizer's key, by name of the parameter, each name if it is tied."""
    found: dict[str, dict[str, None]] = {}
    for name in checkpoint.names():
        state = checkpoint.manifest.tensors[checkpoint.index(name)].state
        if state not in KINDS and name.startswith(key + "."):
            states = found.setdefault(name[len(key) + 1 : -len(state) - 1], {})
            states[_outer(checkpoint, name, state) if "." in state else state] = None
    return {name: list(states) for name, states in found.items()}


def is_saved_apart(checkpoint: Checkpoint, name: str) -> bool:
    """True if a tensor was saved as the several tensors that it is made of."""
    return name + MADE_OF in checkpoint.manifest.extras


def _outer(checkpoint: Checkpoint, name: str, state: str) -> str:
    """The state that the tensor `name` is a part of; `state` itself if that is whole."""
    base, words = name.removesuffix(state), state.split(".")
    begins = (".".join(words[:n]) for n in range(1, len(words)))
    return next((s for s in begins if is_saved_apart(checkpoint, base + s)), state)


def _dtypes(checkpoint: Checkpoint) -> dict[str, str]:
    """Dtypes of the saved parameters, by name, both without and with the module's key in front."""
    params = [t for t in checkpoint.manifest.tensors if t.state == "param"]
    inside = {t.name.partition(".")[2]: t.dtype for t in params}
    return inside | {t.name: t.dtype for t in params}


@dataclass(frozen=True)
class Change:
    """A change to an optimizer's state of one parameter, made once the checkpoint is known to fit."""

    optimizer: Optimizer
    param: torch.Tensor
    made: dict[str, torch.Tensor]
    drop: list[str]
    """State that the saved run did not have: a parameter before its first gradient has none."""

    def apply(self) -> None:
        state = self.optimizer.state[self.param]
        state.update(self.made)
        for name in self.drop:
            del state[name]
        if not state:
            del self.optimizer.state[self.param]


def _optimizer_targets(
    checkpoint: Checkpoint,
    live: Live,
    key: str,
    optimizer: Any,
    all_names: dict[int, list[str]],
    options: RestoreOptions,
) -> list[Change]:
    """Add places for an optimizer's states to `live`; the changes returned are not made yet."""
    states = saved_states(checkpoint, key)
    names = {i: found[0] for i, found in all_names.items()}
    was = _dtypes(checkpoint) if options.cast else {}
    plain, kept = plain_states(checkpoint, key), _without_word(checkpoint, key, options)
    orders = memory_orders(checkpoint, key)
    changes = []
    source = live.sources.of(optimizer)
    groups = source.groups(optimizer)
    named = named_groups(groups, names)
    fitting = Fitting.of(checkpoint, key, groups, named, options) if source.saves_rest else None
    for number, ((group, _), pairs) in enumerate(zip(groups, named)):
        for name, p in pairs:
            master = source.master(p)
            inner, tensor = holder_of(optimizer, p, master)
            if inner is None:
                continue  # other ranks have it
            saved = [s for s in states.get(name, []) if options.wanted(f"{key}.{name}.{s}")]
            every = inner.state.get(tensor, {})
            if fitting is not None and not fitting.fits(number, name, inner, p, saved, every):
                if not options.strict:
                    live.unfit.add(id(p))
                    continue
            have = {k: v for k, v in every.items() if isinstance(v, torch.Tensor)}
            unlike = {
                s
                for s in saved
                if s in have and _is_unlike(checkpoint, f"{key}.{name}.{s}", have[s])
            }
            known = have if plain is None or not source.saves_rest else every
            there = {*saved, *(plain or {}).get(name, ())}
            is_told = options.only is None and not kept(name)
            drop = [k for k in known if k not in there] if is_told else []
            lies, dtype, full = orders.get(name, {}), was.get(name), f"{key}.{name}"
            made = {
                s: _made_apart(checkpoint, f"{full}.{s}", inner, tensor)
                if is_saved_apart(checkpoint, f"{full}.{s}")
                else _new_state(
                    checkpoint, f"{full}.{s}", tensor, group, master, dtype, lies.get(s)
                )
                for s in saved
                if s not in have or s in unlike
            }
            changes.append(Change(inner, tensor, made, drop))
            values = have | made
            for state in saved:
                add_state(live, full, state, p, values[state], master)
                add_ties(live, key, state, all_names.get(id(p), ()))
    if fitting is not None:
        live.problems += fitting.problems()
        live.idle += fitting.idle()
    return changes


def _without_word(
    checkpoint: Checkpoint, key: str, options: RestoreOptions
) -> Callable[[str], bool]:
    """Tell of a parameter's name whether the checkpoint says nothing of its states, not even that it had
    none: if the load is not strict, they stay."""
    tree = checkpoint.manifest.extras.get(key)
    groups = tree["$optimizer"]["groups"] if isinstance(tree, dict) and "$optimizer" in tree else []
    told = {name for group in groups for name in group["params"]}
    return lambda name: not options.strict and name not in told


def _is_unlike(checkpoint: Checkpoint, name: str, live: torch.Tensor) -> bool:
    """True if a state is in one memory and was saved as several tensors, or the other way round.
    UsageError for a live one of a kind that is not known."""
    if is_apart(live) == is_saved_apart(checkpoint, name):
        return False
    if is_apart(live):
        from holdfast.live.state.making import says

        if says(live, name) is None:
            place(live, name)
    return True


def _made_apart(
    checkpoint: Checkpoint, name: str, optimizer: Optimizer, p: torch.Tensor
) -> torch.Tensor:
    from holdfast.live.state.making import made

    said = checkpoint.manifest.extras[name + MADE_OF]
    return made(name, said, optimizer, p, partial(_entry, checkpoint))


def _new_state(
    checkpoint: Checkpoint,
    name: str,
    p: torch.Tensor,
    group: dict[str, Any],
    master: Master | None,
    was: str | None,
    order: list[int] | None,
) -> torch.Tensor:
    """Memory for a saved state: cut like its parameter if it has its shape, else as `empty_beside` says.
    Numbers are on the parameter's device, as torch's optimizers load them, but for counts that stay.

    It gets the parameter's dtype if it was saved in the saved parameter's (`was`); its dims lie in that
    `order`.
    """
    info = checkpoint.info(name)
    dtype = torch_dtype(info.dtype)
    if info.dtype == was and info.shape == tuple(p.shape) != ():
        dtype = p.dtype
    is_count = name.endswith(".step")
    with torch.no_grad():
        if info.shape == () and (is_count or p.shape != ()):
            stays = is_count and counts_stay(group)
            return torch.empty((), dtype=dtype, device="cpu" if stays else p.device)
        if order is not None and master is None and not isinstance(p, DTensor):
            return empty_in(order, info.shape, dtype, p.device, name)
        if info.shape == tuple(p.shape) or (master is not None and info.shape):
            return torch.empty_like(p, dtype=dtype, requires_grad=False)
        if isinstance(p, DTensor):
            from holdfast.live.restore.beside import empty_beside

            return empty_beside(checkpoint, name, p, dtype)
        return torch.empty(info.shape, dtype=dtype, device=p.device)


def counts_stay(group: dict[str, Any]) -> bool:
    """True if torch's optimizers keep the counts of a group, states called "step", on the CPU."""
    return not (group.get("capturable") or group.get("fused"))


def empty_in(
    order: Sequence[int],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    name: str,
) -> torch.Tensor:
    """Memory for a state of that shape with its dims in that order.  FormatError if it is none."""
    if sorted(order) != list(range(len(shape))):
        raise FormatError(
            f"malformed extras: {name!r} of shape {shape} lies in the order {order!r}"
        )
    outer = torch.empty([shape[d] for d in order], dtype=dtype, device=device)
    return outer.permute([list(order).index(d) for d in range(len(shape))])


def empty_alike(
    tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor | None:
    """Memory on the device of a tensor of an object, and cut like that; None if it has another shape, or is
    of a kind that nothing can be read into."""
    if not isinstance(tensor, DTensor) and type(tensor) not in PLAIN:
        return None
    try:
        check_kind(memory_of(tensor), "")
        place(tensor, "")
    except HoldfastError:
        return None
    if tuple(tensor.shape) != shape:
        return None
    return torch.empty_like(tensor, dtype=dtype, requires_grad=False)
