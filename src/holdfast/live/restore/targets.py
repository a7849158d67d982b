"""Memory that a restore reads into: live tensors, or new ones like them.  Nothing is read here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.base.errors import FormatError, HoldfastError
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.rows import RAW, Array, ArrayTarget, Target
from holdfast.core.format.manifest import TensorEntry
from holdfast.core.layout import Mesh
from holdfast.live.restore.page_locked_blocks import copy_in
from holdfast.live.state.arrays import array_of
from holdfast.live.state.placed import memory_of, place, torch_dtype
from holdfast.live.state.tensor_kinds import PLAIN_TENSORS, check_kind, writing


@dataclass(frozen=True)
class RestoreOptions:
    """Options of a restore: what may differ between checkpoint and live state."""

    only: tuple[str, ...] | None = None
    cast: bool = False
    strict: bool = True
    on_resize: dict[str, str] = field(default_factory=dict)
    mesh: Mesh | None = None
    """The live mesh, if the user named one."""
    kept: list[str] = field(default_factory=list)
    """Names of live values that a restore with these options left as they were."""

    def wanted(self, name: str) -> bool:
        return self.only is None or any(fnmatchcase(name, p) for p in self.only)


@dataclass(frozen=True)
class TorchTarget:
    """A live tensor that takes values by `copy_`: on a device, or conjugated or negated lazily."""

    tensor: torch.Tensor
    dtype: torch.dtype

    def memory(self) -> memoryview | None:
        return None

    def put(self, at: tuple[slice, ...], values: Array) -> None:
        with writing(self.tensor):
            copy_in(self.tensor[at], self.dtype, values)


def target_of(local: torch.Tensor, dtype: str, name: str) -> Target:
    """The target for values of tensor `name` in a live local tensor; `dtype`: the saved one."""
    saved = torch_dtype(dtype)
    if local.dtype != saved:
        from holdfast.live.restore.casting import CastTarget

        return CastTarget(local.detach(), saved, name)
    if local.is_cpu and not (local.is_conj() or local.is_neg()):
        array = array_of(local)
        return ArrayTarget(array.view(RAW[array.itemsize]))
    return TorchTarget(local.detach(), saved)


def entry_of(checkpoint: Checkpoint, name: str) -> TensorEntry | None:
    """The manifest's entry of a tensor; None if it has none."""
    index = checkpoint.manifest.find(name)
    return None if index is None else checkpoint.manifest.tensors[index]


def is_known(checkpoint: Checkpoint, name: str) -> bool:
    """True if a tensor was saved under a name."""
    return checkpoint.manifest.find(name) is not None


def counts_stay(group: dict[str, Any]) -> bool:
    """True if torch's optimizers keep the counts of a group, states called "step", on the CPU."""
    return not (group.get("capturable") or group.get("fused"))


def empty_in(
    order: Sequence[int],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    name: str,
) -> torch.Tensor:
    """Memory for a state whose dims lie in this order.  FormatError if it is no order of the dims."""
    if sorted(order) != list(range(len(shape))):
        raise FormatError(
            f"malformed extras: {name!r} of shape {shape} lies in the order {order!r}"
        )
    outer = torch.empty([shape[d] for d in order], dtype=dtype, device=device)
    return outer.permute([list(order).index(d) for d in range(len(shape))])


def empty_alike(
    tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor | None:
    """Memory with the device and the cuts of a tensor; None if its shape differs, or if nothing can be read
    into its kind."""
    if not isinstance(tensor, DTensor) and type(tensor) not in PLAIN_TENSORS:
        return None
    try:
        check_kind(memory_of(tensor), "")
        place(tensor, "")
    except HoldfastError:
        return None
    if tuple(tensor.shape) != shape:
        return None
    return torch.empty_like(tensor, dtype=dtype, requires_grad=False)
