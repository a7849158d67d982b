"""NaN in memory that was made for a load which then fails: it holds whatever lay there before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from holdfast.live.state.modules import submodules, unwrap
from holdfast.live.state.placed import memory_of
from holdfast.live.state.recognising import State, stages
from holdfast.live.state.tensor_kinds import writing


@contextmanager
def nan_if_it_fails(state: State) -> Iterator[None]:
    """Fill what is on the meta device now, and real at the end of a block that fails, with NaN."""
    places = [
        (own, name)
        for value in state.values()
        for module in stages(value) or ()
        for part in submodules(unwrap(module))
        for own in (part._parameters, part._buffers)
        for name, tensor in own.items()
        if tensor is not None and tensor.is_meta
    ]
    try:
        yield
    except BaseException:
        for own, name in places:
            made = own.get(name)
            if isinstance(made, torch.Tensor) and not made.is_meta:
                _fill(memory_of(made.detach()))
        raise


def _fill(memory: torch.Tensor) -> None:
    if memory.dtype.is_floating_point or memory.dtype.is_complex:
        with writing(memory), suppress(RuntimeError):  # float4 has no NaN
            memory.fill_(float("nan"))
