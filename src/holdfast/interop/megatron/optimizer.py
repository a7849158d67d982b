"""Optimizers: parameter groups, and the step counter that all parameters share.

Megatron-Core writes the hyper-parameters of each group and not which parameters were in it: it groups them
anew when it loads.  So does this, by Megatron's own rule: biases and vectors have no weight decay, experts
have groups of their own, and so has the embedding where its learning rate is decoupled.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.errors import FormatError
from holdfast.format.extras import inlined
from holdfast.interop.foreign import Foreign
from holdfast.interop.megatron.rest import ExtrasValues, of_ref
from holdfast.interop.torchfile import TensorRef
from holdfast.layout import whole

Group = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]


def _inner(saved: Any) -> Iterator[dict[str, Any]]:
    """The torch optimizers in what Megatron has saved of its own: one, or several in a chain."""
    if isinstance(saved, dict) and "param_groups" in saved:
        yield saved
    elif isinstance(saved, dict) and "optimizer" in saved:
        yield from _inner(saved["optimizer"])
    elif isinstance(saved, dict) and saved and all(isinstance(k, int) for k in saved):
        for _, one in sorted(saved.items()):
            yield from _inner(one)
    elif isinstance(saved, list):
        for one in saved:
            yield from _inner(one)


def scaler_of(saved: Any) -> Any:
    """The loss scaler's state, which all optimizers of a chain share."""
    found = (
        saved
        if isinstance(saved, list)
        else list(saved.values())
        if isinstance(saved, dict)
        else []
    )
    for one in [saved, *found]:
        if isinstance(one, dict) and "grad_scaler" in one:
            return one["grad_scaler"]
    return None


def groups_of(saved: Any) -> list[Group]:
    """Every group's hyper-parameters, with what Megatron tells groups apart by."""
    found = [g for one in _inner(saved) for g in one["param_groups"]]
    if not all(isinstance(g, dict) for g in found):
        raise FormatError("malformed param_groups")
    return [{k: v for k, v in g.items() if k != "params"} for g in found]


def grouped(groups: list[Group], shapes: Shapes, args: Mapping[str, Any]) -> list[list[str]] | None:
    """The parameters of each group; None if Megatron's rule does not tell them."""
    found: list[list[str]] = [[] for _ in groups]
    marks = [_mark_of_group(g) for g in groups]
    matters = [len({m[i] for m in marks}) > 1 for i in range(3)]
    for name, shape in shapes.items():
        mark = _mark_of_param(name, shape, args)
        hits = [
            number
            for number, m in enumerate(marks)
            if all(a == b or not counts for a, b, counts in zip(m, mark, matters))
        ]
        if len(hits) != 1:
            return None
        found[hits[0]].append(name)
    return found


def _mark_of_group(g: Group) -> tuple[bool, bool, bool]:
    """(no weight decay, experts, a learning rate of its own)"""
    own_rate = bool(g.get("is_decoupled_lr")) or g.get("default_config") is False
    return g.get("wd_mult", 1.0) == 0.0, bool(g.get("is_expert_parallel")), own_rate


def _mark_of_param(
    name: str, shape: tuple[int, ...], args: Mapping[str, Any]
) -> tuple[bool, bool, bool]:
    decays = bool(args.get("apply_wd_to_qk_layernorm")) and (
        "q_layernorm." in name or "k_layernorm." in name
    )
    no_decay = (len(shape) == 1 or name.endswith(".bias")) and not decays
    own_rate = name in ("embedding.word_embeddings.weight", "output_layer.weight")
    return no_decay, ".local_experts." in name, own_rate


def steps_of(saved: Any, groups: list[Group]) -> TensorRef | float | None:
    """Number of steps taken: a tensor that is stored once, or a number in the groups."""
    for one in _inner(saved):
        state = one.get("state")
        step = state.get("common_step") if isinstance(state, dict) else None
        if isinstance(step, (TensorRef, int, float)):
            return step
    found = {g["step"] for g in groups if isinstance(g.get("step"), (int, float))}
    if len(found) > 1:
        raise FormatError(f"parameter groups at different steps: {sorted(found)}")
    return next(iter(found), None)


def extra_of(
    values: ExtrasValues,
    groups: list[Group],
    members: list[list[str]],
    steps: TensorRef | float | None,
) -> dict[str, Any]:
    """An optimizer as extras hold it.  A step that is a number becomes a tensor of each parameter."""
    plain: dict[str, Any] = {}
    if isinstance(steps, (int, float)):
        step = {"step": inlined("float32", (), struct.pack("<f", steps))}
        plain = {name: step for params in members for name in params}
    hypers = [
        {"params": params, "hyper": values.encode("optim", _hyper(group))}
        for group, params in zip(groups, members)
    ]
    return {"$optimizer": {"groups": hypers, "state": plain}}


def _hyper(group: Group) -> Group:
    """Drop `is_expert_parallel`: it tells how experts lie on ranks, not how they are trained."""
    return {k: v for k, v in group.items() if k != "is_expert_parallel"}


def step_tensors(steps: TensorRef | float | None, params: list[str]) -> list[Foreign]:
    """The counter that is stored once, as a state of every parameter."""
    if not isinstance(steps, TensorRef):
        return []
    return [of_ref(f"optim.{name}.step", steps, "step", whole(steps.shape)) for name in params]
