"""DeepSpeed engines: where ZeRO keeps the values of each parameter.

ZeRO flattens the parameters of a group into one long tensor and gives every rank of the data-parallel
group an equal piece of it (stages 1 and 2, `BF16_Optimizer`), or does so with every parameter by itself
(stage 3).  So a rank holds elements `start..stop` of a parameter in a *master*, the flat float32 tensor
that the torch optimizer inside updates.  The optimizer's states lie as the master does.  A flat range is
few boxes, each contiguous in the master, so nothing is copied or gathered.

Where a parameter begins in a stage 1 or 2 master is read off the model's own 16-bit parameters, which are
views of one flat tensor cut in the same way: so it holds for every order and padding.

The only module that knows DeepSpeed's attributes (0.19.8); it imports nothing of DeepSpeed, and is loaded
once DeepSpeed is.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed import get_rank
from torch.optim import Optimizer

from holdfast.base.errors import LayoutError, UsageError, need
from holdfast.live.sources import Framework, Group, Master, Source, flat_cut
from holdfast.live.state.deepspeed_parts import expert_names, tied_copies
from holdfast.live.state.placed import parts_in

FORM = "{'model': engine, 'optim': engine.optimizer}"
COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes that a loss scaler learns in a run; its window and limits are the configuration's."""
FLAT = {
    "DeepSpeedZeroOptimizer": (
        "bit16_groups",
        "bit16_groups_flat",
        "single_partition_of_fp32_groups",
    ),
    "BF16_Optimizer": ("bf16_groups", "bf16_groups_flat", "fp32_groups_flat_partition"),
    "FP16_Optimizer": ("fp16_groups", "fp16_groups_flat", "fp32_groups_flat"),
}
"""Attributes with the parameters of each group, its flat weights and flat master, by kind of wrapper."""


