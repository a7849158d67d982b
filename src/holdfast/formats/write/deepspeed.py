"""DeepSpeed's universal format, which an engine with `"load_universal": true` loads.

```
<root>/latest_universal                                   the tag
<root>/<tag>/zero/<parameter>/fp32.pt, exp_avg.pt, ...    {"param": tensor, "cat_dim": 0}; step.pt: a number
<root>/<tag>/zero/optimizer_state.pt                      groups with their hyper-parameters
<root>/<tag>/mp_rank_00_model_states.pt                   counters, scheduler, what the client had saved
```
Weights are fp32, as in DeepSpeed's optimizers, and only in `zero/`: the module's own copy, which
DeepSpeed's converter also keeps, is not written.  ZeRO stages 1, 2 and 3 load the same files.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from holdfast.base.errors import UsageError
from holdfast.core.checkpoint.consolidating import keep_extras
from holdfast.core.checkpoint.opened import Checkpoint, plain_tensor
from holdfast.core.checkpoint.outfiles import Outfile
from holdfast.core.format.extras import decode
from holdfast.core.format.manifest import TensorEntry
from holdfast.formats.write.archive import ArchivedTensor, ArchivePlan, add_archive, for_torch
from holdfast.formats.write.file_plans import Planned, WriteOptions, is_float
from holdfast.formats.write.pickling import Instance, PickledGlobal, pickled_call

_VERSION = "0.16.0"
"""Version of DeepSpeed to state if the source has none; loaders refuse files without a version."""
_SCHEDULERS = ("lr_scheduler", "scheduler", "sched", "opt_param_scheduler")
_STAGES = ("", "zero_pp_rank_0_")
"""Prefixes of the model-states file: for stages 1 and 2, and for stage 3."""
_OWN = ("client", "deepspeed", "scaler", "rng")
"""Extras of DeepSpeed's own files and of a `Checkpointer`, which are not client state."""
_SCALER_FIELDS = {
    "cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis", "delayed_shift", "min_scale",
    "scale_factor", "scale_window", "consecutive_hysteresis", "raise_error_at_min_scale",
}  # fmt: skip
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def plan_deepspeed(source: Checkpoint, options: WriteOptions) -> Planned:
    """Plan weights, optimizer states, groups, counters and the scheduler."""
    tag = f"global_step{source.step}_universal"
    extras, left_out = keep_extras(source)
    plain = {k: decode(v, partial(_tagged, source)) for k, v in extras.items()}
    optimizers = [k for k, v in extras.items() if isinstance(v, dict) and "$optimizer" in v]
    if len(optimizers) > 1:
        names = ", ".join(optimizers)
        raise UsageError(f"an engine of DeepSpeed has one optimizer; the source has {names}")
    optim = optimizers[0] if optimizers else None
    files = [*_parameters(source, options.key, optim, plain, f"{tag}/zero")]
    if not files:
        raise UsageError(f"{source.store.url} holds no parameters under {options.key!r}")
    left_out += _without_place(source, options.key, optim, plain)
    state = _archive(f"{tag}/zero/optimizer_state.pt", _optimizer_state(source, plain, optim))
    model = _model_states(source, options.key, plain, optim)
    models = [_archive(f"{tag}/{prefix}mp_rank_00_model_states.pt", model) for prefix in _STAGES]
    return Planned(
        (*files, state, *models),
        (("latest_universal", tag.encode()), ("latest", tag.encode())),
        left_out,
    )


def _without_place(
    source: Checkpoint, key: str, optim: str | None, plain: dict[str, Any]
) -> tuple[str, ...]:
    """Keys of shared extras that this format cannot fully hold.

    UsageError for optimizer states, which training would lose.
    """
    params = set(_params(source, key))
    for name, _, t in _under(source, optim):
        if name.rpartition(".")[0] not in params:
            raise UsageError(
                f"{t.name!r} is of no parameter under {key!r}: its optimizer state would be lost",
                hint="save the optimizer with the names of its parameters (docs/reference/foreign.md)",
            )
    used = source.object_tensors
    others = {t.name.split(".", 1)[0] for t in source.manifest.tensors if t.name not in used}
    schedulers = [k for k in _SCHEDULERS if k in plain]
    lost = others - {key, optim} | set(schedulers[1:])
    if "scaler" in plain and not _scaler(plain["scaler"]):
        lost.add("scaler")
    if "rng" in plain:
        lost.add("rng")
    return tuple(sorted(lost))


def _under(source: Checkpoint, key: str | None) -> Iterator[tuple[str, int, TensorEntry]]:
    """Tensors under a key: the name without it, number, entry.  Nothing if there is no key."""
    for number, t in enumerate(source.manifest.tensors):
        if key is not None and t.name.startswith(f"{key}."):
            yield t.name.removeprefix(f"{key}."), number, t


def _params(source: Checkpoint, key: str) -> dict[str, tuple[int, TensorEntry]]:
    """Return number and entry of each tensor that may be trained under a key, by name."""
    return {
        name: (number, t)
        for name, number, t in _under(source, key)
        if t.state in ("param", "tensor") and is_float(t.dtype)
    }


