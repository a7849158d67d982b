"""State of trl's trainers that training changes, besides the model's and the optimizer's.

* The *reference model* of TR-DPO and GRPO follows the model (`sync_ref_model=True`), and the loss depends
  on it: it is part of the state.
* *Generated batches*, made with the weights of an earlier step, are used for several steps.  No checkpoint
  has them, not even trl's own: a resumed run generates others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def moving_reference(trainer: Any) -> dict[str, nn.Module]:
    """Return the reference model as a part of the state, if training updates it."""
    model = getattr(trainer, "ref_model", None)
    moves = getattr(trainer.args, "sync_ref_model", False) and isinstance(model, nn.Module)
    return {"ref_model": model} if moves else {}


def tell_of_generated(trainer: Any, step: int, tell_once: Callable[[str, str], object]) -> None:
    """Give a notice, once, of a step that is saved between batches generated with earlier weights."""
    if getattr(trainer, "_buffered_inputs", None) is None:
        return
    args = trainer.args
    every = getattr(args, "steps_per_generation", 1) * getattr(trainer, "num_iterations", 1)
    if every > 1 and getattr(trainer, "_step", 0) % every:
        per_step = max(1, args.gradient_accumulation_steps)
        tell_once(
            "generation-buffer",
            f"step {step} is saved between batches that were generated with earlier weights, which no "
            "checkpoint has: a run that goes on from it generates other batches, and ends with other "
            f"weights; let save_steps be a multiple of {max(1, every // per_step)}",
        )