@dataclass(frozen=True, eq=False)
class Zero(Source):
    """The source of an engine, at one moment."""

    framework = "DeepSpeed"
    by_master = True

    engine: Any
    inner: Optimizer | None = None
    """The torch optimizer inside; None without an optimizer."""
    all_groups: list[Group] = field(default_factory=list)
    masters: dict[int, Master] = field(default_factory=dict)
    """Masters by id of the module's parameter; other parameters are their own masters."""
    saves_scheduler: bool = False
    """True if the engine has a scheduler of its own that the state does not name."""

    def groups(self, optimizer: Any) -> list[Group]:
        return self.all_groups

    def master(self, p: torch.Tensor) -> Master | None:
        return self.masters.get(id(p))

    # -- extras --------------------------------------------------------------------------------

    def extras(self) -> dict[str, Any]:
        """Counters, loss scaler and a learning-rate scheduler of the engine's own, as plain data."""
        found: dict[str, Any] = {k: getattr(self.engine, k) for k in COUNTERS}
        if self._is_dynamic:
            known = {k: getattr(self._scaler, k, None) for k in SCALER}
            found["loss_scaler"] = {k: v for k, v in known.items() if v is not None}
        if self._grad_scaler is not None:
            found["grad_scaler"] = self._grad_scaler.state_dict()
        if self.saves_scheduler and self.engine.lr_scheduler is not None:
            found["lr_scheduler"] = self.engine.lr_scheduler.state_dict()
        return found

    def put_extras(self, saved: dict[str, Any]) -> None:
        """Put back what `extras` gave.  A static loss scale stays as it is configured."""
        put_counters(self.engine, saved)
        if self._is_dynamic:
            for name, value in saved.get("loss_scaler", {}).items():
                if hasattr(self._scaler, name):
                    setattr(self._scaler, name, value)
        if self._grad_scaler is not None and "grad_scaler" in saved:
            self._grad_scaler.load_state_dict(saved["grad_scaler"])
        has_scheduler = self.saves_scheduler and self.engine.lr_scheduler is not None
        if has_scheduler and "lr_scheduler" in saved:
            self.engine.lr_scheduler.load_state_dict(saved["lr_scheduler"])

    @property
    def _scaler(self) -> Any:
        wrapper = self.engine.optimizer
        return getattr(wrapper, "loss_scaler", None) or getattr(wrapper, "loss_scale_config", None)

    @property
    def _is_dynamic(self) -> bool:
        scaler = self._scaler
        return bool(getattr(scaler, "dynamic", getattr(scaler, "dynamic_loss_scale", False)))

    @property
    def _grad_scaler(self) -> Any:
        inside = getattr(self.engine.optimizer, "torch_autocast_gradscaler", None)
        return inside or getattr(self.engine, "torch_autocast_z0_gradscaler", None)

    # -- after a restore -----------------------------------------------------------------------

    def refresh(self) -> None:
        """Make the model's own weights from the masters, as DeepSpeed does after a step.  Collective."""
        wrapper = self.engine.optimizer
        if _kind(wrapper) == "DeepSpeedZeroOptimizer_Stage3":
            (gather,) = need("deepspeed", wrapper, "_reassign_or_swap_out_partitioned_parameters")
            wrapper.checkpoint_event_prologue()
            for number in range(len(wrapper.fp16_groups)):
                gather(number)
        elif _kind(wrapper) in ("DeepSpeedZeroOptimizer", "BF16_Optimizer"):
            wrapper.update_lp_params()
        elif _kind(wrapper) in ("FP16_Optimizer", "FP16_UnfusedOptimizer"):
            self._refresh_here()
        if hasattr(wrapper, "checkpoint_event_epilogue"):  # gathers what is always kept whole
            wrapper.checkpoint_event_epilogue()
        self._link()

    def _refresh_here(self) -> None:
        for _, params in self.all_groups:
            for p in params:
                master = self.masters[id(p)]
                for part in parts_in(master, master.tensor, ""):
                    p.data[part.box.within((0,) * p.ndim)].copy_(part.local)

    def _link(self) -> None:
        """Let DeepSpeed's own access by parameter find the states that there are now."""
        wrapper = self.engine.optimizer
        if _kind(wrapper) in ("DeepSpeedZeroOptimizer", "BF16_Optimizer"):
            names = "_lazy_init_hp_params_optimizer_state", "_hp_optimizer_states_linked"
            link, _ = need("deepspeed", wrapper, *names)
            wrapper._hp_optimizer_states_linked = False
            if self.inner is not None and self.inner.state:
                link()

    def poison(self) -> None:
        """Fill the model's own weights with NaN, here: a half-loaded model must not train."""
        for _, params in self.all_groups:
            for p in params:
                for own in (p.data, getattr(p, "ds_tensor", None)):
                    if own is not None:
                        own.data.fill_(float("nan"))


def put_counters(engine: Any, saved: Mapping[str, Any]) -> None:
    """Put an engine's saved counters back, at the beginning of an accumulated batch: gradients are not
    saved."""
    for name in COUNTERS:
        setattr(engine, name, saved.get(name, getattr(engine, name)))
    engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()


# -- recognising ----------------------------------------------------------------------------------


def is_engine(value: Any) -> bool:
    """True if `value` is an engine, which `deepspeed.initialize` returns first."""
    module = sys.modules.get("deepspeed.runtime.engine")
    return module is not None and isinstance(value, module.DeepSpeedEngine)


def is_wrapper(value: Any) -> bool:
    """True if `value` is an engine's own optimizer, in the place of torch's."""
    module = sys.modules.get("deepspeed.runtime.base_optimizer")
    return module is not None and isinstance(value, module.DeepSpeedOptimizer)


class DeepSpeed(Framework):
    """Recognises engines and their own optimizers."""

    def owns(self, value: Any) -> bool:
        return is_engine(value) or is_wrapper(value)

    def inside(self, module: nn.Module) -> nn.Module | None:
        return module.module if is_engine(module) else None

    def names(self, module: nn.Module) -> dict[str, list[str]]:
        return expert_names(module)

    def sources(
        self, modules: Mapping[str, Sequence[nn.Module]], state: Mapping[str, Any]
    ) -> dict[int, Source]:
        """The `Zero` of each engine in a state, by id of the engine and by that of its optimizer.

        UsageError for an engine that is not supported, and where part of one was handed over and another
        part would be lost.
        """
        found: dict[int, Source] = {}
        inside: set[int] = set()
        for key, engine in ((k, m) for k, some in modules.items() for m in some):
            if not is_engine(engine):
                _check_free(engine, key)
                continue
            if key == "engine":
                raise UsageError(f"hand an engine over in its parts: {FORM}")
            own_scheduler = all(value is not engine.lr_scheduler for value in state.values())
            zero = found[id(engine)] = replace(zero_of(engine), saves_scheduler=own_scheduler)
            if zero.inner is not None:
                found[id(engine.optimizer)] = zero
                inside |= {id(zero.inner)} - {id(engine.optimizer)}
        for key, value in state.items():
            if id(value) in inside or (is_wrapper(value) and id(value) not in found):
                raise UsageError(
                    f"{key!r}: the optimizer of a DeepSpeed engine keeps flat pieces; what they are "
                    "only the engine knows",
                    hint=f"hand over both: {FORM}",
                )
        return found


