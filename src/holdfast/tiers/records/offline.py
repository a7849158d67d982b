"""Replay without the training script: from a root's full step and its records to any recorded step.

Model and optimizers are made from what was saved: parameters by their names, optimizers by their class.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.base.errors import NotFound, NotRecoverable, UsageError
from holdfast.core.checkpoint.names import committed
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.group import meet
from holdfast.core.store import Store
from holdfast.formats.read.unpickle import understood
from holdfast.live.restore.targets import RestoreOptions
from holdfast.live.restore_into_state import restore
from holdfast.live.state.customised import OWN_EXTRA
from holdfast.live.state.ignoring import trainable_marks
from holdfast.live.state.nameless_parameters import in_saved_order
from holdfast.live.state.placed import torch_dtype
from holdfast.live.state.recognising import State
from holdfast.live.step_loading import tell_exactness
from holdfast.tiers.records.log import Log, RecordedStep, open_log
from holdfast.tiers.records.replay import Replay, merged_groups
from holdfast.tiers.records.segment import Identity

IN_THE_SCRIPT = "Checkpointer.restore(step) replays it, in the training script itself"
_PARTS = ("param", "buffer")


def register(
    module: nn.Module, name: str, tensor: torch.Tensor, *, param: bool, trained: bool = True
) -> None:
    """Register a parameter or buffer under its dotted name; inner modules are made."""
    inner, leaf = _inner_module(module, name)
    if param:
        has_gradient = trained and (tensor.is_floating_point() or tensor.is_complex())
        inner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=has_gradient))
    else:
        inner.register_buffer(leaf, tensor)


def _inner_module(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that a dotted name lies in, and the last part of the name; inner modules are made."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]
    return module, leaf


class Extra(nn.Module):  # type: ignore[misc]
    """A module in place of the script's, with extra state that is kept as it is."""

    def get_extra_state(self) -> Any:
        return self.__dict__.get("_extra_state")

    def set_extra_state(self, state: Any) -> None:
        self.__dict__["_extra_state"] = state


def accept_extra(module: nn.Module, name: str) -> None:
    """Have the module that this extra state belongs to accept it."""
    inner, _ = _inner_module(module, name)
    inner.__class__ = Extra


class OpaqueState:
    """An object in place of the script's, whose state is kept as it is."""

    def __init__(self) -> None:
        self.value: Any = {}

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


def replay_to(store: Store, step: int) -> tuple[State, int, list[str]]:
    """Replay records up to `step`.

    Returns the state, the full step that the replay began from, and the keys of state that was left out,
    as each rank has its own.  NotFound if no records lead there.
    """
    with understood("recorded", store.url):
        return _replay_to(store, step)


def _replay_to(store: Store, step: int) -> tuple[State, int, list[str]]:
    log, _ = open_log(store)
    base, steps = _base_and_records(store, log, step)
    checkpoint = Checkpoint.open(store.url, base)
    state = state_of(checkpoint, steps)
    lost = sorted(checkpoint.manifest.per_rank) if checkpoint.manifest.layout.world > 1 else []
    options = RestoreOptions(on_resize=dict.fromkeys(lost, "fresh"))
    group = meet()
    try:
        restore(checkpoint, state, group, options)
        tell_exactness(checkpoint.manifest)
        last = Replay(log, group, state, options).run(steps)
        reached = base if last is None else last.step
        if reached != step:
            raise NotRecoverable(
                f"the record of the step after {reached} is damaged", step=reached + 1
            )
    finally:
        group.close()
    for key in lost:
        state.pop(key, None)
    return state, base, lost


def _base_and_records(store: Store, log: Log, step: int) -> tuple[int, list[RecordedStep]]:
    """The full step from which the fewest records lead to the newest state of number `step`, and these
    records."""
    saved = committed(store)
    ways: list[tuple[Identity, int, list[RecordedStep]]] = []
    for base in saved:
        steps = log.after((base.run, base.step))
        for n in (n for n, one in enumerate(steps) if one.step == step):
            ways.append((steps[n].identity, base.step, steps[: n + 1]))
    full = max(((s.run, s.step) for s in saved if s.step == step), default=(-1, step))
    way = max(ways, key=lambda way: way[:2], default=None)
    if way is not None and way[0] >= full:
        return way[1], way[2]
    recorded = sorted({s.step for s in log.steps.values()})
    hint = f"recorded: {recorded[0]} to {recorded[-1]}" if recorded else "nothing is recorded"
    if full[0] >= 0:
        hint = f"step {step} is there as a full step, which `holdfast convert` takes"
    raise NotFound(f"no records of {store.url} lead to step {step}", step=step, hint=hint)


