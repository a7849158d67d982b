"""DeepSpeed checkpoints, read where they lie and without torch or DeepSpeed."""

from holdfast.interop.deepspeed.opening import open_deepspeed, steps_deepspeed
from holdfast.interop.deepspeed.tags import is_deepspeed, may_be_deepspeed

__all__ = ["is_deepspeed", "may_be_deepspeed", "open_deepspeed", "steps_deepspeed"]