FRAMEWORK = DeepSpeed()


def _check_free(module: nn.Module, key: str) -> None:
    """UsageError if a module's weights are an engine's copies: writing to them would be lost."""
    marks = ("ds_id", "_hp_mapping")
    if any(getattr(p, m, None) is not None for p in module.parameters() for m in marks):
        raise UsageError(
            f"{key!r}: this module belongs to a DeepSpeed engine, which keeps its weights",
            hint=f"hand over the engine: {FORM}",
        )


def zero_of(value: Any) -> Zero:
    """An engine's masters.  UsageError for what is not supported."""
    _refuse(value)
    wrapper = value.optimizer
    kind = _kind(wrapper)
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        return _stage3(value, wrapper)
    if kind in FLAT:
        groups, weights, masters = (getattr(wrapper, name) for name in FLAT[kind])
        if kind == "FP16_Optimizer":  # each rank has all of it
            return _flattened(value, groups, weights, masters, [0] * len(groups))
        ranks = [get_rank(group) for group in wrapper.real_dp_process_group]
        return _flattened(value, groups, weights, masters, ranks)
    if kind == "FP16_UnfusedOptimizer":
        return _unfused(value, wrapper)
    if wrapper is None:
        return Zero(value)
    if isinstance(wrapper, Optimizer):
        return _zero(value, wrapper, [(g, g["params"]) for g in wrapper.param_groups])
    raise UsageError(f"an engine with {kind} as its optimizer is not supported")


def _kind(wrapper: Any) -> str:
    return type(wrapper).__name__


def _refuse(engine: Any) -> None:
    """UsageError for features whose values `zero_of` would not find, or that differ under one name."""
    wrapper, (config,) = engine.optimizer, need("deepspeed", engine, "_config")
    shapes = {
        "experts that DeepSpeed fuses (AutoEP)": getattr(
            getattr(config, "expert_parallel_config", None), "enabled", False
        ),
        "tensor parallelism": _tensor_parallel(engine) > 1,
        "ZenFlow": getattr(wrapper, "zenflow", False),
        "Muon at this stage": _kind(wrapper)
        == "DeepSpeedZeroOptimizer"  # whole matrices, overlapping
        and _kind(wrapper.optimizer) == "MuonWithAuxAdam",
        "offload to NVMe": getattr(wrapper, "swap_optimizer", False)
        or getattr(wrapper, "params_in_nvme_and_cpu", False),
        "partial offload (ratio < 1)": getattr(wrapper, "offload_optimizer", False)
        and getattr(wrapper, "partial_offload", 1.0) != 1.0,
        "quantized weights": getattr(wrapper, "zero_quantized_nontrainable_weights", False),
    }
    found = [name for name, is_so in shapes.items() if is_so]
    if found:
        raise UsageError(f"a DeepSpeed engine with {', '.join(found)} cannot be live state yet")
    if getattr(wrapper, "offloaded_states", None):
        raise UsageError(
            "the engine's states are offloaded", hint="call engine.reload_states() before"
        )


def _tensor_parallel(engine: Any) -> int:
    """Number of ranks that a weight is cut over; of a pipeline, its grid's `model` axis alone."""
    grid = need("deepspeed", engine.module, "_grid")[0] if engine.pipeline_parallelism else None
    size = engine.mp_world_size if grid is None else grid.get_slice_parallel_world_size()
    autotp = getattr(engine, "autotp_size", None)  # from 0.16.4 on
    return max(int(size), autotp() if autotp is not None else 1)


