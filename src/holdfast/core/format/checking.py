"""Checks of a manifest beyond its types, before anything is planned or read.

A manifest may come from an untrusted source.  So its indexes, sizes, paths and boxes are all checked, and a
small manifest cannot cost much time or memory: later code relies on that.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any

from holdfast.base.errors import FormatError
from holdfast.core.codec.digest import ALGORITHM, MAX_TABLE_BYTES
from holdfast.core.format.dtypes import DTYPES, dtype_of
from holdfast.core.format.manifest import (
    MAX_ATTACHED,
    MAX_EXTRAS_BYTES,
    PACK_HEAD,
    Manifest,
    PackEntry,
    ShardingEntry,
    TensorEntry,
    with_control,
)
from holdfast.core.layout import Box, num_corners, tiles
from holdfast.core.layout.box import is_inside

MAX_DIMS = 64
_MAX_CHUNK_BYTES = 1 << 24
_MAX_DEPTH = 400
"""Deepest nesting of extras."""
_MAX_PLAN = 1 << 26
"""Most ranks times shardings: planning costs that much, however small the manifest."""
_MAX_LISTED = 1 << 24
"""Most listed fragments times tensors, and corners of fragments: the bound for irregular layouts."""
_MAX_NAME_BYTES = 200
"""Longest name of an attached file."""


def check(m: Manifest) -> None:
    """FormatError unless the indexes, sizes, paths and boxes of a manifest are sound."""
    require(m.step >= 0 and m.run >= 0, "negative step or run")
    require(all(run >= 0 and step >= 0 for run, step in m.line), "a line with negative numbers")
    require(m.algorithm == ALGORITHM, f"unknown digest algorithm {m.algorithm!r}")
    whole_blocks = 0 < m.chunk_bytes <= _MAX_CHUNK_BYTES and m.chunk_bytes % 4096 == 0
    require(whole_blocks, f"chunk_bytes {m.chunk_bytes}")
    require(len(m.mesh) <= MAX_DIMS, f"mesh of {len(m.mesh)} axes")
    require(all(0 < n <= _MAX_PLAN for _, n in m.mesh), f"mesh {m.mesh}")
    require(m.layout.world * len(m.shardings) <= _MAX_PLAN, f"mesh {m.mesh} has too many ranks")
    require(len(m.layout.sizes) == len(m.mesh), f"mesh {m.mesh} names an axis twice")
    require(_is_safe(m.attempt) and "/" not in m.attempt, f"attempt {m.attempt!r}")
    name = with_control(m)
    require(name is None, f"the name {name!r:.200} has a control character")
    _check_depth(m.extras)
    for sharding in m.shardings:
        _check_sharding(sharding, m)
    _check_tensors(m)
    _check_files(m)
    for alias, name in m.aliases.items():
        require(name in m.by_name and alias not in m.by_name, f"alias {alias!r} of {name!r}")


def _check_sharding(s: ShardingEntry, m: Manifest) -> None:
    sizes = m.layout.sizes
    cut = [a for c in s.cuts for a in c.axes]
    require(len(cut) == len(set(cut)), "a sharding cuts over one axis twice")
    require(all(a in sizes for a in [*cut, *s.on]), f"sharding over an unknown axis: {cut}")
    require(not set(cut) & set(s.on), "a sharding both cuts over an axis and restricts it")
    require(all(0 <= c.dim < MAX_DIMS for c in s.cuts), "a sharding cuts an impossible dim")
    for axis, coords in s.on.items():
        good = list(coords) == sorted(set(coords)) and all(0 <= c < sizes[axis] for c in coords)
        require(good and bool(coords), f"coordinates {coords} on axis {axis!r}")
    require(s.held is None or not (s.cuts or s.on), "a sharding is both listed and regular")
    ranks = [f.rank for f in s.held or ()]
    require(all(0 <= r < m.layout.world for r in ranks), "a fragment of a rank that is not there")


def _check_depth(tree: Any) -> None:
    """FormatError for extras nested too deep for recursion."""
    level, depth = [tree], 0
    while level:
        require(depth <= _MAX_DEPTH, "extras are nested too deep")
        level = [
            value
            for node in level
            if isinstance(node, (dict, list))
            for value in (node.values() if isinstance(node, dict) else node)
        ]
        depth += 1


def _check_tensors(m: Manifest) -> None:
    require(len(m.by_name) == len(m.tensors), "two tensors have one name")
    dims = [max([c.dim for c in s.cuts], default=-1) for s in m.shardings]
    boxes = {
        i: [Box(f.start, f.stop) for f in s.held]
        for i, s in enumerate(m.shardings)
        if s.held is not None
    }
    total = listed = 0
    sizes: dict[tuple[str, int, tuple[int, ...]], int] = {}
    for t in m.tensors:
        alike = t.dtype, t.sharding, t.shape
        size = sizes.get(alike)
        if size is None:  # cached: many tensors share a shape
            size = sizes[alike] = _check_tensor(t, m, dims, boxes)
        total += size
        if t.sharding in boxes:
            listed += len(boxes[t.sharding])
            require(listed <= _MAX_LISTED, f"more than {_MAX_LISTED} listed fragments")
    held = sum(f.extras - f.data for f in m.files)
    require(total == held, f"tensors have {total} bytes, but files hold {held}")


def _check_tensor(t: TensorEntry, m: Manifest, dims: list[int], boxes: dict[int, list[Box]]) -> int:
    """Check a tensor's dtype, shape and sharding; return its size in bytes."""
    require(t.dtype in DTYPES, f"{t.name!r}: unknown dtype {t.dtype!r}")
    require(0 <= t.sharding < len(m.shardings), f"{t.name!r}: no sharding {t.sharding}")
    require(len(t.shape) <= MAX_DIMS, f"{t.name!r}: {len(t.shape)} dims")
    require(dims[t.sharding] < len(t.shape), f"{t.name!r}: cut along a dim that it lacks")
    require(all(0 <= n < 1 << 60 for n in t.shape), f"{t.name!r}: shape {t.shape}")
    size = dtype_of(t.dtype).bytes * prod(max(n, 1) for n in t.shape)
    require(size < 1 << 60, f"{t.name!r}: shape {t.shape} is too large")
    parts = _full_parts(t, m.shardings[t.sharding], m.layout.sizes) if all(t.shape) else 0
    require(parts <= len(m.files), f"{t.name!r}: {parts} parts, but {len(m.files)} files")
    if t.sharding in boxes:
        require(len(boxes[t.sharding]) <= _MAX_LISTED, f"more than {_MAX_LISTED} listed fragments")
        _check_held(t, boxes[t.sharding])
    return size if all(t.shape) else 0


