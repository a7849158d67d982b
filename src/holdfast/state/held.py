"""Memory of a module that is saved in any case: of its parameters and persistent buffers.

A state-dict hook may give a parameter another name, or split it into views.  So an entry of a
`state_dict()` is looked for three ways: by identity, which nearly all entries are found by; then by name;
then by where in which storage it lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from holdfast.state.live import has_extra_state, parts_of
from holdfast.state.wrappers import parts

Span = tuple[tuple[Any, int], int, int]
"""A storage (device and address), and the half-open range of its bytes that a tensor reaches over."""


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """The place in memory of a tensor, to be compared; None if it has no memory of its own."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if isinstance(local, UninitializedTensorMixin):
        return None
    try:
        at = local.untyped_storage().data_ptr() + local.storage_offset() * local.element_size()
    except (RuntimeError, NotImplementedError):  # a subclass around several tensors
        return None
    if not local.untyped_storage().nbytes():
        return None
    return local.device, at, local.dtype, tuple(local.shape), local.stride()


def is_same(tensor: torch.Tensor, other: Any) -> bool:
    """True if two values are one tensor, or lie in the same memory."""
    if tensor is other:
        return True
    return isinstance(other, torch.Tensor) and memory_of(tensor) == memory_of(other) is not None


def _span(tensor: torch.Tensor) -> Span | None:
    """The bytes of a storage that a tensor reaches over; None if it has no memory of its own."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if memory_of(local) is None or not local.numel():
        return None
    size = local.element_size()
    start = local.storage_offset() * size
    reach = sum((n - 1) * step for n, step in zip(local.shape, local.stride()))
    return (local.device, local.untyped_storage().data_ptr()), start, start + (reach + 1) * size


class SavedTensors:
    """The tensors of a module that are saved anyway; with `whole`, those of its submodules, too.

    `names` and `tensors` are known to be saved besides.
    """

    def __init__(
        self,
        part: nn.Module,
        *,
        whole: bool,
        names: Iterable[str] = (),
        tensors: Iterable[torch.Tensor] = (),
    ) -> None:
        self._part, self._whole = part, whole
        self._more_names, self._more = frozenset(names), tuple(tensors)
        found = (t for one in (parts_of(part) if whole else (part,)) for _, t in _persistent(one))
        self._ids = {id(t) for t in (*found, *self._more)}

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and buffers by their names in the checkpoint, which begin at the module."""
        for prefix, one in self._parts():
            yield from ((prefix + name, tensor) for name, tensor in _persistent(one))

    def _parts(self) -> Iterable[tuple[str, nn.Module]]:
        return parts(self._part) if self._whole else [("", self._part)]

    @cached_property
    def names(self) -> set[str]:
        """Names of what is saved anyway."""
        states = {f"{at}_extra_state" for at, one in self._parts() if has_extra_state(type(one))}
        return {name for name, _ in self.named()} | states | self._more_names

    @cached_property
    def _spans(self) -> dict[tuple[Any, int], list[tuple[int, int]]]:
        found: dict[tuple[Any, int], list[tuple[int, int]]] = {}
        for tensor in (*(t for _, t in self.named()), *self._more):
            if (span := _span(tensor)) is not None:
                found.setdefault(span[0], []).append(span[1:])
        return found

    def is_one(self, value: Any) -> bool:
        """True if a value is one of the tensors itself."""
        return id(value) in self._ids

    def has(self, value: Any) -> bool:
        """True if a value is one of the tensors or a view of one."""
        if self.is_one(value):
            return True
        span = _span(value) if isinstance(value, torch.Tensor) else None
        if span is None:
            return False
        storage, start, stop = span
        return any(a <= start and stop <= b for a, b in self._spans.get(storage, ()))


def _persistent(part: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's own parameters and persistent buffers."""
    for name, tensor in part._parameters.items():
        if tensor is not None:
            yield name, tensor
    for name, buffer in part._buffers.items():
        if buffer is not None and name not in part._non_persistent_buffers_set:
            yield name, buffer
