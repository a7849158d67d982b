"""What is known of parameters' gradients when the optimizer steps: said once, by who makes it so."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

import torch

from holdfast.errors import UsageError

_MARK = "_holdfast_most_nonzero"
_ROUNDED = "_holdfast_rounded_to"
HALVES = (torch.bfloat16, torch.float16)


def sparse(parameters: Iterable[torch.Tensor], *, at_most: float) -> None:
    """Declare that of each parameter's gradient at most this part is not zero when the optimizer steps.

    Records then hold those elements alone (`holdfast.Delta`).  Nothing is lost if it proves wrong: what is
    not zero is looked for at every step, and gradients with more of it are recorded whole from the next
    full save on.  Say the same on every rank, before `restore()`.
    """
    if not 0 < at_most <= 1:
        raise UsageError(f"sparse(at_most={at_most!r}): must be above 0 and at most 1")
    for p in parameters:
        mark(p, max(1, ceil(at_most * p.numel())))


def rounded(parameters: Iterable[torch.Tensor], to: torch.dtype) -> None:
    """Declare that each parameter's gradient, though of float32, has only values of this dtype (bfloat16 or
    float16) when the optimizer steps: ranks exchange it so (FSDP2 with `reduce_dtype`, DDP with
    `bf16_compress_hook`), and nothing computes with it after that, as clipping, unscaling and adding up
    several exchanges would.

    Records then hold it in that dtype, which is half of the bytes (`holdfast.Delta`).  Nothing is lost if
    it proves wrong: each value is looked at at every step, and if one gradient has others, all are recorded
    whole from the next full save on.  Say the same on every rank, before `restore()`, of the parameters
    that the optimizer has: `fully_shard` and `to_empty` make others.  What is declared `sparse`, too, is
    recorded as that.
    """
    if to not in HALVES:
        raise UsageError(f"rounded(to={to}): must be torch.bfloat16 or torch.float16")
    for p in parameters:
        setattr(p, _ROUNDED, to)


def rounded_to(parameter: torch.Tensor) -> torch.dtype | None:
    """What was declared of a float32 parameter's gradient; None if nothing was."""
    return getattr(parameter, _ROUNDED, None) if parameter.dtype == torch.float32 else None


def mark(parameter: torch.Tensor, most: int) -> None:
    setattr(parameter, _MARK, min(most, parameter.numel()))


def most_nonzero(parameter: torch.Tensor) -> int | None:
    """What was declared of a parameter's gradient; None if nothing was."""
    found = getattr(parameter, _MARK, None)
    return None if found is None else int(found)
