"""How many elements of a parameter's gradient may be other than zero: said once, by who makes it so."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

import torch

from holdfast.errors import UsageError

_MARK = "_holdfast_most_nonzero"


def sparse(parameters: Iterable[torch.Tensor], *, at_most: float) -> None:
    """Declare that of each parameter's gradient at most this part is not zero when the optimizer steps.

    Records then hold those elements alone (`holdfast.Delta`).  Nothing is lost if it proves wrong: what is
    not zero is looked for at every step, and gradients with more of it are recorded whole from the next
    full save on.  Say the same on every rank, before the first step.
    """
    if not 0 < at_most <= 1:
        raise UsageError(f"sparse(at_most={at_most!r}): must be above 0 and at most 1")
    for p in parameters:
        mark(p, max(1, ceil(at_most * p.numel())))


def mark(parameter: torch.Tensor, most: int) -> None:
    setattr(parameter, _MARK, min(most, parameter.numel()))


def most_nonzero(parameter: torch.Tensor) -> int | None:
    """What was declared of a parameter's gradient; None if nothing was."""
    found = getattr(parameter, _MARK, None)
    return None if found is None else int(found)
