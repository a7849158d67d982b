"""Only weights: a folder of safetensors for Hugging Face's loaders, one safetensors file, or one file of
torch.save.

A folder has one file, or shards and an index; torch.save's is as DeepSpeed's `zero_to_fp32` writes it.
"""

from __future__ import annotations

import json

from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.outfiles import ElementSpan, Literal, Outfile
from holdfast.core.checkpoint.tidying import INDEX
from holdfast.core.format.dtypes import dtype_of
from holdfast.core.format.safetensors import weight_index
from holdfast.formats.write.archive import ArchivedTensor, ArchivePlan, add_archive
from holdfast.formats.write.file_plans import Planned, Weight, WriteOptions, weights

_NAME = "model"
_ALIGN = 64


def plan_huggingface(source: Checkpoint, options: WriteOptions) -> Planned:
    """Plan the model's weights in files of at most `max_file_bytes`, or of one larger tensor."""
    shards = shard(weights(source, options), options.max_file_bytes)
    count = len(shards)
    names = [f"{_NAME}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    if count == 1:
        names = [f"{_NAME}.safetensors"]
    files = tuple(safetensors_file(name, some) for name, some in zip(names, shards))
    return Planned(files, _index(names, shards) if count > 1 else ())


def plan_safetensors(source: Checkpoint, options: WriteOptions, path: str) -> Planned:
    """Plan the model's weights in one file."""
    return Planned((safetensors_file(path, weights(source, options)),))


def shard(found: list[Weight], max_file_bytes: int) -> list[list[Weight]]:
    """Split tensors, in order, into shards of at most `max_file_bytes`."""
    shards: list[list[Weight]] = [[]]
    size = 0
    for w in found:
        if shards[-1] and size + w.bytes > max_file_bytes:
            shards.append([])
            size = 0
        shards[-1].append(w)
        size += w.bytes
    return shards


def safetensors_file(path: str, some: list[Weight]) -> Outfile:
    """Plan one file of whole tensors, wide types first, so that elements are aligned."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    spans, at = [], 0
    for w in sorted(some, key=lambda w: -dtype_of(w.dtype).bytes):
        dtype = dtype_of(w.dtype)
        shape = [*w.shape, *([dtype.extra] if dtype.extra > 1 else [])]
        entries[w.name] = {
            "dtype": dtype.stored,
            "shape": shape,
            "data_offsets": [at, at + w.bytes],
        }
        if w.bytes:
            spans.append(ElementSpan(at, w.number, 0, w.bytes // dtype.bytes, w.dtype))
        at += w.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    header = len(text).to_bytes(8, "little") + text
    moved = tuple(
        ElementSpan(s.start + len(header), s.tensor, s.first, s.last, s.dtype) for s in spans
    )
    return Outfile(path, len(header) + at, (Literal(0, header),), moved)


def _index(names: list[str], shards: list[list[Weight]]) -> tuple[tuple[str, bytes], ...]:
    where = {w.name: name for name, some in zip(names, shards) for w in some}
    total = sum(w.bytes for some in shards for w in some)
    return ((_NAME + INDEX, weight_index(total, where)),)


# -- torch.save -----------------------------------------------------------------------------------


def plan_torch(source: Checkpoint, options: WriteOptions, path: str) -> Planned:
    """Plan a flat state dict; the names of a tied tensor share one storage."""
    tree: dict[str, ArchivedTensor] = {}
    for w in weights(source, options):
        for name in (w.name, *w.also):
            tree[name] = ArchivedTensor(w.dtype, w.shape, w.number, key=w.number)
    plan = ArchivePlan()
    add_archive(plan, tree)
    return Planned((plan.outfile(path),))
