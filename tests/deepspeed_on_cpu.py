"""DeepSpeed for the workers of the tests; they import this one first, then what else they need of it."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import deepspeed.ops
from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder

__all__ = ["deepspeed"]

# The kernel of its `inference_all_reduce`, of no use in training: to compile it takes most of a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _quick(builder: CPUOpBuilder) -> list[str]:
    """How kernels are compiled: neither optimised nor for a debugger, in half the time."""
    return [arg for arg in _usual(builder) if arg not in ("-O3", "-g")]


_usual = CPUOpBuilder.cxx_args
CPUOpBuilder.cxx_args = _quick
