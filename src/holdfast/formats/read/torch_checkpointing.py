"""Checkpoints of torch_checkpointing, read in place: a directory with a file per item and rank.

    model_0.pt, model_1.pt, optim_0.pt, optim_1.pt, epoch_0.pt, ..., metadata.pkl

Each file is one of torch.save, and holds the rank's local tensors.  `metadata.pkl` says how the tensors of
all ranks make up the whole: for each path inside an item the placements on a mesh, or the parts that a rank
holds, and in which ranks.  With it local tensors become `Shards`, and the rest is as for any files of ranks
(`merged_ranks`, `torchsave`).  It is written where an item declares a resharder; without it tensors are
taken for replicas, which must not differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import prod
from typing import Any

from holdfast.base.errors import FormatError, NotFound
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.format.dtypes import DTYPES
from holdfast.core.layout import Box
from holdfast.core.layout.box import box_at
from holdfast.core.store import Store
from holdfast.formats.read.folder import top
from holdfast.formats.read.merged_ranks import Shards, merged, shard_box
from holdfast.formats.read.plaindata import ints, text
from holdfast.formats.read.torchfile import TensorRef
from holdfast.formats.read.torchfiles import files_trees
from holdfast.formats.read.torchsave import open_trees
from holdfast.formats.read.unpickle import MALFORMED, UnknownInstance, unpickle

_METADATA = "metadata.pkl"
_ITEM = re.compile(r"(?P<item>.+)_(?P<rank>\d{1,9})\.pt")
_KINDS = {"Shard": "Shard", "StridedShard": "_StridedShard", "Replicate": "Replicate"}

_Metadata = dict[str, dict[str, Any]]
"""By item: the groups of ranks of each path (as JSON), and the layouts of ranks."""


def is_torch_checkpointing(store: Store) -> bool:
    """True if a folder has files of ranks with their metadata."""
    return _METADATA in top(store) and may_be_torch_checkpointing(store)


def may_be_torch_checkpointing(store: Store) -> bool:
    """True if a folder holds a file of rank 0."""
    return any(0 in files for files in _by_item(top(store)).values())


def open_torch_checkpointing(store: Store, step: int | None = None) -> Checkpoint:
    """Open a directory.  FormatError, Corrupt or NotFound if files are not whole, or are missing."""
    names = top(store)
    metadata, world = _metadata(store) if _METADATA in names else ({}, None)
    items = _by_item(names)
    for item, known in metadata.items():
        layouts = known["rank_to_layout_info"]
        given = {int(r): _file(item, at) for r, at in layouts.items() if at is not None}
        items[item] = items.get(item, {}) | given
    last = max((rank for files in items.values() for rank in files), default=-1)
    if world is not None and last >= world:
        raise FormatError(
            f"files of rank {last}, and the metadata is of {world} ranks",
            key=_METADATA,
            hint="files of two saves do not belong together",
        )
    num_ranks = 1 + last if world is None else world
    tree = {
        item: _of_ranks(store, item, files, metadata.get(item), num_ranks)
        for item, files in items.items()
    }
    return open_trees(store, [tree], step, {"torch_checkpointing": "unknown"})


def _by_item(names: list[str]) -> dict[str, dict[int, str]]:
    """The files of each item, by rank."""
    found: dict[str, dict[int, str]] = {}
    for name in names:
        if match := _ITEM.fullmatch(name):
            found.setdefault(match["item"], {})[int(match["rank"])] = name
    return found


def _file(item: str, layout: Any) -> str:
    kind = text(layout["serialization_format"]["type"])
    if kind != "TorchSerialization":
        raise FormatError(
            f"item {item!r} is stored by {kind}",
            hint="only items that torch.save has written are read; load it by torch_checkpointing",
        )
    return text(layout["file_path"])


def _metadata(store: Store) -> tuple[_Metadata, int]:
    """The metadata by item, and the number of ranks."""
    try:
        tree = unpickle(store.get(_METADATA), {})
        if text(tree["version"]) not in ("2.0", "3.0"):
            raise FormatError(f"metadata of version {tree['version']!r}")
        return {text(item): dict(known) for item, known in tree["metadata"].items()}, int(
            tree["world_size"]
        )
    except FormatError as error:
        error.key = error.key or _METADATA
        raise
    except MALFORMED as error:
        raise FormatError(f"malformed metadata: {error}", key=_METADATA) from None


def _of_ranks(
    store: Store, item: str, files: dict[int, str], known: Mapping[str, Any] | None, num_ranks: int
) -> Any:
    """One tree of all ranks' files of an item; an item of rank 0 alone is what that has."""
    missing = next((rank for rank in range(num_ranks) if rank not in files), None)
    if missing is not None and (set(files) != {0} or known is not None):
        raise NotFound(
            f"no file of rank {missing} of item {item!r}",
            key=next(iter(files.values()), item),
            hint="open the directory that holds the file of every rank",
        )
    groups = {} if known is None else _groups(known["nested_path_to_metadata"])
    ranks = sorted(files)
    read = files_trees(store, [files[r] for r in ranks])
    trees = [_placed(tree, (), groups, r) for tree, r in zip(read, ranks)]
    return merged(trees, [files[r] for r in ranks], item)


