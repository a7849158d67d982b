"""Reading all other state of a DeepSpeed checkpoint as extras by key.

optim       the optimizer's groups with their hyper-parameters, and states that are plain numbers
scheduler   the learning-rate scheduler's state_dict
scaler      the loss scaler's fields
client      what the user gave to `save_checkpoint(client_state=...)`
deepspeed   counters, configuration, version: everything else
optim.engine  the part that a live engine needs, in the form that holdfast saves
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from holdfast.core.format.extras import inlined
from holdfast.formats.read.byindex import hyper_of
from holdfast.formats.read.deepspeed.trees import ENGINE, MODEL_KEYS, Tree
from holdfast.formats.read.deepspeed.zero import FlatGroup, param_groups
from holdfast.formats.read.foreign import Foreign
from holdfast.formats.read.torchfile import TensorRef
from holdfast.formats.read.unpickle import UnknownInstance

_SCALER = (
    "loss_scaler", "dynamic_loss_scale", "overflow", "cur_scale", "cur_iter", "last_overflow_iter",
    "scale_factor", "scale_window",
)  # fmt: skip
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_LEARNT = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_WEIGHTS = {
    "base_optimizer_state", "optimizer_state_dict", "single_partition_of_fp32_groups", "fp32_flat_groups",
    "fp32_groups_flat", "fp32_groups", "param_groups", "param_slice_mappings", "group_paddings",
    "param_alignment_paddings", *_SCALER,
}  # fmt: skip
"""Keys of an optimizer's state_dict other than counters and options."""


def of_model(tree: Tree) -> tuple[list[Foreign], dict[str, Any]]:
    """Extras of a model file, and the tensors in them."""
    tensors: list[Foreign] = []
    engine = {k: v for k, v in tree.root.items() if k in ENGINE and v is not None}
    client = {k: v for k, v in tree.root.items() if k not in ENGINE | MODEL_KEYS}
    found = {"deepspeed": _encoded(tree, engine, "deepspeed", tensors)}
    if client:
        found["client"] = _encoded(tree, client, "client", tensors)
    if tree.root.get("lr_scheduler") is not None:
        found["scheduler"] = tree.encode(tree.root["lr_scheduler"])
    return tensors, found


def of_optimizer(tree: Tree) -> tuple[list[Foreign], dict[str, Any]]:
    """An optimizer's state_dict without the parameters' states, as extras `scaler` and `deepspeed`."""
    tensors: list[Foreign] = []
    said = {k: v for k, v in tree.root.items() if k not in _WEIGHTS and v is not None}
    encoded = _encoded(tree, said, "deepspeed.optimizer", tensors)
    found = {"deepspeed": {"optimizer": encoded}}
    scaler = {k: tree.root[k] for k in _SCALER if k in tree.root}
    if isinstance(scaler.get("loss_scaler"), UnknownInstance):
        scaler |= scaler.pop("loss_scaler").fields
    if scaler:
        found["scaler"] = tree.encode(scaler)
    return tensors, found


def _encoded(tree: Tree, value: Any, path: str, tensors: list[Foreign]) -> Any:
    """Encode a value for extras; its tensors are added to `tensors` and referred to by path."""

    def on_tensor(ref: TensorRef, at: str) -> Any:
        tensors.append(ref.foreign(at, "tensor"))
        return {"$at": at}

    return tree.encode(value, on_tensor, path)


def engine(extras: dict[str, Any]) -> dict[str, Any]:
    """Counters, loss scaler and scheduler under the names of a live engine's extra."""
    counters, scaler = extras.get("deepspeed", {}), extras.get("scaler", {})
    found: dict[str, Any] = {k: counters[k] for k in _COUNTERS if type(counters.get(k)) is int}
    learnt = {k: scaler[k] for k in _LEARNT if k in scaler}
    if learnt:
        found["loss_scaler"] = learnt
    if "scheduler" in extras:
        found["lr_scheduler"] = extras["scheduler"]
    return {"optim.engine": found} if found and "optim" in extras else {}


def signature(tree: Tree) -> Any:
    """Hyper-parameters and extras of an optimizer, which are equal on all ranks of one save."""
    return [encode_hyper(tree, group) for group in param_groups(tree)], of_optimizer(tree)[1]


def optim_extra(stages: Iterable[tuple[Tree, Sequence[FlatGroup]]]) -> dict[str, Any]:
    """The extra `optim`: each group's parameters and hyper-parameters, each parameter's plain states.

    Groups of pipeline stages are merged if their numbers and hyper-parameters are equal.
    """
    members: dict[tuple[int, str], list[str]] = {}
    options: dict[tuple[int, str], Any] = {}
    states: dict[str, dict[str, Any]] = {}
    for tree, flats in stages:
        hypers = param_groups(tree)
        for flat in flats:
            said = hypers[flat.hyper] if 0 <= flat.hyper < len(hypers) else {}
            value = encode_hyper(tree, said)
            key = flat.hyper, repr(value)
            options[key] = value
            known = members.setdefault(key, [])
            known += [name for name in flat.shapes if name not in states]
            states |= dict.fromkeys(flat.shapes, _numbers(tree, flat, said))
    found = [{"params": members[key], "hyper": options[key]} for key in sorted(members)]
    return {"$optimizer": {"groups": found, "state": {n: s for n, s in states.items() if s}}}


def _numbers(tree: Tree, flat: FlatGroup, hyper: dict[str, Any]) -> dict[str, Any]:
    """A group's plain states, with the step if the group itself counts it."""
    found = {k: v for k, v in flat.scalars.items() if not isinstance(v, TensorRef)}
    if "step" in hyper and "step" not in flat.scalars and len(flat.states) > 1:
        found["step"] = hyper["step"]
    return {k: number(tree, k, v) for k, v in found.items()}


def encode_hyper(tree: Tree, group: dict[str, Any]) -> Any:
    """A group's hyper-parameters."""
    return tree.encode(hyper_of(group))


def number(tree: Tree, state: str, value: Any) -> Any:
    """Encode a plain state; step counts become 0-dim tensors, as in torch's optimizers."""
    if state != "step" or not isinstance(value, (int, float)):
        return tree.encode(value)
    return inlined("float32", (), np.float32(value).tobytes())


def tie(optim: dict[str, Any], names: dict[str, list[str]]) -> None:
    """Add the other names of tied parameters to groups and plain states."""
    body = optim["$optimizer"]
    for group in body["groups"]:
        group["params"] = [n for name in group["params"] for n in (name, *names.get(name, ()))]
    for name, others in names.items():
        if name in body["state"]:
            body["state"] |= dict.fromkeys(others, body["state"][name])


def opaque(
    tree: Tree, flats: Iterable[FlatGroup], prefix: str = ""
) -> tuple[list[Foreign], dict[str, Any]]:
    """States of a rank's part that belong to no single parameter: tensors `zero.<name>`, and values."""
    tensors: list[Foreign] = []
    values: dict[str, Any] = {}
    for flat in flats:
        for name, value in flat.opaque.items():
            if isinstance(value, TensorRef):
                tensors.append(value.foreign(f"zero.{prefix}{name}", "tensor"))
            else:
                values[prefix + name] = tree.encode(value)
    return tensors, {"deepspeed": {"parts": values}} if values else {}
