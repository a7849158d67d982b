"""The place of a live tensor in the whole: from a torch tensor or DTensor to a box and cuts.

A DTensor says by placements how its mesh's dims cut it.  Mesh dims become `Axis`es (ranks a stride apart),
because each rank sees only its own slice of a sub-mesh; the common mesh is found when all ranks plan
together.  `_StridedShard` means: this mesh dim cuts *after* the later ones on the same dim (FSDP2 over
tensor parallelism), so it moves behind them.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import msgspec
import torch
from torch.distributed.tensor import DTensor

from holdfast.base.errors import FormatError, LayoutError, need
from holdfast.core.layout import Axis, Box, chunk, whole
from holdfast.live.sources import Master
from holdfast.live.state.tensor_kinds import check_kind, is_plain_type

need("torch", DTensor, "_local_tensor")

AxisCut = tuple[int, Axis]


class Placed(msgspec.Struct, frozen=True, eq=False):
    """A rank's part of a tensor.  `cuts` is None where the rank's number and axes do not tell its box."""

    local: torch.Tensor
    shape: tuple[int, ...]
    box: Box
    cuts: tuple[AxisCut, ...] | None = ()

    @property
    def dtype(self) -> str:
        return dtype_name(self.local.dtype)


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name as manifests have it."""
    return str(dtype).removeprefix("torch.")


@cache
def torch_dtype(name: str) -> torch.dtype:
    """A dtype by the name that manifests use; FormatError if this torch lacks it."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise FormatError(
            f"torch {torch.__version__} has no dtype {name}",
            hint="install a newer torch, or read such tensors by holdfast.open()",
        )
    return found


def place(tensor: torch.Tensor, name: str) -> Placed:
    """Describe a tensor.  Shares memory with it.

    LayoutError for a tensor without a known place; UsageError for a tensor without memory.
    """
    if isinstance(tensor, DTensor):
        return _place_dtensor(tensor, name)
    check_kind(tensor, name)
    box = whole(tensor.shape)  # tensors of one shape share it
    return Placed(tensor.detach(), box.stop, box)


def parts_in(master: Master, value: torch.Tensor, name: str) -> tuple[Placed, ...]:
    """Parts of a weight in its master, or in a state with the master's layout; a number is whole."""
    if master.cut is None or (not value.ndim and value is not master.tensor):
        return (place(value, name),)
    if value.shape != master.tensor.shape:
        raise LayoutError(
            f"{name!r}: a state of shape {tuple(value.shape)} beside a master of shape "
            f"{tuple(master.tensor.shape)}: which part of what it is cannot be known",
            hint="only states of optimizers that work element by element can be kept beside masters",
        )
    shape = whole_shape(master)
    everything = whole(shape)
    return tuple(
        Placed(local, shape, box, () if box == everything else None)
        for box, local in master.cut(value.detach())
    )


def whole_shape(master: Master) -> tuple[int, ...]:
    """Shape of the whole weight of which a master has a part."""
    return tuple(master.tensor.shape) if master.shape is None else master.shape


def _place_dtensor(tensor: DTensor, name: str) -> Placed:
    with torch.no_grad():  # detaching a DTensor is slow; a parameter would mark its local tensor
        plain = tensor.detach() if isinstance(tensor, torch.nn.Parameter) else tensor
        local = plain.to_local()
        check_kind(local, name)
        local = local.detach()
    box, cuts = dtensor_box(tensor, name)
    return Placed(local, tuple(tensor.shape), box, cuts)


def dtensor_box(tensor: DTensor, name: str) -> tuple[Box, tuple[AxisCut, ...] | None]:
    """The box of a DTensor on this rank, and the cuts that make it.  LayoutError if they are unknown."""
    mesh, placements, shape = tensor.device_mesh, tensor.placements, tuple(tensor.shape)
    local = tensor._local_tensor
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise LayoutError(f"{name!r}: this rank is not in the tensor's mesh {mesh}")
    if any(p.is_partial() for p in placements):
        raise LayoutError(
            f"{name!r}: placement {placements} is a pending reduction",
            hint="redistribute it to Replicate() or Shard() before saving",
        )
    try:
        box, cuts = cut_by(mesh, tuple(coordinate), tuple(placements), shape)
    except LayoutError as error:
        raise LayoutError(f"{name!r}: {error.message}", hint=error.hint) from None
    if box.shape != tuple(local.shape):
        raise LayoutError(
            f"{name!r}: {placements} over {mesh} should leave {box.shape} here, "
            f"but the local tensor is {tuple(local.shape)}",
            hint="only cuts as torch.chunk makes them are known; a tensor that is cut otherwise tells by "
            "__create_chunk_list__() and __get_tensor_shard__() which parts a rank has",
        )
    return box, cuts