def _groups(paths: Any) -> dict[tuple[Any, ...], dict[int, Any]]:
    """Return the metadata of the tensor at each path, by rank."""
    try:
        return {
            tuple(json.loads(path)): {
                rank: group["sharding_metadata"] for group in groups for rank in group["ranks"]
            }
            for path, groups in paths.items()
        }
    except MALFORMED as error:
        raise FormatError(f"malformed metadata: {error}", key=_METADATA) from None


def _placed(value: Any, path: tuple[Any, ...], groups: Any, rank: int) -> Any:
    """A rank's tree, with local tensors replaced by their `Shards` from the metadata."""
    if isinstance(value, dict):
        return {k: _placed(v, (*path, k), groups, rank) for k, v in value.items()}
    if isinstance(value, list):
        return [_placed(v, (*path, i), groups, rank) for i, v in enumerate(value)]
    said = groups.get(path, {}).get(rank)
    if said is None or not isinstance(value, TensorRef):
        return value
    try:
        return _shards(value, said["type"], said["data"], rank)
    except MALFORMED as error:
        raise FormatError(f"malformed metadata of {path}: {error}", key=_METADATA) from None


def _shards(local: TensorRef, kind: str, said: Mapping[str, Any], rank: int) -> Shards:
    shape, dtype = ints(said["global_shape"]), text(said["dtype"]).removeprefix("torch.")
    if local.dtype != dtype:
        raise FormatError(f"a part of {local.dtype} of a tensor of {dtype}", key=local.path)
    if kind == "DTensorShardingMetadata":
        held = [(_box(shape, said["mesh_spec"], said["placements"], rank), local)]
    elif kind == "default_tensor_v1":
        parts = zip(said["global_offsets"], said["local_offsets"], said["local_sizes"], strict=True)
        held = [_part(local, *map(ints, part)) for part in parts]
    else:
        raise FormatError(f"a tensor that {kind} describes", hint="load it by torch_checkpointing")
    for box, tensor in held:
        if box.shape != tensor.shape:
            raise FormatError(
                f"a part of {box.shape} whose tensor is {tensor.shape}", key=local.path
            )
    return Shards(dtype, shape, tuple(one for one in held if one[0].size), rank, None)


def _box(shape: tuple[int, ...], mesh: Mapping[str, Any], placements: Any, rank: int) -> Box:
    """Return what a rank holds of a DTensor."""
    sizes, at = ints(mesh["mesh_shape"]), list(mesh["mesh_data"]).index(rank)
    coordinate = [at // prod(sizes[i + 1 :]) % sizes[i] for i in range(len(sizes))]
    spec = UnknownInstance("DTensorSpec")
    spec.fields["placements"] = tuple(_placement(p) for p in placements)
    return shard_box(spec, shape, sizes, tuple(coordinate))


def _placement(said: Mapping[str, Any]) -> UnknownInstance:
    found = UnknownInstance(_KINDS[said["type"]])
    found.fields = {k: int(v) for k, v in said.items() if k != "type"}
    return found


def _part(
    local: TensorRef, start: tuple[int, ...], inside: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[Box, TensorRef]:
    """A box of the whole, and the region of a local tensor that holds it."""
    if any(a < 0 or n < 0 or a + n > m for a, n, m in zip(inside, sizes, local.shape, strict=True)):
        raise FormatError(f"a part that leaves its tensor of {local.shape}", key=local.path)
    skip = sum(a * s for a, s in zip(inside, local.strides)) * DTYPES[local.dtype].bytes
    tensor = TensorRef(local.dtype, sizes, local.strides, local.path, local.offset + skip)
    return box_at(start, sizes), tensor
