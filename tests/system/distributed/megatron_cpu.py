"""Megatron-Core on the CPU, under gloo.

It asks for CUDA in a few places where the device does not matter: the current device, tensors made on
"cuda", the class of a parameter.  `on_cpu` answers those questions; all that computes, cuts and saves is
Megatron's own.
"""

from __future__ import annotations

import contextlib
import queue
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Cuda(TorchFunctionMode):
    """Tensors asked for on "cuda" come on the CPU; CPU tensors say that their class is CUDA's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and torch.device(kwargs["device"] or "cpu").type == "cuda":
            kwargs["device"] = torch.device("cpu")
        if func is torch.Tensor.cuda:
            return args[0]
        found = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.")
        return found


def on_cpu() -> None:
    """Let Megatron-Core run here; for the rest of this process."""
    torch.cuda.synchronize = lambda *a, **k: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.get_device_properties = lambda *a: Namespace(total_memory=1 << 34)
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # not defined where Transformer Engine is missing

    @contextlib.contextmanager
    def fork(self: Any, name: str = "") -> Iterator[None]:
        yield

    CudaRNGStatesTracker.fork = fork
    _allow_sequence_parallel_norms()
    _let_torch_adam_load()
    _save_in_this_process()
    _Cuda().__enter__()


def _allow_sequence_parallel_norms() -> None:
    """Torch's norm works on parts of the sequence; its gradients are then summed over the TP ranks."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    make = WrappedTorchNorm.__new__

    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        norm = make(cls, replace(config, sequence_parallel=False), *args, **kwargs)
        for p in norm.parameters():
            p.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = new


def _let_torch_adam_load() -> None:
    """Megatron-Core 0.16 forgets that torch's AdamW keeps a step beside each parameter: it is loaded from
    the groups by then."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    put = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self: Any, param: Any, tensors: dict[str, torch.Tensor]) -> None:
        now = self._get_main_param_and_optimizer_states(param)
        put(self, param, {"step": now["step"], **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step


def _save_in_this_process() -> None:
    """Megatron-Core starts one more interpreter for each rank, to hold a queue that a save in the same
    process does not need there: seconds of imports, and processes that outlive a killed rank."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()
