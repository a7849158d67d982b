"""Facts known of parameters' gradients when the optimizer steps: said once, by who makes them so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil

import torch

from holdfast.base.arguments import share_of, shown, unfit

_MARK = "_holdfast_most_nonzero"
_ROUNDED = "_holdfast_rounded_to"
HALVES = (torch.bfloat16, torch.float16)


def sparse(parameters: Iterable[torch.Tensor], *, at_most: float) -> None:
    """Declare that of each parameter's gradient at most this part is not zero when the optimizer steps.

    Records then hold those elements alone (`holdfast.Delta`).  Nothing is lost if it proves wrong: what is
    not zero is looked for at every step, and gradients with more of it are recorded whole from the next
    full save on.  Say the same on every rank, before `restore()`.
    """
    at_most = share_of(at_most, "sparse", "at_most", hint="0.02 is 2 %")
    for p in parameters_of(parameters, "sparse"):
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
    if not any(to is half for half in HALVES):
        raise unfit("rounded", "to", to, "torch.bfloat16 or torch.float16", typed=False)
    for p in parameters_of(parameters, "rounded"):
        setattr(p, _ROUNDED, to)


def parameters_of(parameters: Iterable[torch.Tensor], call: str) -> list[torch.Tensor]:
    """Parameters as they were handed over; UsageError, before any is marked, if something is none.

    A tensor is an iterable of its rows, and marks on those would be of no effect.
    """
    what = "tensors, such as model.parameters()"
    if isinstance(parameters, (torch.Tensor, str, bytes, Mapping)) or not isinstance(
        parameters, Iterable
    ):
        hint = "give a list, if it is one tensor" if torch.is_tensor(parameters) else None
        raise unfit(call, "parameters", parameters, what, hint=hint)
    found = list(parameters)
    for p in found:
        if not isinstance(p, torch.Tensor):
            raise unfit(call, "parameters", parameters, f"{what}; {shown(p)} is none", typed=False)
    if not found:
        hint = "a generator that was used up gives none"
        raise unfit(call, "parameters", parameters, f"{what}, one at least", typed=False, hint=hint)
    return found


def rounded_to(parameter: torch.Tensor) -> torch.dtype | None:
    """The dtype that a float32 parameter's gradient was declared `rounded` to, or None."""
    return getattr(parameter, _ROUNDED, None) if parameter.dtype == torch.float32 else None


def mark(parameter: torch.Tensor, most: int) -> None:
    setattr(parameter, _MARK, min(most, parameter.numel()))


def most_nonzero(parameter: torch.Tensor) -> int | None:
    """Most elements other than zero that were declared of a parameter's gradient, or None."""
    found = getattr(parameter, _MARK, None)
    return None if found is None else int(found)