def _tagged(source: Checkpoint, tag: str, body: Any) -> Any:
    """Do as `plain_tensor`, but take a tensor that an object refers to by name from the source."""
    if tag == "$object":
        return decode(body, partial(_tagged, source))
    if tag != "$at":
        return plain_tensor(tag, body)
    number = source.index(body)
    t = source.manifest.tensors[number]
    return ArchivedTensor(t.dtype, t.shape, number)


def _archive(path: str, tree: Any) -> Outfile:
    plan = ArchivePlan()
    add_archive(plan, tree)
    return plan.outfile(path)


def _parameters(
    source: Checkpoint, key: str, optim: str | None, plain: dict[str, Any], folder: str
) -> list[Outfile]:
    """One file per parameter and state; a tied parameter's files have its first name."""
    params = _params(source, key)
    files = [_tensor(f"{folder}/{name}/fp32.pt", number, t) for name, (number, t) in params.items()]
    done: set[str] = set()
    for rest, number, t in _under(source, optim):
        name, _, state = rest.rpartition(".")
        if name not in params:
            continue
        if state == "step":
            value = ArchivedTensor(t.dtype, t.shape, number)
            files.append(_archive(f"{folder}/{name}/step.pt", value))
            done.add(name)
        else:
            files.append(_tensor(f"{folder}/{name}/{state}.pt", number, t))
    for name, states in (plain[optim]["state"] if optim else {}).items():
        if name in params and name not in done and "step" in states:
            files.append(_archive(f"{folder}/{name}/step.pt", for_torch(states["step"])))
    return files


def _tensor(path: str, number: int, t: TensorEntry) -> Outfile:
    dtype = "float32" if is_float(t.dtype) else t.dtype
    return _archive(path, {"param": ArchivedTensor(dtype, t.shape, number), "cat_dim": 0})


def _optimizer_state(
    source: Checkpoint, plain: dict[str, Any], optim: str | None
) -> dict[str, Any]:
    """The state that all parameters share."""
    groups = [
        {**for_torch({k: v for k, v in g.items() if k != "params"}), "params": []}
        for g in (plain[optim]["param_groups"] if optim else ())
    ]
    return {
        "ds_version": _version(source),
        "overflow": False,
        **_scaler(plain.get("scaler")),
        "param_groups": groups,
        "optimizer_state_dict": {
            "state": {0: {"step": _step(source, plain, optim)}},
            "param_groups": groups,
        },
    }


def _scaler(saved: Any) -> dict[str, Any]:
    """A dynamic loss scaler as DeepSpeed's object, with its window and limits."""
    if not isinstance(saved, dict) or not saved.keys() >= _SCALER_FIELDS:
        return {}
    fields = {k: v for k, v in saved.items() if k not in ("dynamic_loss_scale", "overflow")}
    dtype = str(fields.get("dtype", "float16")).removeprefix("torch.")
    state = {**for_torch(fields), "dynamic": True, "dtype": PickledGlobal("torch", dtype)}
    scaler = Instance(
        PickledGlobal("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"), state
    )
    return {"loss_scaler": scaler, "dynamic_loss_scale": True}


def _step(source: Checkpoint, plain: dict[str, Any], optim: str | None) -> Any:
    """The step of the first parameter that has one."""
    for _, number, t in _under(source, optim):
        if t.state == "step":
            return ArchivedTensor(t.dtype, t.shape, number)
    for states in (plain[optim]["state"] if optim else {}).values():
        if "step" in states:
            return for_torch(states["step"])
    return source.step


def _version(source: Checkpoint) -> str:
    return source.manifest.software.get("deepspeed", _VERSION)


def _model_states(
    source: Checkpoint, key: str, plain: dict[str, Any], optim: str | None
) -> dict[str, Any]:
    """Return the state that is not sharded: buffers, counters and scheduler, without weights."""
    params = _params(source, key)
    buffers = {
        name: ArchivedTensor(t.dtype, t.shape, number)
        for name, number, t in _under(source, key)
        if name not in params
    }
    shapes = {n: pickled_call("torch", "Size", t.shape) for n, (_, t) in params.items()}
    engine = plain.get(f"{optim}.engine") or {}
    schedulers = [plain[k] for k in _SCHEDULERS if k in plain] + [engine.get("lr_scheduler")]
    counters = {k: engine[k] for k in _COUNTERS if isinstance(engine.get(k), int)}
    known = (*_SCHEDULERS, *_OWN, optim, f"{optim}.engine")
    rest = {k: v for k, v in plain.items() if k not in known}
    client = plain.get("client")
    return {
        **for_torch(rest),
        **(for_torch(client) if isinstance(client, dict) else {}),
        "module": buffers,
        "buffer_names": list(buffers),
        "optimizer": None,
        "param_shapes": [shapes],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {
            alias.removeprefix(f"{key}."): name.removeprefix(f"{key}.")
            for alias, name in source.manifest.aliases.items()
            if alias.startswith(f"{key}.")
        },
        "lr_scheduler": for_torch(schedulers[0]),
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": set(),
        "global_steps": source.step,
        "global_samples": 0,
        "skipped_steps": 0,
        **counters,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _version(source),
    }
