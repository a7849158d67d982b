"""Collecting all of a live state, named and placed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from holdfast.base.arguments import rules_of
from holdfast.base.errors import warn_user
from holdfast.live.sources import Source, Sources
from holdfast.live.state.customised import Own, add_made, add_own, customised, refuse_own
from holdfast.live.state.devices import devices_in, devices_of
from holdfast.live.state.live import (
    RULES,
    Live,
    LiveTensor,
    State,
    add_module,
    add_order,
    check_keys,
    encode,
    in_order,
    is_loader,
    is_optimizer,
    is_stateful,
    kind_of,
    loaded_states,
    sources_in,
    stages,
    tensors_of,
    unwrap,
)
from holdfast.live.state.merged import tell_merged
from holdfast.live.state.observer import calls_hooks
from holdfast.live.state.optimizers import (
    add_common,
    add_optimizer,
    all_param_names,
    named_groups,
    own_params,
    refuse_common,
)
from holdfast.live.state.outside import outside, tell_outside
from holdfast.live.state.own_errors import naming
from holdfast.live.state.rng import Rng
from holdfast.live.state.several import as_seen, parts_of
from holdfast.live.state.shared_states import tell_shared
from holdfast.live.state.wrapped import bare, check_own_state, stepping
from holdfast.live.state.wrappers import check_names


class RunState:
    """The things that a run keeps: what the script handed over, and the generators of random numbers."""

    def __init__(self, given: State, on_resize: dict[str, str]) -> None:
        self.given = given
        self.on_resize = on_resize
        """What becomes of extras when the number of ranks changes, by key."""
        self._rng = Rng()
        self.is_complete = False
        """True once there was a state to save or to restore into."""
        self._placed: dict[str, LiveTensor] = {}
        """The steady tensors of the last save: others may be gone, and are not kept alive."""

    def everything(self) -> State:
        """The state as it is now, with the generators, in one order on all ranks."""
        if self.generators is not None and self.generators.devices is None:
            self.generators.devices = devices_of(
                t
                for value in self.given.values()
                for m in stages(value) or ()
                for t in tensors_of(m)
            )
        return in_order({"rng": self._rng, **self.given})

    @property
    def generators(self) -> Rng | None:
        """The generators; None if the state has something else in their place."""
        rng = self.given.get("rng", self._rng)
        return rng if isinstance(rng, Rng) else None

    @property
    def num_tensors(self) -> int:
        """Number of parameters and states at the last save."""
        return len(self._placed)

    def check(self) -> None:
        """Check the state, some of which may have come late."""
        check_keys(
            self.given, "Checkpointer.state is still empty: add what is to be saved to it first"
        )
        rules_of(self.on_resize, RULES, (*self.given, "rng"), "Checkpointer", "on_resize")

    def collect(self) -> Live:
        """Name and place everything; see `collect`."""
        live = collect(self.everything(), self.on_resize, self._placed)
        self._placed = {name: t for name, t in live.tensors.items() if t.steady}
        if self.generators is not None:
            self.generators.devices = devices_in(live)
        return live


def collect(
    state: State,
    on_resize: dict[str, str] | None = None,
    before: Mapping[str, LiveTensor] | None = None,
) -> Live:
    """Name and place everything.  Shares memory with the live tensors; encodes the extras.

    `on_resize` declares, by key, what becomes of extras when the number of ranks changes.  `before`: the
    tensors that were found the last time; those that lie where they did are not placed again.  The first
    time, what of a module or an optimizer would not be saved is a UsageError.
    """
    check_keys(state)
    state = in_order(state)
    live = Live(keys=set(state), before=before or {})
    given, state = state, as_seen(state)
    if not before and any(map(_has_hooks, state.values())):
        from holdfast.live.state.in_hooks import check_in_backward, tell_gradient_hooks, tell_hooks

        check_in_backward(given)
        tell_gradient_hooks(given)
        tell_hooks(state)
    sources = sources_in(state)
    live.trained = _trained(state, sources)
    for key, value in state.items():
        num_before = len(live.tensors)
        if value is not None and not (isinstance(value, (list, tuple, dict)) and not value):
            live.kinds[key] = kind_of(value), type(given[key]).__qualname__
        modules = stages(value)
        if modules is not None:
            size = _size(live)
            for module in modules:
                source = sources.of(module)
                _add_module(live, key, module, source, on_resize)
                if not source.saves_rest:  # its framework makes the optimizers, too
                    live.moved.update(islice(live.tensors, num_before, None))
            if not before and _size(live) == size:
                _tell_empty(key, modules)
        elif is_optimizer(value):
            source = sources.of(value)
            if source.saves_rest:
                names = _add_torchs(live, key, value, source, state, on_resize)
                if not before:
                    _check_own_states(key, given[key], value, state)
                    tell_shared(key, value, names)
            else:
                _add_frameworks(live, key, value, source, state)
            if _is_seen(value):
                _note_moved(live, num_before)
        else:
            add_plain(live, key, value, on_resize)
    if not before:
        tell_outside(state)
        tell_merged(state)
    live.before = {}
    return live


def _note_moved(live: Live, first: int) -> None:
    """Note that an optimizer moves its tensors, which are those from number `first` on: its states, and
    parameters that only it has."""
    for name in islice(live.tensors, first, None):
        t = live.tensors[name]
        if t.state != "param" or id(t.source) in live.trained:
            live.moved.add(name)


def _trained(state: State, sources: Sources) -> set[int]:
    """Return the parameters, by id, that optimizers of the state may move, but for those whose steps call
    no hooks, and so wait for no copy."""
    found: set[int] = set()
    for value in state.values():
        if is_optimizer(value) and _is_seen(value):
            stepped = {id(p) for one in parts_of(value).values() for p in _states(one)}
            groups = sources.of(value).groups(value)
            params = [p for _, some in groups for p in some]
            # one that is frozen for now has its states: a discriminator, while the generator trains
            found |= {id(p) for p in params if p.requires_grad or id(p) in stepped}
    return found


def _states(optimizer: Any) -> Iterable[Any]:
    """Whatever an optimizer has states of."""
    return stepping(optimizer).state if isinstance(optimizer, Optimizer) else ()


def _is_seen(optimizer: Any) -> bool:
    """True if all steps of an optimizer call torch's hooks.  What a framework has in its place has torch's
    inside."""
    parts = parts_of(optimizer).values()
    return all(not isinstance(part, Optimizer) or calls_hooks(bare(part)) for part in parts)


def _has_hooks(value: Any) -> bool:
    """True if modules have hooks, of DDP's or of parameters, at which more of the training may hang."""
    modules = value if isinstance(value, (list, tuple)) else [value]
    parts = [one for m in modules if isinstance(m, nn.Module) for one in m.modules()]
    return any(isinstance(part, DistributedDataParallel) for part in parts) or any(
        getattr(p, "_post_accumulate_grad_hooks", None) or hasattr(p, "_in_backward_optimizers")
        for part in parts
        for p in part._parameters.values()
        if p is not None
    )


