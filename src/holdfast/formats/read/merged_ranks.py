"""Merging the trees of values of several ranks into one tree.

A DTensor and a ShardedTensor are pickled with a description of the whole: a ShardedTensor (FSDP1) states
the offsets of its shards, a DTensor (FSDP2, tensor parallelism) its mesh, this rank's coordinate in it,
and how each mesh dim cuts the tensor.  `DISTRIBUTED` converts either to `Shards`: boxes of the whole
tensor, and places of their bytes.  Then `merged` merges the trees of all ranks:

    {"w": <rows 0:2>, "epoch": 3}, {"w": <rows 2:4>, "epoch": 3}   ->   {"w": Tensor of 4 rows, "epoch": 3}

Parts of a tensor become one `Tensor`.  If each rank holds the whole tensor, those of the other ranks are
its copies.  Other values that differ between ranks become `ByRank`.  The caller decides whether values may
differ; `replicated_value` refuses every difference, which shows that each rank saved a state of its own, or
that the files are of several saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from holdfast.base.errors import FormatError
from holdfast.core.format import extras
from holdfast.core.format.dtypes import DTYPES, numpy_dtype
from holdfast.core.layout import Box, chunk, whole
from holdfast.core.layout.box import box_at
from holdfast.core.store import Store, read_range
from holdfast.formats.read.foreign import StoredPart
from holdfast.formats.read.plaindata import ints, plain_value, text
from holdfast.formats.read.torchfile import (
    TensorRef,
    enumerated,
    kind_text,
    rebuild,
    rebuild_parameter,
)
from holdfast.formats.read.unpickle import Global, UnknownInstance, check_size, record


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
        raise FormatError(f"a DTensor whose local part is {kind_text(local)}")
    if len(coordinate) != len(sizes):
        raise FormatError("a DTensor of a rank that is not in its mesh")
    box = shard_box(spec, shape, sizes, coordinate)
    if box.shape != local.shape:
        placements = ", ".join(p.name.rpartition(".")[2] for p in spec["placements"])
        raise FormatError(
            f"a DTensor of shape {shape}: ({placements}) over {sizes} leaves {box.shape} at "
            f"{coordinate}, but the local part is {local.shape}"
        )
    held = ((box, local),) if box.size else ()
    rank = mesh.get("_rank")
    return Shards(dtype, shape, held, rank if isinstance(rank, int) else None, None)


def shard_box(
    spec: UnknownInstance,
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> Box:
    """The box that a rank at `coordinate` of a mesh of `sizes` holds, by the placements."""
    box = whole(shape)
    for mesh_dim, dim in _order(spec, sizes):
        box = chunk(box, dim, coordinate[mesh_dim], sizes[mesh_dim])
    return box


def _mesh_shape(mesh: UnknownInstance) -> tuple[int, ...]:
    """Sizes of a mesh's dims, as written by torch 2.13, 2.9 and 2.6."""
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
    check_size(sizes, 1 << 9)
    if isinstance(sizes, int):
        return (sizes,)
    return tuple(n for part in sizes for n in _flat(part))


