"""Megatron-Core's stored tensors as tensors of a model in one process.

A key has the same weight of all layers, and of all experts, stacked along leading axes, without their
numbers. This module makes each index a tensor of its own, under its name in a live model:

    decoder.layers.mlp.linear_fc2.weight                  decoder.layers.{}.mlp.linear_fc2.weight
    decoder.layers.mlp.experts.experts.linear_fc2.weight  decoder.layers.{}.mlp.experts.local_experts.{}...

Checkpoints with differing layers have the numbers in their keys; the result is the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from holdfast.base.errors import FormatError
from holdfast.core.layout import Box, Fragment
from holdfast.core.layout.box import box_at
from holdfast.core.layout.fragment import flat_fragments
from holdfast.formats.read.foreign import Foreign, StoredPart

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)
MASTERS = ("fp32_param", "param")
"""States under which optimizers keep the fp32 weights."""


def split_state(key: str) -> tuple[str | None, str]:
    """(state, weight) of an optimizer's key; (None, key) of a weight's."""
    match = _STATE.fullmatch(key)
    return (match[1], match[2]) if match else (None, key)


def template(key: str) -> tuple[str, int]:
    """A key with `{}` for each omitted number, and the count of these."""
    found: list[str] = []
    words = key.replace("{", "").replace("}", "").split(".")
    for i, word in enumerate(words):
        stacked = i + 1 < len(words) and not words[i + 1].isdigit()
        if word == "experts" and i and words[i - 1] == "experts":
            found += ["local_experts", *["{}"] * stacked]
        elif word == "layers" and stacked:
            found += [word, "{}"]
        else:
            found.append(word)
    return ".".join(found), found.count("{}")


def unfused(names: Iterable[str]) -> dict[str, str]:
    """Further names: a norm that Transformer Engine fuses into a linear layer is a module of its own in
    Megatron's local layers; both are stored under the fused name."""
    found = {}
    for name in names:
        for fused, alone in _NORMS:
            if fused in name:
                found[name.replace(fused, alone)] = name
    return found


_MAX_STACKED = 1 << 20


def by_name(tensors: Sequence[Foreign]) -> dict[str, Foreign]:
    """Every tensor by its live name, with stacks split and halves of gated layers joined."""
    found: dict[str, Foreign] = {}
    for t in tensors:
        for one in _unstacked(t):
            if one.name in found:
                raise FormatError(f"two tensors are named {one.name!r}")
            found[one.name] = one
    return _joined(found)


def unflattened(t: Foreign, shape: tuple[int, ...]) -> Foreign:
    """Return a state in the shape of its weight, which is `shape`.

    Before 0.16 the distributed optimizer stored ranges of ranks' flattened tensors (`flattened_range`): of
    a weight that ranks cut into a grid (X, Y), a tensor of shape (X, Y, elements of one rank's part).
    """
    grid = t.shape[:-1]
    if t.shape == shape or len(grid) != len(shape):
        return t
    if any(not n or whole % n for n, whole in zip(grid, shape)) or prod(t.shape) != prod(shape):
        raise FormatError(
            f"{t.name!r}: {t.shape} is no flattened state of a weight of shape {shape}"
        )
    local = tuple(whole // n for n, whole in zip(grid, shape))
    parts = tuple(one for part in t.parts for one in _lines(part, local))
    return replace(t, shape=shape, parts=parts)


def _lines(part: StoredPart, local: tuple[int, ...]) -> Iterator[StoredPart]:
    """Elements of the flattened `local` parts of a grid, as boxes of the whole."""
    box = part.fragment.box
    if prod(box.shape[:-1]) != 1:
        raise FormatError(f"a part {box} of flattened states", key=part.path)
    corner = tuple(i * n for i, n in zip(box.start, local))
    whole, (first, last) = box_at(corner, local), (box.start[-1], box.stop[-1])
    for fragment in flat_fragments(whole, first, last, part.fragment.offset):
        yield replace(part, fragment=fragment)


def _unstacked(t: Foreign) -> Iterator[Foreign]:
    """Yield one tensor for each index along the leading axes, whose numbers the key omits."""
    name, axes = template(t.name)
    counts = t.shape[:axes]
    if len(counts) < axes or prod(counts) > _MAX_STACKED:
        raise FormatError(f"{t.name!r}: a stack of shape {t.shape}")
    parts: dict[tuple[int, ...], list[StoredPart]] = {}
    for part in t.parts:
        box = part.fragment.box
        ranges = [range(a, b) for a, b in zip(box.start[:axes], box.stop[:axes])]
        if prod(map(len, ranges)) > _MAX_STACKED:
            raise FormatError(f"{t.name!r}: a part {box}")
        for at in product(*ranges):
            parts.setdefault(at, []).append(replace(part, fragment=_slice(part.fragment, at)))
    for at in product(*(range(n) for n in counts)):
        mine = tuple(parts.get(at, ()))
        yield replace(t, name=name.format(*at), shape=t.shape[axes:], parts=mine)


def _slice(f: Fragment, at: tuple[int, ...]) -> Fragment:
    """The elements at an index along the first axes, as a fragment of fewer dims."""
    n = len(at)
    skip = sum((i - a) * s for i, a, s in zip(at, f.box.start, f.strides))
    return replace(
        f, box=Box(f.box.start[n:], f.box.stop[n:]), offset=f.offset + skip, strides=f.strides[n:]
    )


def _joined(tensors: dict[str, Foreign]) -> dict[str, Foreign]:
    """`X_w` and `X_v`, the gate's and the value's weights, are the halves of `X` along dim 0."""
    found = dict(tensors)
    for name, gate in tensors.items():
        whole, value = name[:-2], tensors.get(f"{name[:-2]}_v")
        halves = name.endswith("_w") and value is not None and whole not in found and gate.shape
        if halves and value is not None and (gate.shape, gate.dtype) == (value.shape, value.dtype):
            rows = gate.shape[0]
            parts = (*gate.parts, *(_moved(p, rows) for p in value.parts))
            found[whole] = replace(gate, name=whole, shape=(2 * rows, *gate.shape[1:]), parts=parts)
            del found[name], found[f"{whole}_v"]
    return found


def _moved(part: StoredPart, rows: int) -> StoredPart:
    (a, *start), (b, *stop) = part.fragment.box.start, part.fragment.box.stop
    box = Box((a + rows, *start), (b + rows, *stop))
    return replace(part, fragment=replace(part.fragment, box=box))