@lru_cache(4096)
def cut_by(
    mesh: Any, coordinate: tuple[int, ...], placements: tuple[Any, ...], shape: tuple[int, ...]
) -> tuple[Box, tuple[AxisCut, ...] | None]:
    """The box of a DTensor at a coordinate of its mesh, and the cuts that make it."""
    box = whole(shape)
    order = shard_order(placements, tuple(mesh.shape))
    for mesh_dim, dim in order:
        box = chunk(box, dim, coordinate[mesh_dim], mesh.size(mesh_dim))
    axes = mesh_axes(mesh)
    return box, None if axes is None else tuple((dim, axes[m]) for m, dim in order)


def shard_order(placements: Any, sizes: Any) -> list[tuple[int, int]]:
    """(mesh dim, tensor dim) of every cut, in the order in which they apply.

    Mesh dims apply from first to last, but a strided one waits until later cuts of its dim have
    made `split_factor` parts.  LayoutError if they do not: then a rank has stripes of the dim, as of a
    matrix that is cut by columns and then flattened.
    """
    order: list[tuple[int, int]] = []
    for mesh_dim in reversed(range(len(placements))):
        p = placements[mesh_dim]
        if p.is_replicate():
            continue
        factor, at = getattr(p, "split_factor", 1), 0
        while factor > 1 and at < len(order):
            if order[at][1] == p.dim:
                factor /= sizes[order[at][0]]
            at += 1
        if factor != 1 and sizes[mesh_dim] > 1:
            raise LayoutError(
                f"{p!r} over {sizes[mesh_dim]} ranks gives each of them stripes of dim {p.dim} in place of "
                "one part",
                hint="redistribute it to Shard() or Replicate(); optimizers that flatten a parameter of "
                "tensor parallelism make such states",
            )
        order.insert(at, (mesh_dim, p.dim))
    return order


@lru_cache(16)
def mesh_axes(mesh: Any) -> list[Axis] | None:
    """Return an Axis per mesh dim, or None unless rank // stride % size is the coordinate of each rank."""
    ranks = mesh.mesh
    names = mesh.mesh_dim_names or (None,) * ranks.ndim
    axes = []
    for dim, name in enumerate(names):
        size = ranks.size(dim)
        stride = int(ranks.diff(dim=dim).reshape(-1)[0]) if size > 1 else 1
        expected = torch.arange(size).reshape([size if d == dim else 1 for d in range(ranks.ndim)])
        if stride < 1 or bool((ranks // stride % size != expected).any()):
            return None
        axes.append(Axis(stride, size, name))
    return axes


def box_in(part: torch.Tensor, tensor: torch.Tensor) -> Box:
    """The box of a tensor that `part`, a slice of it, covers.  LayoutError if it is none."""
    left = part.storage_offset() - tensor.storage_offset()
    same = part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    if not same or left < 0 or part.stride() != tensor.stride():
        raise LayoutError("a part of a weight that is no slice of it")
    start = []
    for stride in tensor.stride():
        start.append(left // stride)
        left %= stride
    return Box(tuple(start), tuple(a + n for a, n in zip(start, part.shape)))


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_apart(tensor: torch.Tensor) -> bool:
    """True if a tensor's values are not in one memory of its own (`state.composite_tensors`)."""
    memory = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    kind = type(memory)
    return (
        not is_plain_type(kind)  # type: ignore[arg-type]
        or memory.layout is not torch.strided
        or memory.is_nested
    )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a plain tensor or a DTensor, detached; shares memory."""
    return memory_of(tensor).detach()