def _add_module(
    live: Live, key: str, module: nn.Module, source: Source, on_resize: dict[str, str] | None
) -> None:
    """Add all that is saved of a module."""
    first = not live.before
    if first:
        check_names(key, unwrap(module))
    own: list[Own] = []
    if source.saves_rest:
        own = customised(key, module, first=first)
    elif first:
        refuse_own(key, module, first=True)
    add_module(live, key, module, source, on_resize)
    add_own(live, key, own)
    add_made(live, key, own, on_resize)


def _add_torchs(
    live: Live,
    key: str,
    optimizer: Any,
    source: Source,
    state: State,
    on_resize: dict[str, str] | None,
) -> dict[int, list[str]]:
    """Add all that is saved of an optimizer that no framework tells of; return its parameters' names."""
    groups = source.groups(optimizer)
    names = all_param_names(state, groups)
    for name, p in own_params(state, key, groups, names):
        live.add(name, "param", p, steady=True)
    add_optimizer(live, key, optimizer, source, names)
    add_common(live, key, optimizer, on_resize)
    if any(id(p) not in names for _, params in groups for p in params):
        from holdfast.live.state.positions import note_positions

        named = named_groups(groups, {i: found[0] for i, found in names.items()})
        note_positions(live, key, optimizer, named, state)
    return names


def _add_frameworks(live: Live, key: str, optimizer: Any, source: Source, state: State) -> None:
    """Add all that is saved of a framework's optimizer."""
    if not live.before:
        refuse_common(key, optimizer, source)
    live.extras[f"{key}.engine"] = encode(live, f"{key}.engine", source.extras(), inline=True)
    names = all_param_names(state, source.groups(optimizer))
    add_optimizer(live, key, optimizer, source, names)


def _size(live: Live) -> int:
    return len(live.tensors) + len(live.aliases) + len(live.extras)


def _tell_empty(key: str, modules: Iterable[nn.Module]) -> None:
    """HoldfastWarning for a module that was handed over, and of which nothing is saved; torch's own that
    have no parameters have nothing to lose."""
    for module in modules:
        if not all(type(part).__module__.startswith("torch.nn.") for part in module.modules()):
            warn_user(
                f"{key!r}: nothing is saved of this {type(module).__qualname__}, for its state_dict() is "
                "empty: what it keeps must be parameters, persistent buffers or get_extra_state() (metrics "
                "of torchmetrics: metric.persistent(True))"
            )


def _check_own_states(key: str, given: Any, saved: Any, state: State) -> None:
    """Check the states of what was handed over, and of the optimizers saved in its place."""
    for label, part in parts_of(saved).items():
        check_own_state(key + label, part, part, outside(part, state))
    if isinstance(given, Optimizer) and given is not saved:
        # torchtitan's makes a step to have states to tell of, if there are none
        if all(part.state for part in parts_of(saved).values()):
            check_own_state(key, given, saved, outside(given, state))


def add_plain(live: Live, key: str, value: Any, on_resize: dict[str, str] | None) -> None:
    """Add a value that is neither a module nor an optimizer."""
    if is_stateful(value):
        rule = (on_resize or {}).get(key) or getattr(value, "on_resize", None)
        if rule or is_loader(value):
            live.rules[key] = rule or "ask"
        with naming(key, value, "state_dict"):
            saved = loaded_states.of(value)
        live.extras[key] = encode(live, key, saved, inline=True)
        if is_loader(value):
            add_order(live, key, value, saved, rule)
    elif isinstance(value, torch.Tensor):
        live.add(key, "tensor", value, steady=False)
    else:
        live.extras[key] = encode(live, key, value, inline=False)
