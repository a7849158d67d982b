"""Megatron-Core's models and optimizers, as sources of masters and states.

Optimizers keep fp32 masters of 16-bit weights, whole (`Float16Optimizer...`) or, under the distributed
optimizer, elements `start..stop` of the rank's own part: flat tensors, cut again along the boxes that
`holdfast.live.state.megatron_shards` finds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.base.errors import UsageError, need
from holdfast.core.layout import Box
from holdfast.live.sources import Cut, Framework, Group, Master, Source
from holdfast.live.state.megatron_shards import (
    TensorShard,
    is_megatrons,
    is_model,
    is_wrapped,
    names_of,
    shards_of,
)
from holdfast.live.state.modules import unwrap


@dataclass(frozen=True, eq=False)
class Updated:
    """The master, in a torch optimizer, of a weight that this rank updates; a flat master has elements
    `start..stop` of the weight."""

    inner: Optimizer
    master: torch.Tensor
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, eq=False)
class Megatron(Source):
    """The source of a state's models and optimizers, at one moment."""

    framework = "Megatron-Core"

    shards: dict[int, TensorShard]
    """Shards of the models' parameters and buffers, by id."""
    optimizers: list[Any] = field(default_factory=list)
    """Megatron's, those of a chain one by one."""
    all_groups: list[Group] = field(default_factory=list)
    updated: dict[int, Updated] = field(default_factory=dict)
    """By id, the weights that this rank updates, or updates in part (distributed optimizer)."""
    distributed: frozenset[int] = frozenset()
    """Parameters whose masters are flat parts, on this rank or another."""

    def groups(self, optimizer: Any) -> list[Group]:
        return self.all_groups

    def master(self, p: torch.Tensor) -> Master:
        """The master of a weight, or the weight itself, with its place in the whole model."""
        shard, updated = self.shard(p), self.updated.get(id(p))
        is_flat = id(p) in self.distributed
        cut: Cut = shard.parts
        if is_flat and updated is None:
            cut = _nothing
        elif updated is not None and updated.stop is not None:
            cut = partial(shard.flat_parts, start=updated.start, stop=updated.stop)
        return Master(
            p if updated is None else updated.master,
            None if updated is None else updated.inner,
            shard.shape,
            cut,
            is_copy=shard.stage_copy or (shard.rank_copy and is_flat),
            is_padded=shard.padded,
        )

    def shard(self, p: torch.Tensor) -> TensorShard:
        """The shard that tells how a parameter or buffer lies in the whole model."""
        found = self.shards.get(id(p))
        if found is None:
            raise UsageError(
                f"a tensor of shape {tuple(p.shape)} of a Megatron-Core model is not in its "
                "sharded_state_dict(): which part of what it is cannot be known"
            )
        return found

    # -- extras --------------------------------------------------------------------------------

    def extras(self) -> dict[str, Any]:
        """The loss scalers; Megatron's optimizers know no scheduler.

        Those of a chain see other gradients, so one may have backed off: if they differ, `grad_scalers`
        lists all of them, and `grad_scaler` is the first one's.
        """
        states = [scaler.state_dict() for scaler in self._scalers]
        if not states:
            return {}
        numbers = [{name: float(value) for name, value in state.items()} for state in states]
        each = {"grad_scalers": states} if any(one != numbers[0] for one in numbers) else {}
        return {"grad_scaler": states[0], **each}

    def put_extras(self, saved: dict[str, Any]) -> None:
        """Put back what `extras` gave.  A scaler of which too little was saved stays as configured."""
        for scaler, state in self._pairs(saved):
            if scaler.state_dict().keys() <= state.keys():
                scaler.load_state_dict(state)

    def lacking(self, saved: dict[str, Any]) -> list[str]:
        """Texts of values that a dynamic loss scaler needs and a constant loss scale has not saved."""
        texts = (
            f"grad_scaler: saved without {', '.join(sorted(missing))}, as of a constant loss_scale, and "
            "here it is dynamic; strict=False begins with initial_loss_scale"
            for scaler, state in self._pairs(saved)
            if (missing := scaler.state_dict().keys() - state.keys())
        )
        return list(dict.fromkeys(texts))

    @property
    def _scalers(self) -> list[Any]:
        found = (getattr(one, "grad_scaler", None) for one in self.optimizers)
        return [scaler for scaler in found if scaler]

    def _pairs(self, saved: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
        """Scalers with what was saved of each, or of the first if there were more or fewer."""
        scalers, states = self._scalers, saved.get("grad_scalers", [])
        if len(states) != len(scalers):
            states = [saved["grad_scaler"]] * len(scalers) if "grad_scaler" in saved else []
        return list(zip(scalers, states))

    # -- after a restore -----------------------------------------------------------------------

    def refresh(self) -> None:
        """Make the models' own weights from the masters, as after a step.  Collective."""
        for optimizer in self.optimizers:
            if getattr(optimizer, "is_stub_optimizer", False):
                continue
            if type(optimizer).__name__ != "FP32Optimizer":  # its weights are the masters
                (copy,) = need("megatron-core", optimizer, "_copy_main_params_to_model_params")
                copy()
        for chunk in self._gathered():
            chunk.start_param_sync(force_sync=True)

    def _gathered(self) -> list[Any]:
        """The model chunks whose weights are gathered from the ranks that updated them."""
        chunks = [c for o in self.optimizers if _is_distributed(o) for c in o.model_chunks]
        return list({id(c): c for c in chunks}.values())

    def poison(self) -> None:
        """Fill the models' own weights with NaN, here: a half-loaded model must not train."""
        for _, params in self.all_groups:
            for p in params:
                p.data.fill_(float("nan"))


def is_megatron_optimizer(value: Any) -> bool:
    """True if a value is what `get_megatron_optimizer` returns."""
    module = sys.modules.get("megatron.core.optimizer.optimizer")
    return module is not None and isinstance(value, module.MegatronOptimizer)


def _is_distributed(optimizer: Any) -> bool:
    return hasattr(optimizer, "model_param_gbuf_map")


# -- optimizers -----------------------------------------------------------------------------------


class MegatronCore(Framework):
    """Recognises models of Megatron-Core, their wrappers and what `get_megatron_optimizer` returns."""

    def owns(self, value: Any) -> bool:
        return is_megatron_optimizer(value) or (
            isinstance(value, nn.Module) and is_megatrons(value)
        )

    def inside(self, module: nn.Module) -> nn.Module | None:
        return module.module if is_wrapped(module) else None

    def names(self, module: nn.Module) -> dict[str, list[str]]:
        return names_of(module) if is_model(module) else {}

    def sources(
        self, modules: Mapping[str, Sequence[nn.Module]], state: Mapping[str, Any]
    ) -> dict[int, Source]:
        """One `Megatron` for all of Megatron's modules and optimizers in a state, by id of each."""
        models = [m for some in modules.values() for m in some if is_model(unwrap(m))]
        optimizers = [value for value in state.values() if is_megatron_optimizer(value)]
        if not models and not optimizers:
            return {}
        if not models:
            raise UsageError(
                "an optimizer of Megatron-Core without its model: only the model knows names and places",
                hint="hand over both: {'model': model, 'optim': optimizer}",
            )
        shards: dict[int, TensorShard] = {}
        for model in models:
            _refuse_model(model)
            shards |= shards_of(unwrap(model))
        found = Megatron(shards)
        for optimizer in optimizers:
            for one in getattr(optimizer, "chained_optimizers", [optimizer]):
                found = _with(found, one)
        return {id(value): found for value in (*models, *optimizers)}


FRAMEWORK = MegatronCore()


def _nothing(master: torch.Tensor) -> Iterable[tuple[Box, torch.Tensor]]:
    """The parts of a weight of which other ranks have the master."""
    return ()


def _with(known: Megatron, optimizer: Any) -> Megatron:
    """`known` with one more of Megatron's optimizers."""
    if getattr(optimizer, "is_stub_optimizer", False):
        return replace(known, optimizers=[*known.optimizers, optimizer])
    _refuse(optimizer)
    if _is_distributed(optimizer):
        groups, updated = _distributed(optimizer)
    else:
        groups, updated = _whole(optimizer)
    served = [p for _, params in groups for p in params]
    if any(id(p) not in known.shards for p in served):
        raise UsageError(
            "an optimizer of Megatron-Core serves parameters that no model of the state has",
            hint="hand over every chunk of the model: {'model': [chunk, ...], 'optim': optimizer}",
        )
    buffers = optimizer.buffers if _is_distributed(optimizer) else ()
    flat = frozenset(id(p) for buffer in buffers for p in buffer.param_index_map)
    return Megatron(
        known.shards,
        [*known.optimizers, optimizer],
        [*known.all_groups, *groups],
        known.updated | updated,
        known.distributed | flat,
    )


FSDP = ("megatron.core.distributed.fsdp", "megatron.core.distributed.torch_fully_sharded")
"""Beginnings of the modules of wrappers that cut weights over the data-parallel ranks."""


def _refuse_model(model: nn.Module) -> None:
    """UsageError for a model that is cut once more, which its `sharded_state_dict` does not say."""
    inside: nn.Module | None = model
    while inside is not None:
        if type(inside).__module__.startswith(FSDP):
            raise UsageError(
                f"Megatron-Core with Megatron-FSDP ({type(inside).__name__}) cannot be live state yet",
                hint="use the distributed optimizer (use_distributed_optimizer), which is",
            )
        inside = inside.module if is_wrapped(inside) else None


def _refuse(optimizer: Any) -> None:
    config = optimizer.config
    wrong = {
        "a precision-aware optimizer": getattr(config, "use_precision_aware_optimizer", False),
        "optimizer offload to the CPU": getattr(config, "optimizer_cpu_offload", False),
        "Megatron-FSDP": getattr(
            getattr(optimizer, "ddp_config", None), "use_megatron_fsdp", False
        ),
    }
    found = [name for name, is_so in wrong.items() if is_so]
    if found or not isinstance(optimizer.optimizer, Optimizer):
        what = ", ".join(found) or type(optimizer.optimizer).__name__
        raise UsageError(f"Megatron-Core with {what} cannot be live state yet")


def _whole(optimizer: Any) -> tuple[list[Group], dict[int, Updated]]:
    """FP32Optimizer, and the 16-bit one: a master of a weight's own shape."""
    inner = optimizer.optimizer
    weights = {
        id(main): p
        for params, mains in zip(
            getattr(optimizer, "float16_groups", ()),
            getattr(optimizer, "fp32_from_float16_groups", ()),
        )
        for p, main in zip(params, mains)
    }
    groups = [
        (g, [weights.get(id(main), main) for main in g["params"]]) for g in inner.param_groups
    ]
    masters = [main for g in inner.param_groups for main in g["params"]]
    return groups, {id(weights.get(id(main), main)): Updated(inner, main) for main in masters}


def _distributed(optimizer: Any) -> tuple[list[Group], dict[int, Updated]]:
    """The distributed optimizer: of each weight, elements that lie in this rank's piece of a buffer."""
    inner = optimizer.optimizer
    updated = {}
    groups: list[Group] = []
    for number, group in enumerate(inner.param_groups):
        pairs = (
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        )
        params = [p for models, _ in pairs for p in models[number]]
        shards = [s for _, mains in pairs for s in mains[number]]
        (range_of,) = need("megatron-core", optimizer, "_get_model_param_range_map")
        for p, shard in zip(params, shards):
            own = range_of(p)["param"]
            updated[id(p)] = Updated(inner, shard, own.start, own.end)
        groups.append((group, params))
    return groups, updated
