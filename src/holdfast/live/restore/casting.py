"""Casts at a load: values of one dtype into live memory of another, which may not hold them all.

`cast=True` allows rounding, and nothing else: float32 into bfloat16 gives the nearest numbers there are.
torch converts the rest without a word, and to what depends on the two dtypes:

    1e5  into float16        inf           1e5, inf  into float8_e4m3fn   448
    300  into int8           44            nan       into int32           -2147483648
    -1   into uint8          255           0.5       into bool            True
    1+2j into float32        1             16777217  into float32         16777216

Such a value is not the saved one.  So each block of values is checked before it goes into the live tensor:
one pass over the numbers (their smallest and largest), a second pass only where these do not fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.base.errors import StateMismatch
from holdfast.core.checkpoint.rows import Array
from holdfast.live.state.placed import dtype_name
from holdfast.live.state.tensor_kinds import writing

_LARGE = (torch.float32, torch.float64)
"""Floating dtypes that torch calculates with on each device; all others fit into the first."""


@dataclass(frozen=True)
class CastTarget:
    """A live tensor that takes values of another dtype than its own, if it can hold them."""

    tensor: torch.Tensor
    dtype: torch.dtype
    """The dtype that was saved."""
    name: str

    def memory(self) -> memoryview | None:
        return None

    def put(self, at: tuple[slice, ...], values: Array) -> None:
        """Convert and write values.  StateMismatch, before any is written, if the tensor cannot hold
        one."""
        source = torch.from_numpy(np.array(values)).view(self.dtype)
        try:
            lost = _lost(source, self.tensor.dtype) if source.numel() else None
            if lost is not None:
                raise _refusal(self.name, _shown(source, lost), self.dtype, self.tensor.dtype)
            if source.dtype.is_complex and not self.tensor.dtype.is_complex:
                source = torch.view_as_real(source)[..., 0]
            with writing(self.tensor):
                self.tensor[at].copy_(source)
        except NotImplementedError:  # of torch, for dtypes of less than a byte
            raise _refusal(self.name, "", self.dtype, self.tensor.dtype) from None


def _refusal(name: str, value: str, saved: torch.dtype, here: torch.dtype) -> StateMismatch:
    kinds = dtype_name(saved), dtype_name(here)
    if value:
        line = f"{name}: saved as {kinds[0]}, and {value} is no {kinds[1]}, which it is here"
    else:
        line = f"{name}: torch cannot convert {kinds[0]}, as it was saved, to {kinds[1]}"
    return StateMismatch(
        line,
        (line,),
        hint="cast=True rounds, and changes no value otherwise: build the live tensor with the dtype that "
        "was saved, or with one that holds its values, and convert what you can do without afterwards",
    )


def _shown(source: torch.Tensor, lost: torch.Tensor) -> str:
    """The first value that is lost."""
    value = source.reshape(-1)[int(lost.reshape(-1).nonzero()[0])].item()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _lost(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a mask of the values that a dtype cannot hold; None if it holds each, or rounds it to the
    nearest number."""
    if source.dtype is torch.bool:  # a dtype without zero cannot hold False
        source = source.view(torch.uint8)
    if source.dtype.is_complex:
        parts = torch.view_as_real(source)
        if dtype.is_complex:
            lost = _lost(parts, dtype.to_real())
            return None if lost is None else lost.any(-1)
        real, rest = parts.unbind(-1)
        lost = _lost(real, dtype)
        has_rest = rest != 0
        if lost is not None or has_rest.any():
            return has_rest if lost is None else has_rest | lost
        return None
    kept = dtype.to_real() if dtype.is_complex else dtype
    if source.dtype.is_floating_point:
        wide = source if source.dtype in _LARGE else source.float()
        return _lost_floats(wide, kept) if kept.is_floating_point else _no_wholes(wide, kept)
    return _lost_wholes(source, kept)


def _lost_floats(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Mask floats that become infinite, another kind of number, or the dtype's largest number from afar.

    The nearest number is the largest one for all that lies within half a step of it; a dtype without zero
    or signs has others near."""
    info = torch.finfo(dtype)
    low, high = (one.item() for one in source.aminmax())
    if info.min <= low and high <= info.max and (info.min < 0 or low > 0):
        return None
    most = info.max + info.eps * 2.0 ** math.floor(math.log2(info.max)) / 2
    after = source.to(dtype).to(source.dtype)
    finite = source.isfinite()
    lost = finite & (~after.isfinite() | (source.abs() > most) | (source * after < 0))
    lost |= finite & (source == 0) & (after != 0)
    lost |= ~finite & (source.isnan() != after.isnan())
    lost |= source.isinf() & (source != after)
    return lost if lost.any() else None


def _no_wholes(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Mask floats that are no whole numbers, or whole numbers beyond the dtype."""
    low, past = (
        (0, 2) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1)
    )
    fits = (source >= float(low)) & (source < float(past)) & (source == source.trunc())
    return None if fits.all() else ~fits


def _lost_wholes(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Mask whole numbers that a dtype does not hold exactly: a rounded count or id is a wrong one."""
    values = source.numpy()
    low, high = int(values.min()), int(values.max())
    if not dtype.is_floating_point:
        least, most = (
            (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        )
        if least <= low and high <= most:
            return None
        under = values < least if low < least else np.zeros(values.shape, bool)
        return torch.from_numpy(np.asarray(under | (values > most if high > most else False)))
    exact = round(2 / torch.finfo(dtype).eps)
    info = torch.finfo(dtype)
    if max(-low, high) <= min(exact, info.max) and (info.min < 0 or low > 0):
        return None
    after = source.to(dtype).double().numpy()
    within = (after >= -(2.0**63)) & (after < (2.0**64 if values.dtype == np.uint64 else 2.0**63))
    back = np.where(within, after, 0).astype(values.dtype)
    fits = within & (back == values) & ((after == 0) == (values == 0))
    return None if fits.all() else torch.from_numpy(np.asarray(~fits))