def state_of(checkpoint: Checkpoint, steps: list[RecordedStep]) -> State:
    """Objects that a full step and its records can be restored into: modules, optimizers, and others whose
    state is kept as it is."""
    own = [name for name in checkpoint.manifest.extras if name.endswith(f".{OWN_EXTRA}")]
    if own:
        raise NotRecoverable(
            f"{own[0].removesuffix('.' + OWN_EXTRA)!r} is a module with its own way to save and load",
            hint=IN_THE_SCRIPT,
        )
    optimizers = sorted({k for step in steps for one in step.segments for k in one.header.kinds})
    state, params = _modules_and_tensors(checkpoint, optimizers)
    for key in optimizers:
        state[key] = _optimizer(_describing_step(key, steps), key, params, state, checkpoint)
    _add_opaque(checkpoint, steps, state)
    return state


def _modules_and_tensors(
    checkpoint: Checkpoint, optimizers: Collection[str]
) -> tuple[State, dict[str, torch.Tensor]]:
    """Modules and tensors of the full step, by key; and by name all parameters: those of modules, and those
    that only an optimizer has."""
    state: State = {}
    params: dict[str, torch.Tensor] = {}
    bare: State = {}
    for name in checkpoint.names():
        info = checkpoint.info(name)
        if info.state in _PARTS and name not in checkpoint.manifest.aliases:
            key, _, rest = name.partition(".")
            tensor = torch.zeros(info.shape, dtype=torch_dtype(info.dtype))
            if key in optimizers:
                params[name.removesuffix(".value")] = nn.Parameter(tensor)
            else:
                module = state.setdefault(key, nn.Module())
                register(module, rest, tensor, param=info.state == "param")
        elif info.state == "tensor" and "." not in name:
            bare[name] = torch.zeros(info.shape, dtype=torch_dtype(info.dtype))
    for name, (dtype, shape) in checkpoint.left_out.items():
        key, _, rest = name.partition(".")
        tensor = torch.empty(shape, dtype=torch_dtype(dtype))  # its memory is never touched
        register(state.setdefault(key, nn.Module()), rest, tensor, param=True, trained=False)
        trainable_marks[state[key]] = None
    for key, module in state.items():
        params |= {f"{key}.{name}": p for name, p in module.named_parameters()}
    return state | bare, params


def _describing_step(key: str, steps: list[RecordedStep]) -> RecordedStep:
    """The step by which an optimizer is made: the first with hooks (they are refused), else the first
    that it made, else the first that knows it."""
    made = [step for step in steps if key in step.applied()]
    hooked = (s for s in made if any(one.hooks for one in s.applied()[key].values()))
    known = (s for s in steps if any(key in one.header.kinds for one in s.segments))
    return next(hooked, made[0] if made else next(known))


def _add_opaque(checkpoint: Checkpoint, steps: list[RecordedStep], state: State) -> None:
    """Add objects in place of the script's, which keep extras as they are."""
    recorded = {
        key for step in steps for _, record in step.records.values() for key in record.notes
    }
    for key, tree in checkpoint.manifest.extras.items():
        first, _, name = key.partition(".")
        is_extra = name.rpartition(".")[2] == "_extra_state" and first in state
        if not is_extra and ("." in key or key in state):
            continue
        if _has_tensors(tree) and key in recorded:
            raise NotRecoverable(f"{key!r} has tensors of the script's own", hint=IN_THE_SCRIPT)
        if is_extra:
            accept_extra(state[first], name)
        else:
            state[key] = OpaqueState()
    for key in checkpoint.manifest.per_rank:
        if "." not in key:
            state.setdefault(key, OpaqueState())


