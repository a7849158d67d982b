"""DeepSpeed for the workers of the tests; they import this one first, then what else they need of it."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import deepspeed.ops

__all__ = ["deepspeed"]

# The kernel of its `inference_all_reduce`, of no use in training: to compile it takes most of a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
