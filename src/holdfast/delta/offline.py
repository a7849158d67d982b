"""Replay without the training script: from a root's full step and its records to any recorded step.

Model and optimizers are made from what was saved: parameters by their names, optimizers by their class.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.capture.exactness import tell_exactness
from holdfast.checkpoint.names import committed
from holdfast.checkpoint.opened import Checkpoint
from holdfast.delta.log import Log, Step, open_log
from holdfast.delta.replay import Replay, merged_groups
from holdfast.delta.segment import Identity
from holdfast.errors import NotFound, NotRecoverable, UsageError
from holdfast.group import Group
from holdfast.state.live import State
from holdfast.state.placed import torch_dtype
from holdfast.state.restore import restore
from holdfast.state.targets import Options
from holdfast.store import Store

IN_THE_SCRIPT = "Checkpointer.restore(step) replays it, in the training script itself"
_PARTS = ("param", "buffer")


def put(module: nn.Module, name: str, tensor: torch.Tensor, *, param: bool) -> None:
    """Give a module a tensor by its dotted name; the modules between are made."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]
    if param:
        grows = tensor.is_floating_point() or tensor.is_complex()
        module.register_parameter(leaf, nn.Parameter(tensor, requires_grad=grows))
    else:
        module.register_buffer(leaf, tensor)


class Carried:
    """State of an object that is not here: taken and given back as it is."""

    def __init__(self) -> None:
        self.value: Any = {}

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


def replay_to(store: Store, step: int) -> tuple[State, int, list[str]]:
    """The state after a recorded step, the full step that it was replayed from, and what could not come:
    keys of state that each rank kept for itself.  NotFound if no records lead there."""
    log, _ = open_log(store)
    base, steps = _way(store, log, step)
    checkpoint = Checkpoint.open(store.url, base)
    state = state_of(checkpoint, steps)
    lost = sorted(checkpoint.manifest.per_rank) if checkpoint.manifest.layout.world > 1 else []
    options = Options(on_resize=dict.fromkeys(lost, "fresh"))
    group = Group()
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


def _way(store: Store, log: Log, step: int) -> tuple[int, list[Step]]:
    """The full step from which the fewest records lead to the newest state of this number, and they."""
    saved = committed(store)
    found: list[tuple[Identity, int, list[Step]]] = []
    for base in saved:
        steps = log.after((base.run, base.step))
        for n in (n for n, one in enumerate(steps) if one.step == step):
            found.append((steps[n].identity, base.step, steps[: n + 1]))
    full = max(((s.run, s.step) for s in saved if s.step == step), default=(-1, step))
    way = max(found, key=lambda way: way[:2], default=None)
    if way is not None and way[0] >= full:
        return way[1], way[2]
    recorded = sorted({s.step for s in log.steps.values()})
    hint = f"recorded: {recorded[0]} to {recorded[-1]}" if recorded else "nothing is recorded"
    if full[0] >= 0:
        hint = "it is there as a full step, which `holdfast convert` takes"
    raise NotFound(f"no records of {store.url} lead to step {step}", step=step, hint=hint)


def state_of(checkpoint: Checkpoint, steps: Iterable[Step]) -> State:
    """Objects that take a full step and its records: modules, optimizers, and the rest as it is."""
    state: State = {}
    steps = list(steps)
    optimizers = sorted({key for step in steps for key in step.applied()})
    params: dict[str, torch.Tensor] = {}
    """Those that only an optimizer has, and then those of modules."""
    for name in checkpoint.names():
        info = checkpoint.info(name)
        if info.state in _PARTS and name not in checkpoint.manifest.aliases:
            key, _, rest = name.partition(".")
            tensor = torch.zeros(info.shape, dtype=torch_dtype(info.dtype))
            if key in optimizers:
                params[name.removesuffix(".value")] = nn.Parameter(tensor)
            else:
                put(state.setdefault(key, nn.Module()), rest, tensor, param=info.state == "param")
    params |= {
        f"{key}.{name}": p for key, module in state.items() for name, p in module.named_parameters()
    }
    for key in optimizers:
        made = [s for s in steps if key in s.applied()]
        hooked = (s for s in made if any(one.hooks for one in s.applied()[key].values()))
        state[key] = _optimizer(next(hooked, made[0]), key, params, state)
    recorded = {
        key for step in steps for _, record in step.records.values() for key in record.notes
    }
    for key, tree in checkpoint.manifest.extras.items():
        if "." not in key and key not in state:
            if _has_tensors(tree) and key in recorded:
                raise NotRecoverable(f"{key!r} has tensors of the script's own", hint=IN_THE_SCRIPT)
            state[key] = Carried()
    for key in checkpoint.manifest.per_rank:
        if "." not in key:
            state.setdefault(key, Carried())
    return state


def _optimizer(step: Step, key: str, params: dict[str, torch.Tensor], state: State) -> Optimizer:
    kinds = {found.header.kinds.get(key, "") for found, _ in step.records.values()}
    module, _, name = kinds.pop().partition(":")
    if not module.startswith("torch.optim"):
        raise UsageError(
            f"{key!r} is a {module}.{name}, which cannot be made without the training script",
            hint=IN_THE_SCRIPT,
        )
    if any(one.hooks for one in step.applied()[key].values()):
        raise UsageError(
            f"{key!r} had hooks after its steps, which may have written to weights",
            hint=IN_THE_SCRIPT,
        )
    kind = getattr(importlib.import_module(module), name)
    groups = merged_groups(step, key)["$optimizer"]["groups"]
    return kind(
        [{"params": [_param(n, params, (key, *state)) for n in g["params"]]} for g in groups],
        lr=1.0,
    )


def _param(name: str, params: dict[str, torch.Tensor], keys: Iterable[str]) -> torch.Tensor:
    found = [params[f] for f in (name, *(f"{key}.{name}" for key in keys)) if f in params]
    if not found:
        raise NotFound(f"no parameter {name!r} in the full step")
    return found[0]


def _has_tensors(tree: Any) -> bool:
    if isinstance(tree, dict):
        return "$at" in tree or any(map(_has_tensors, tree.values()))
    return isinstance(tree, list) and any(map(_has_tensors, tree))