def _optimizer(
    step: RecordedStep,
    key: str,
    params: dict[str, torch.Tensor],
    state: State,
    checkpoint: Checkpoint,
) -> Optimizer:
    """Make an optimizer over these parameters, as `step` has recorded it."""
    kinds = {segment.header.kinds.get(key, "") for segment in step.segments}
    module, _, name = kinds.pop().partition(":")
    kind = _class(module, name)
    if kind is None:
        raise UsageError(
            f"{key!r} is a {module}.{name}, which cannot be made without the training script",
            hint=IN_THE_SCRIPT,
        )
    applied = step.applied().get(key, {})
    if any(one.hooks for one in applied.values()):
        raise UsageError(
            f"{key!r} had hooks after its steps, which may have written to weights",
            hint=IN_THE_SCRIPT,
        )
    served = [segment.header.modules.get(key) for segment in step.segments]
    modules = list(state) if None in served else [m for one in served for m in one or ()]
    keys = dict.fromkeys([key, *modules])
    if not applied and key in checkpoint.manifest.per_rank:
        raise NotRecoverable(f"{key!r} has other values on each rank", hint=IN_THE_SCRIPT)
    tree = merged_groups(step, key) if applied else checkpoint.manifest.extras[key]
    groups = tree["$optimizer"]["groups"]
    _check_ties(checkpoint.manifest.extras.get(key), groups, params, keys)
    made: Optimizer = kind(
        [
            {
                "params": [_param(n, params, keys) for n in g["params"]],
                **_kernel_options(g["hyper"]),
            }
            for g in groups
        ],
        lr=1.0,
    )
    for mine, saved in zip(made.param_groups, groups):
        mine["param_names"] = list(saved["params"])
    in_saved_order.add(made)
    return made


def _class(module: str, name: str) -> type[Optimizer] | None:
    """Torch's optimizer of this name; None for anything else, which is not imported."""
    if module != "torch.optim" and not module.startswith("torch.optim."):
        return None
    try:
        found = getattr(importlib.import_module(module), name, None)
    except (ImportError, ValueError):
        return None
    is_optimizer = isinstance(found, type) and issubclass(found, Optimizer)
    return found if is_optimizer and found is not Optimizer else None


def _kernel_options(hyper: dict[str, Any]) -> dict[str, bool]:
    """The options that choose an optimizer's kernels, as far as last bits depend on them on CPUs."""
    names = ("fused",) if hyper.get("capturable") else ("foreach", "fused")
    return {name: hyper[name] for name in names if isinstance(hyper.get(name), bool)}


def _param(name: str, params: dict[str, torch.Tensor], keys: Collection[str]) -> torch.Tensor:
    """The parameter of this name.  NotFound; UsageError if several modules have one."""
    names = _full_names(name, params, keys)
    if not names:
        raise NotFound(f"no parameter {name!r} in the full step")
    if len(names) > 1:
        raise UsageError(
            f"the records do not say which parameter {name!r} is: {' or '.join(names)}",
            hint=IN_THE_SCRIPT,
        )
    return params[names[0]]


def _full_names(name: str, params: dict[str, torch.Tensor], keys: Collection[str]) -> list[str]:
    """Names in `params` that a parameter may have: with one of `keys` before its name, or in it already."""
    full = [f"{key}.{name}" for key in keys] + [name] * (name.partition(".")[0] in keys)
    return [f for f in full if f in params]


def _check_ties(
    saved: Any, groups: list[Any], params: dict[str, torch.Tensor], keys: Collection[str]
) -> None:
    """Raise UsageError for a parameter that several modules share: the modules made here do not share it.

    A full step has all names of an optimizer's parameters, records have the first name of each.
    """
    given = {name for group in groups for name in group["params"]}
    for group in () if saved is None else saved["$optimizer"]["groups"]:
        for name in group["params"]:
            if name not in given and _full_names(name, params, keys):
                raise UsageError(f"{name!r} is a parameter of several modules", hint=IN_THE_SCRIPT)


def _has_tensors(tree: Any) -> bool:
    if isinstance(tree, dict):
        return "$at" in tree or any(map(_has_tensors, tree.values()))
    return isinstance(tree, list) and any(map(_has_tensors, tree))
