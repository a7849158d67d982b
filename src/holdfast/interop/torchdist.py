"""Parts of tensors that torch.save has written on each rank: DTensor and ShardedTensor.

Both are pickled with a description of the whole: a ShardedTensor (FSDP1) states the offsets of its
shards, a DTensor (FSDP2, tensor parallelism) its mesh, this rank's coordinate in it, and how each mesh dim
cuts the tensor.  Here either becomes a `Shards`: boxes of the whole, and where their bytes lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from holdfast.errors import FormatError
from holdfast.interop.torchfile import TensorRef, enumerated, kind_of, rebuild, rebuild_parameter
from holdfast.interop.typed import ints, text
from holdfast.interop.unpickle import Global, UnknownInstance, check_size, record
from holdfast.layout import Box, chunk, whole


@dataclass(frozen=True)
class Shards:
    """Parts of a tensor of `shape` that one rank holds; `rank`, `world` if the file states them."""

    dtype: str
    shape: tuple[int, ...]
    held: tuple[tuple[Box, TensorRef], ...]
    rank: int | None
    world: int | None


def _typed(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """`torch._tensor._rebuild_from_type_v2`: a tensor that has attributes or is of a subclass."""
    name = function.name if isinstance(function, UnknownInstance) else function
    if name == "torch._utils._rebuild_wrapper_subclass":
        if kind.name.endswith(".DTensor"):
            return _dtensor(state[1]["_local_tensor"], state[1]["_spec"])
        return _sharded_tensor(*state[:3])
    if name == "torch._utils._rebuild_tensor_v2":
        return rebuild(*args)
    if name == "torch._utils._rebuild_parameter":
        return rebuild_parameter(*args)
    raise FormatError(f"a tensor that {name} makes")


def _wrapped(*_: Any) -> Any:
    raise FormatError("a tensor subclass without its state")


# -- DTensor --------------------------------------------------------------------------------------


def _dtensor(local: Any, spec: UnknownInstance) -> Shards:
    mesh, meta = spec["mesh"], spec["tensor_meta"]
    shape, dtype = ints(meta.args[0]), text(meta.args[2])
    sizes, coordinate = _mesh_shape(mesh), ints(mesh.get("_coordinate_on_dim") or ())
    if not isinstance(local, TensorRef) or local.dtype != dtype:
        raise FormatError(f"a DTensor whose local part is {kind_of(local)}")
    if len(coordinate) != len(sizes):
        raise FormatError("a DTensor of a rank that is not in its mesh")
    box = whole(shape)
    for mesh_dim, dim in _order(spec, sizes):
        box = chunk(box, dim, coordinate[mesh_dim], sizes[mesh_dim])
    if box.shape != local.shape:
        placements = ", ".join(p.name.rpartition(".")[2] for p in spec["placements"])
        raise FormatError(
            f"a DTensor of shape {shape}: ({placements}) over {sizes} leaves {box.shape} at "
            f"{coordinate}, but the local part is {local.shape}"
        )
    held = ((box, local),) if box.size else ()
    rank = mesh.get("_rank")
    return Shards(dtype, shape, held, rank if isinstance(rank, int) else None, None)


def _mesh_shape(mesh: UnknownInstance) -> tuple[int, ...]:
    """Sizes of a mesh's dims: as torch 2.13, 2.9 and 2.6 write them."""
    layout = mesh.get("_layout")
    if isinstance(layout, UnknownInstance) and "axes" in layout.fields:
        return tuple(prod(_flat(axis["shape"])) for axis in layout["axes"])
    if isinstance(layout, UnknownInstance) and "shape" in layout.fields:
        shape = layout["shape"]
        return tuple(prod(_flat(n)) for n in (shape if isinstance(shape, tuple) else (shape,)))
    ranks = mesh.get("mesh") or mesh.get("_mesh")
    if isinstance(ranks, TensorRef):
        return ranks.shape
    raise FormatError("a DeviceMesh of a torch that holdfast does not know")


def _flat(sizes: Any) -> tuple[int, ...]:
    check_size(sizes, 64)
    if isinstance(sizes, int):
        return (sizes,)
    return tuple(n for part in sizes for n in _flat(part))