def _order(spec: UnknownInstance, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """(mesh dim, tensor dim) of every cut, in the order in which they apply.

    Mesh dims apply from first to last, but a strided one waits until later cuts of its dim have made
    `split_factor` parts.  FormatError where the file states another order, or a pending reduction.
    """
    order: list[tuple[int, int]] = []
    check_size(spec["placements"], 1 << 13)
    check_size(spec.get("shard_order"), 1 << 13)
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
        box, tensor = box_at(start, sizes), shard["tensor"]
        if not isinstance(tensor, TensorRef) or (tensor.shape, tensor.dtype) != (sizes, dtype):
            raise FormatError(f"a shard of {sizes} {dtype} whose tensor is {kind_text(tensor)}")
        if box.size:
            held.append((box, tensor))
    return Shards(
        dtype, shape, tuple(held), int(group["global_rank"]), int(group["global_world_size"])
    )


def _attribute(owner: Any, name: Any) -> Global | UnknownInstance:
    """Stand-in for `getattr`, for a class that torch pickles as an attribute, and for enumerations."""
    full_name = owner.name if isinstance(owner, UnknownInstance) else owner
    if name == "ProcessGroupState" and str(full_name).endswith(".ShardedTensor"):
        return Global(name, record(name))
    return enumerated(owner, name)


def _records(modules: tuple[str, ...], names: tuple[str, ...]) -> dict[tuple[str, str], Any]:
    return {(module, name): record(name) for module in modules for name in names}


_SHARD = "torch.distributed._shard"
_DTENSOR = ("torch.distributed.tensor", "torch.distributed._tensor")
DISTRIBUTED: dict[tuple[str, str], Any] = {
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


@dataclass(frozen=True)
class Tensor:
    """A whole tensor.  `sets`: the parts that make it up, and further sets of replicas.

    `whole`: the whole tensors that ranks have saved.  `same`: equal for tensors in the same place.
    """

    dtype: str
    shape: tuple[int, ...]
    sets: tuple[tuple[StoredPart, ...], ...]
    whole: tuple[TensorRef, ...] = ()
    same: Any = None

    @property
    def of_each(self) -> bool:
        """True if each rank saved a whole tensor, which may not be replicas."""
        return len(self.whole) > 1


@dataclass(frozen=True)
class ByRank:
    """A value that differs between ranks, and the ranks' files."""

    values: tuple[Any, ...]
    files: tuple[str, ...]


def merged(trees: Sequence[Any], files: Sequence[str], path: str = "") -> Any:
    """Merge the trees of ranks 0, 1, ...  FormatError if parts do not belong together."""
    first = trees[0]
    if all(isinstance(t, (TensorRef, Shards)) for t in trees):
        return _tensor(trees, files, path)
    if all(isinstance(t, dict) for t in trees) and all(t.keys() == first.keys() for t in trees):
        return {
            k: merged([t[k] for t in trees], files, f"{path}.{k}" if path else str(k))
            for k in first
        }
    alike = all(type(t) is type(first) for t in trees)
    if isinstance(first, (list, tuple)) and alike and len({len(t) for t in trees}) == 1:
        items = [merged([t[i] for t in trees], files, f"{path}[{i}]") for i in range(len(first))]
        return items if isinstance(first, list) else tuple(items)
    if len(trees) == 1:
        known = not isinstance(first, UnknownInstance)
        return first if known else merged([plain_value(first)], files, path)
    if alike and not isinstance(first, (dict, list, tuple, TensorRef, Shards)):
        if all(_json(t) == _json(first) for t in trees):
            return merged([first], files, path)
    return ByRank(tuple(merged([t], files, path) for t in trees), tuple(files))


def _json(value: Any) -> Any:
    """Encode a plain value so that equal values compare equal, also NaN and arrays."""
    return extras.encode(value, lambda other, where: _json(plain_value(other)))


def _tensor(leaves: Sequence[TensorRef | Shards], files: Sequence[str], path: str) -> Any:
    plain_ones = [t for t in leaves if isinstance(t, TensorRef)]
    shards = [t for t in leaves if isinstance(t, Shards)]
    if plain_ones and shards:
        raise FormatError(f"{path!r} is sharded on some ranks and not on others")
    if len({(t.dtype, t.shape) for t in leaves}) != 1:
        if shards:
            kinds = ", ".join(dict.fromkeys(f"{t.dtype} {t.shape}" for t in leaves))
            raise FormatError(f"{path!r} is of another kind on each rank: {kinds}")
        return ByRank(tuple(_tensor([t], files, path) for t in leaves), tuple(files))
    first = leaves[0]
    if shards:
        return Tensor(first.dtype, first.shape, _sets(shards, path))
    sets = tuple(_parts(t, None, path) for t in plain_ones)
    same = (plain_ones[0].path, plain_ones[0].offset, first.shape, plain_ones[0].strides)
    return Tensor(first.dtype, first.shape, sets, tuple(plain_ones), same)


def _parts(tensor: TensorRef, box: Box | None, path: str) -> tuple[StoredPart, ...]:
    try:
        return tensor.parts(box)
    except FormatError as error:
        raise FormatError(f"{path!r}: {error.message}", key=error.key, hint=error.hint) from None


def _sets(leaves: Sequence[Shards], path: str) -> tuple[tuple[StoredPart, ...], ...]:
    """Return complete sets of parts, as many as each box has holders."""
    _check_ranks(leaves, path)
    holders: dict[Box, list[tuple[StoredPart, ...]]] = {}
    for leaf in leaves:
        for box, tensor in leaf.held:
            holders.setdefault(box, []).append(_parts(tensor, box, path))
    count = min((len(h) for h in holders.values()), default=1)
    return tuple(tuple(p for h in holders.values() for p in h[i]) for i in range(count))


def _check_ranks(leaves: Sequence[Shards], path: str) -> None:
    """FormatError unless the files are those of all ranks, in order."""
    hint = "open the folder that holds the file of every rank, and no other files"
    if len(leaves) == 1 and any(box != whole(leaves[0].shape) for box, _ in leaves[0].held):
        raise FormatError(f"{path!r}: this file holds one rank's part of it", hint=hint)
    for number, leaf in enumerate(leaves):
        if leaf.world not in (None, len(leaves)):
            raise FormatError(
                f"{path!r} was saved by {leaf.world} ranks, but there are {len(leaves)} files",
                hint=hint,
            )
        if leaf.rank not in (None, number) and len(leaves) > 1:
            raise FormatError(
                f"{path!r}: the file of rank {number} was saved by rank {leaf.rank}", hint=hint
            )


# -- what may not differ --------------------------------------------------------------------------


def replicated_value(store: Store, value: Any, path: str) -> Any:
    """Return a replicated value.  FormatError if its replicas are known to differ without reading them.

    Tensors are compared by the checksums of their storages, if there are any; single numbers by value.
    """
    if isinstance(value, ByRank):
        shown = [_shown(v) for v in value.values]
        rank = next((r for r, one in enumerate(shown) if one != shown[0]), 1)
        raise _differ(path, (value.files[0], shown[0]), (value.files[rank], shown[rank]))
    if isinstance(value, Tensor):
        for other in value.whole[1:]:
            _check_replica(store, value.whole[0], other, path)
        return replace(value, whole=value.whole[:1])
    if isinstance(value, dict):
        return {k: replicated_value(store, v, f"{path}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [replicated_value(store, v, f"{path}.{i}") for i, v in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return value


def _check_replica(store: Store, first: TensorRef, other: TensorRef, path: str) -> None:
    told = first.content is not None and other.content is not None
    if told and (first.content, first.strides) == (other.content, other.strides):
        return
    if not first.shape:
        a, b = scalar(store, first), scalar(store, other)
        if repr(a) != repr(b):
            raise _differ(path, (first.path, a), (other.path, b))
    elif told:
        raise _differ(path, (first.path, "one tensor"), (other.path, "another"))


def scalar(store: Store, tensor: TensorRef) -> Any:
    """The element of a tensor without dims."""
    raw = read_range(store, tensor.path, tensor.offset, DTYPES[tensor.dtype].bytes)
    return np.frombuffer(raw, numpy_dtype(tensor.dtype))[0].item()


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {value.shape}"
    plain_value = value is None or isinstance(value, (bool, int, float, str))
    return repr(value)[:60] if plain_value else f"another {type(value).__name__}"


def _differ(path: str, first: tuple[str, Any], other: tuple[str, Any]) -> FormatError:
    return FormatError(
        f"{path!r} is {first[1]} in {first[0]} and {other[1]} in {other[0]}",
        key=other[0],
        hint="files of two saves do not belong together; tensors that are cut have to say how: save "
        "DTensors, FSDP1's SHARDED_STATE_DICT or FULL_STATE_DICT, or by torch.distributed.checkpoint; "
        "of ranks that are replicas open one file",
    )