# -- finding --------------------------------------------------------------------------------------


def _flattened(
    engine: Any,
    groups: list[list[torch.Tensor]],
    weights: list[torch.Tensor],
    masters: list[torch.Tensor],
    ranks: list[int],
) -> Zero:
    """One master per group: piece number `ranks[g]` of all its parameters, one after the other."""
    inner = engine.optimizer.optimizer
    flats: dict[int, Master] = {}
    for params, own, master, rank in zip(groups, weights, masters, ranks):
        first = rank * master.numel()
        for p in params:
            if not p.numel():
                continue
            at = _position(p, own)
            start, stop = max(at, first), min(at + p.numel(), first + master.numel())
            cut = flat_cut(p.shape, start - at, max(stop, start) - at, start - first)
            flats[id(p)] = Master(master, inner, tuple(p.shape), cut)
    return _zero(engine, inner, list(zip(inner.param_groups, groups)), flats)


def _position(p: torch.Tensor, flat: torch.Tensor) -> int:
    """Offset, in elements, at which a parameter begins in the flat tensor of which it is a view."""
    if p.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
        raise LayoutError(
            f"a parameter of shape {tuple(p.shape)} no longer lies in DeepSpeed's flat weights",
            hint="do not replace the data of parameters after deepspeed.initialize",
        )
    return p.storage_offset() - flat.storage_offset()


def _stage3(engine: Any, wrapper: Any) -> Zero:
    """One master per sub-group: this rank's partitions of its parameters, one after the other."""
    flats = _partitioned(engine)
    groups: list[Group] = [(group, []) for group in wrapper.optimizer.param_groups]
    for number, (params, master) in enumerate(
        zip(wrapper.fp16_groups, wrapper.fp32_partitioned_groups_flat)
    ):
        at = 0
        for p in params:
            flats[id(p)] = _partition(p, master, wrapper.optimizer, at)
            at += p.partition_numel()
        if at != master.numel():
            raise LayoutError(
                f"sub-group {number} of ZeRO-3 has {master.numel()} elements, not {at}"
            )
        groups[wrapper.sub_group_to_group_id[number]][1].extend(params)
    return _zero(engine, wrapper.optimizer, groups, flats)


def _partitioned(engine: Any) -> dict[int, Master]:
    """Masters for the partitions, in the model's precision, of ZeRO-3's parameters."""
    return {
        id(p): _partition(p, p.ds_tensor, None, 0)
        for p in engine.module.parameters()
        if hasattr(p, "ds_id")
    }


def _partition(p: Any, tensor: torch.Tensor, inner: Optimizer | None, at: int) -> Master:
    size = p.partition_numel()
    start = min(get_rank(p.ds_process_group) * size, p.ds_numel)
    cut = flat_cut(p.ds_shape, start, min(start + size, p.ds_numel), at)
    return Master(tensor, inner, tuple(p.ds_shape), cut)


def _unfused(engine: Any, wrapper: Any) -> Zero:
    whole = {
        id(p): master
        for params, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups)
        for p, master in zip(params, masters)
    }
    inner = wrapper.optimizer
    groups = list(zip(inner.param_groups, wrapper.fp16_groups))
    return _zero(engine, inner, groups, whole=whole)


def _zero(
    engine: Any,
    inner: Optimizer,
    groups: list[Group],
    flats: Mapping[int, Master] | None = None,
    whole: Mapping[int, torch.Tensor] | None = None,
) -> Zero:
    """An engine with its masters: this rank's pieces of flat ones, or whole ones, by id of the parameter.

    A parameter of the optimizer without either is its own master.
    """
    plain_numbers = type(inner).__module__.split(".", 1)[0] == "deepspeed"
    masters = dict(flats or {})
    copies = tied_copies(engine.module)
    for group, params in groups:
        # DeepSpeed's Muon writes its momentum before the optimizer's step begins
        steady = not group.get("use_muon")
        for p in params:
            master = masters.get(id(p)) or Master((whole or {}).get(id(p), p), inner)
            masters[id(p)] = replace(
                master,
                steady_states=steady,
                plain_numbers=plain_numbers,
                is_copy=id(p) in copies,
            )
    return Zero(engine, inner, groups, masters)