def _order(spec: UnknownInstance, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """(mesh dim, tensor dim) of every cut, in the order in which they apply.

    Mesh dims apply from first to last, but a strided one waits until later cuts of its dim have made
    `split_factor` parts.  FormatError where the file states another order, or a pending reduction.
    """
    order: list[tuple[int, int]] = []
    check_size(spec["placements"], 1 << 10)
    check_size(spec.get("shard_order"), 1 << 10)
    for mesh_dim, p in reversed(list(enumerate(spec["placements"]))):
        kind = p.name.rpartition(".")[2]
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise FormatError(
                f"a DTensor with the placement {kind}",
                hint="redistribute it to Replicate() or Shard() before saving",
            )
        factor, at = p.get("split_factor", 1) if kind == "_StridedShard" else 1, 0
        while factor > 1 and at < len(order):
            if order[at][1] == p["dim"]:
                factor //= sizes[order[at][0]]
            at += 1
        if factor != 1:
            raise FormatError(f"a DTensor with the placement _StridedShard({p['dim']}, {factor})")
        order.insert(at, (mesh_dim, p["dim"]))
    for entry in spec.get("shard_order") or ():
        dim, stated = entry.args
        if [m for m, d in order if d == dim] != list(stated):
            raise FormatError(f"a DTensor whose dim {dim} is cut in the order {tuple(stated)}")
    return order


# -- ShardedTensor --------------------------------------------------------------------------------


def _sharded_tensor(shards: Any, metadata: UnknownInstance, group: UnknownInstance) -> Shards:
    shape, properties = ints(metadata["size"]), metadata["tensor_properties"]
    dtype = text(properties["state"][0] if "state" in properties.fields else properties["dtype"])
    held = []
    for shard in shards:
        start, sizes = (ints(shard["metadata"][k]) for k in ("shard_offsets", "shard_sizes"))
        box, tensor = Box(start, tuple(a + n for a, n in zip(start, sizes))), shard["tensor"]
        if not isinstance(tensor, TensorRef) or (tensor.shape, tensor.dtype) != (sizes, dtype):
            raise FormatError(f"a shard of {sizes} {dtype} whose tensor is {kind_of(tensor)}")
        if box.size:
            held.append((box, tensor))
    return Shards(
        dtype, shape, tuple(held), int(group["global_rank"]), int(group["global_world_size"])
    )


def _attribute(owner: Any, name: Any) -> Global | UnknownInstance:
    """`getattr`: the one class that torch pickles as an attribute of another, and enumerations."""
    full_name = owner.name if isinstance(owner, UnknownInstance) else owner
    if name == "ProcessGroupState" and str(full_name).endswith(".ShardedTensor"):
        return Global(name, record(name))
    return enumerated(owner, name)


def _records(modules: tuple[str, ...], names: tuple[str, ...]) -> dict[tuple[str, str], Any]:
    return {(module, name): record(name) for module in modules for name in names}


_SHARD = "torch.distributed._shard"
_DTENSOR = ("torch.distributed.tensor", "torch.distributed._tensor")
TABLE: dict[tuple[str, str], Any] = {
    ("torch._tensor", "_rebuild_from_type_v2"): _typed,
    ("torch._utils", "_rebuild_wrapper_subclass"): _wrapped,
    ("torch", "Tensor"): record("Tensor"),
    ("torch.nn.parameter", "Parameter"): record("Parameter"),
    ("torch.nn.parameter", "Buffer"): record("Buffer"),
    ("__builtin__", "getattr"): _attribute,
    ("builtins", "getattr"): _attribute,
    **_records((*_DTENSOR, *(f"{m}.{end}" for m in _DTENSOR for end in ("api", "_api"))), ("DTensor",)),
    **_records(
        tuple(f"{m}.{end}" for m in _DTENSOR for end in ("_dtensor_spec", "placement_types")),
        ("DTensorSpec", "TensorMeta", "ShardOrderEntry", "Shard", "Replicate", "_StridedShard",
         "Partial", "_Partial"),
    ),
    **_records(("torch.distributed.device_mesh", "torch.distributed._tensor.device_mesh"), ("DeviceMesh",)),
    **_records(("torch.distributed._mesh_layout",), ("_MeshLayout", "_FlatLayout")),
    **_records((f"{_SHARD}.sharded_tensor.api",), ("ShardedTensor",)),
    **_records((f"{_SHARD}.sharded_tensor.shard",), ("Shard",)),
    **_records((f"{_SHARD}.metadata",), ("ShardMetadata",)),
    **_records(
        (f"{_SHARD}.sharded_tensor.metadata",),
        ("ShardedTensorMetadata", "TensorProperties", "MEM_FORMAT_ENCODING"),
    ),
    **_records((f"{_SHARD}.sharding_spec.chunk_sharding_spec",), ("ChunkShardingSpec",)),
    **_records((f"{_SHARD}.sharding_spec.api",), ("EnumerableShardingSpec",)),
    **_records(("torch.distributed.remote_device",), ("_remote_device",)),
    ("torch.distributed._tensor.placement_types", "ReduceOp"): record("ReduceOp"),
}  # fmt: skip