def _check_held(t: TensorEntry, boxes: list[Box]) -> None:
    """Check that listed fragments cover the tensor without overlaps."""
    for box in boxes:
        require(is_inside(box, t.shape), f"{t.name!r}: fragment {box} is not inside {t.shape}")
    require(num_corners(boxes, t.shape) <= _MAX_LISTED, f"{t.name!r}: too many fragments to check")
    require(tiles(boxes, t.shape), f"{t.name!r}: fragments overlap or do not cover {t.shape}")


def _full_parts(t: TensorEntry, s: ShardingEntry, sizes: dict[str, int]) -> int:
    """Lower bound of the number of non-empty parts, each of which is in another rank's file."""
    extent, parts = list(t.shape), 1
    for cut in s.cuts:
        step = -(-extent[cut.dim] // prod(sizes[a] for a in cut.axes))
        parts *= extent[cut.dim] // max(step, 1)
        extent[cut.dim] = step
    return parts


def _check_files(m: Manifest) -> None:
    require(len(m.file_of) == len(m.files), "two files of one rank")
    for f in m.objects:
        require(_is_safe(f.path), f"file path {f.path!r} leaves the step's folder")
        require(0 <= f.rank < m.layout.world, f"{f.path}: rank {f.rank}")
        chunks = -(-f.table // m.chunk_bytes)
        ordered = 8 <= f.data <= f.extras <= f.table < f.bytes < 1 << 60
        require(ordered and f.bytes == f.table + 8 * chunks, f"{f.path}: offsets do not add up")
        require(f.bytes - f.table <= MAX_TABLE_BYTES, f"{f.path}: a table of {8 * chunks} bytes")
        long = f.table - f.extras
        require(long <= MAX_EXTRAS_BYTES, f"{f.path}: extras of {long} bytes")
        require(bool(re.fullmatch("[0-9a-f]{16}", f.digest)), f"{f.path}: digest {f.digest!r}")
    require(len({f.path for f in m.objects}) == len(m.objects), "two files of one path")
    if m.attached is not None:
        _check_attached(m.attached)


def _check_attached(pack: PackEntry) -> None:
    """Check that attached files fill the pack back to back, under safe names."""
    end, names = len(PACK_HEAD), {f.name for f in pack.files}
    for f in pack.files:
        require(is_safe_name(f.name), f"attached file {f.name!r:.300}: no plain relative name")
        require(f.start == end and f.bytes >= 0, f"attached file {f.name!r}: starts at {f.start}")
        require(bool(re.fullmatch("[0-9a-f]{16}", f.digest)), f"{f.name}: digest {f.digest!r}")
        parts = f.name.split("/")
        above = {"/".join(parts[:n]) for n in range(1, len(parts))}
        require(not above & names, f"attached file {f.name!r} lies below another one")
        end += f.bytes
    require(len(names) == len(pack.files) > 0, "two attached files of one name, or none")
    require(end == pack.table <= MAX_ATTACHED + len(PACK_HEAD), "attached files have holes")


def is_safe_name(name: str) -> bool:
    """True if on every system a file of this name lies in or below its folder."""
    parts = name.split("/")
    plain = all(p == p.strip() and p.isprintable() and ":" not in p for p in parts)
    return plain and _is_safe(name) and len(name.encode(errors="replace")) <= _MAX_NAME_BYTES


def _is_safe(path: str) -> bool:
    """True if a path is relative and never leads up."""
    return all(p not in ("", ".", "..") for p in path.split("/")) and not set("\\\0") & set(path)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise FormatError(f"malformed manifest: {message}")
