"""Figures of a manifest that several verbs tell."""

from __future__ import annotations

from math import prod

from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import Manifest, TensorEntry
from holdfast.interop.foreign import file_of
from holdfast.layout import Sharding


def tensor_bytes(t: TensorEntry) -> int:
    return prod(t.shape) * DTYPES[t.dtype].bytes


def totals(m: Manifest) -> dict[tuple[str, str], tuple[int, int, int]]:
    """(state, dtype) -> tensors, elements, bytes."""
    found: dict[tuple[str, str], tuple[int, int, int]] = {}
    for t in m.tensors:
        a, b, c = found.get((t.state, t.dtype), (0, 0, 0))
        found[t.state, t.dtype] = (a + 1, b + prod(t.shape), c + tensor_bytes(t))
    return found


def foreign_files(m: Manifest) -> dict[str, list[int]]:
    """Real files of a foreign checkpoint, and the sizes of the parts of tensors in each."""
    sizes: dict[str, list[int]] = {}
    for f in m.files:
        sizes.setdefault(file_of(f), []).append(f.bytes)
    return dict(sorted(sizes.items()))


def in_parts(sharding: Sharding) -> str:
    """Say how a tensor of a foreign checkpoint lies, in words."""
    count = len(sharding.held or ())
    return "whole" if count < 2 else f"{count:,} parts"
