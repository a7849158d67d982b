"""Megatron-Core's models and optimizers: where each keeps its values.

Optimizers keep fp32 masters of 16-bit weights, whole (`Float16Optimizer...`) or, under the distributed
optimizer, elements `start..stop` of the rank's own part: flat tensors, cut again along the boxes that
`holdfast.state.shards` finds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.errors import LayoutError, UsageError
from holdfast.state.placed import Placed, place
from holdfast.state.shards import Shard, is_model, shards_of

Group = tuple[dict[str, Any], list[torch.Tensor]]


@dataclass(frozen=True, eq=False)
class Held:
    """The place where an optimizer keeps a weight: its master in a torch optimizer; a flat master has
    elements `start..stop` of the weight."""

    inner: Optimizer
    master: torch.Tensor
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, eq=False)
class Megatron:
    """The models and the optimizer of a state, as holdfast sees them at one moment."""

    shards: dict[int, Shard]
    """Shards of the models' parameters and buffers, by id."""
    optimizers: list[Any] = field(default_factory=list)
    """Megatron's, those of a chain one by one."""
    groups: list[Group] = field(default_factory=list)
    held: dict[int, Held] = field(default_factory=dict)
    """Masters by parameter id; of the distributed optimizer, those that this rank has a part of."""
    distributed: frozenset[int] = frozenset()
    """Parameters whose masters are flat parts, on this rank or another."""

    def parts(self, p: torch.Tensor, name: str) -> tuple[Placed, ...]:
        """Parts that this rank keeps of a weight, in the highest precision that there is."""
        return self._parts(p, self.source(p), name)

    def shard(self, p: torch.Tensor) -> Shard:
        """The shard that tells how a parameter or buffer lies in the whole model."""
        found = self.shards.get(id(p))
        if found is None:
            raise UsageError(
                f"a tensor of shape {tuple(p.shape)} of a Megatron-Core model is not in its "
                "sharded_state_dict(): which part of what it is cannot be known"
            )
        return found

    def source(self, p: torch.Tensor) -> torch.Tensor:
        """The tensor whose values and writes count."""
        return self.held[id(p)].master if id(p) in self.held else p

    def states(self, p: torch.Tensor) -> dict[str, Any]:
        """States that its optimizer keeps of a weight here."""
        held = self.held.get(id(p))
        return {} if held is None else dict(held.inner.state.get(held.master, {}))

    def holder(self, p: torch.Tensor) -> tuple[Optimizer | None, torch.Tensor]:
        """The torch optimizer that updates a weight here, and the tensor that it has for it."""
        held = self.held.get(id(p))
        return (None, p) if held is None else (held.inner, held.master)

    def state_parts(self, p: torch.Tensor, value: torch.Tensor, name: str) -> tuple[Placed, ...]:
        """The parts of a state that lies as its weight does, or of a number."""
        return self._parts(p, value, name) if value.ndim else (place(value, name),)

    def _parts(self, p: torch.Tensor, value: torch.Tensor, name: str) -> tuple[Placed, ...]:
        shard, held = self.shard(p), self.held.get(id(p))
        if id(p) in self.distributed and held is None:
            return ()
        if held is not None and held.stop is not None:
            if value.numel() != held.stop - held.start:
                raise LayoutError(f"{name!r}: {value.numel()} elements beside {held}")
            return shard.flat_parts(value, held.start, held.stop)
        if value.shape != shard.local:
            raise LayoutError(
                f"{name!r}: a state of shape {tuple(value.shape)} beside a weight of {shard.local}"
            )
        return shard.parts(value)

    def is_copy(self, p: torch.Tensor) -> bool:
        """True if this rank leaves saving `p` to others, whose flat parts may be other ones."""
        shard = self.shard(p)
        return shard.stage_copy or (shard.rank_copy and id(p) in self.distributed)

    def is_padded(self, p: torch.Tensor) -> bool:
        return self.shard(p).padded

    # -- what is neither a weight nor its state ------------------------------------------------

    def extras(self, scheduler: bool) -> dict[str, Any]:
        """The loss scaler; Megatron's optimizers know no scheduler."""
        scalers = [o.grad_scaler for o in self.optimizers if getattr(o, "grad_scaler", None)]
        return {"grad_scaler": scalers[0].state_dict()} if scalers else {}

    def put_extras(self, saved: dict[str, Any], scheduler: bool) -> None:
        """Put back what `extras` gave."""
        for optimizer in self.optimizers:
            if getattr(optimizer, "grad_scaler", None) and "grad_scaler" in saved:
                optimizer.grad_scaler.load_state_dict(saved["grad_scaler"])

    def put_plain(self, p: torch.Tensor, state: str, value: Any) -> None:
        """A state that is no tensor of the checkpoint."""
        held = self.held.get(id(p))
        if held is not None:
            held.inner.state[held.master][state] = value

    # -- after a restore -----------------------------------------------------------------------

    def refresh(self) -> None:
        """Make the models' own weights from the masters, as after a step.  Collective."""
        for optimizer in self.optimizers:
            if getattr(optimizer, "is_stub_optimizer", False):
                continue
            if hasattr(optimizer, "_copy_main_params_to_model_params"):
                optimizer._copy_main_params_to_model_params()
        for chunk in self._gathered():
            chunk.start_param_sync(force_sync=True)

    def _gathered(self) -> list[Any]:
        """The model chunks whose weights are gathered from the ranks that updated them."""
        chunks = [c for o in self.optimizers if _is_distributed(o) for c in o.model_chunks]
        return list({id(c): c for c in chunks}.values())

    def poison(self) -> None:
        """Fill the models' own weights with NaN, here: a half-loaded model must not train."""
        for _, params in self.groups:
            for p in params:
                p.data.fill_(float("nan"))


def is_megatron_optimizer(value: Any) -> bool:
    """True if a value is what `get_megatron_optimizer` returns."""
    module = sys.modules.get("megatron.core.optimizer.optimizer")
    return module is not None and isinstance(value, module.MegatronOptimizer)


def _is_distributed(optimizer: Any) -> bool:
    return hasattr(optimizer, "model_param_gbuf_map")


# -- optimizers -----------------------------------------------------------------------------------


def megatrons(
    modules: dict[str, list[nn.Module]], state: dict[str, Any], unwrap: Callable[[Any], nn.Module]
) -> dict[int, Megatron]:
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
    shards: dict[int, Shard] = {}
    for model in models:
        shards |= shards_of(unwrap(model))
    found = Megatron(shards)
    for optimizer in optimizers:
        for one in getattr(optimizer, "chained_optimizers", [optimizer]):
            found = _with(found, one)
    return {id(value): found for value in (*models, *optimizers)}


def _with(known: Megatron, optimizer: Any) -> Megatron:
    """`known` with one more of Megatron's optimizers."""
    if getattr(optimizer, "is_stub_optimizer", False):
        return Megatron(known.shards, [*known.optimizers, optimizer], known.groups, known.held,
                        known.distributed)  # fmt: skip
    _refuse(optimizer)
    if _is_distributed(optimizer):
        groups, held = _distributed(optimizer)
    else:
        groups, held = _whole(optimizer)
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
        [*known.groups, *groups],
        known.held | held,
        known.distributed | flat,
    )


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


def _whole(optimizer: Any) -> tuple[list[Group], dict[int, Held]]:
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
    return groups, {id(weights.get(id(main), main)): Held(inner, main) for main in masters}


def _distributed(optimizer: Any) -> tuple[list[Group], dict[int, Held]]:
    """The distributed optimizer: of each weight, elements that lie in this rank's piece of a buffer."""
    inner = optimizer.optimizer
    held = {}
    groups: list[Group] = []
    for number, group in enumerate(inner.param_groups):
        pairs = (
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        )
        params = [p for models, _ in pairs for p in models[number]]
        shards = [s for _, mains in pairs for s in mains[number]]
        for p, shard in zip(params, shards):
            own = optimizer._get_model_param_range_map(p)["param"]
            held[id(p)] = Held(inner, shard, own.start, own.end)
        groups.append((group, params))
    return groups, held
