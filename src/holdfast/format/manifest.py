"""The manifest: one JSON file whose existence is the commit.

It states what the step holds (tensors, extras), how every tensor is cut over the mesh, and which files
hold the bytes, with the digest of each file's digest table.  It says nothing rank by rank that follows
from the shardings, so it stays small: 45,000 tensors on 4,096 ranks take 5.8 MB
(bench/plan_scale.py).

The first bytes are always `{"holdfast":1,"step":N,"run":R,` (readers that only list steps need no
more) and the last ones `,"digest":"<XXH3-64 of everything before this comma>"}`.
"""

from __future__ import annotations

import re
from functools import cached_property
from math import prod
from typing import Any, Literal

import msgspec

from holdfast.codec.digest import ALGORITHM, hexdigest
from holdfast.errors import Corrupt, FormatError, HoldfastError, UnsupportedVersion
from holdfast.format.dtypes import DTYPES, dtype_of
from holdfast.format.extras import no_text
from holdfast.garbage import uncollected
from holdfast.layout import Box, Cut, Mesh, Placement, Sharding, Table, num_corners, tiles

VERSION = 1
MAX_BYTES = 1 << 30
MAX_DIMS = 64
MAX_CHUNK_BYTES = 1 << 24
MAX_DEPTH = 400
"""Deepest nesting of extras."""
MAX_PLAN = 1 << 26
"""Ranks times shardings: what planning costs, however small the manifest that states them."""
MAX_LISTED = 1 << 24
"""Listed fragments times tensors, and corners of fragments: the same for irregular layouts."""

Replica = Literal["replicated", "unique", "averaged"]
Resize = Literal["same", "rank0", "redistribute", "fresh"]


class CutEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    dim: int
    axes: tuple[str, ...]


class FragmentEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    rank: int
    start: tuple[int, ...]
    stop: tuple[int, ...]


class ShardingEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """See `holdfast.layout.sharding.Sharding`."""

    cuts: tuple[CutEntry, ...] = ()
    on: dict[str, tuple[int, ...]] = {}
    held: tuple[FragmentEntry, ...] | None = None


class TensorEntry(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False
):
    """A logical tensor.  `state`: `param`, `buffer`, `tensor`, or an optimizer state's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sharding: int = 0
    state: str = "tensor"
    replica: Replica = "replicated"


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A rank's image: `data` is where tensors begin, `extras` where the rank's extras do,
    `table` where the digest table does, `digest` that of the table's bytes."""

    rank: int
    path: str
    bytes: int
    data: int
    extras: int
    table: int
    digest: str
    strip: str = ""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """All that a reader needs besides the bytes; field order is file order."""

    holdfast: int
    step: int
    run: int
    attempt: str
    created: str
    software: dict[str, str]
    mesh: tuple[tuple[str, int], ...]
    chunk_bytes: int
    algorithm: str
    shardings: tuple[ShardingEntry, ...]
    tensors: tuple[TensorEntry, ...]
    aliases: dict[str, str]
    files: tuple[FileEntry, ...]
    extras: dict[str, Any]
    per_rank: dict[str, Resize | None]

    @cached_property
    def layout(self) -> Mesh:
        return Mesh(self.mesh)

    @cached_property
    def by_name(self) -> dict[str, int]:
        return {t.name: i for i, t in enumerate(self.tensors)}

    @cached_property
    def _by_any_name(self) -> dict[str, int | None]:
        return self.by_name | {alias: self.by_name.get(n) for alias, n in self.aliases.items()}

    def find(self, name: str) -> int | None:
        """Number of a tensor by its name or alias; None if it is not there."""
        return self._by_any_name.get(name)

    @cached_property
    def file_of(self) -> dict[int, FileEntry]:
        return {f.rank: f for f in self.files}

    @cached_property
    def placement(self) -> Placement:
        table = Table.build(
            [t.name for t in self.tensors],
            [t.shape for t in self.tensors],
            [DTYPES[t.dtype].bytes for t in self.tensors],
            tuple(to_sharding(s) for s in self.shardings),
            [t.sharding for t in self.tensors],
        )
        return Placement(self.layout, table)

    @property
    def total_bytes(self) -> int:
        return sum(f.bytes for f in self.files)


def to_sharding(entry: ShardingEntry) -> Sharding:
    held = None
    if entry.held is not None:
        held = tuple((f.rank, Box(f.start, f.stop)) for f in entry.held)
    cuts = tuple(Cut(c.dim, c.axes) for c in entry.cuts)
    return Sharding(cuts, tuple(sorted(entry.on.items())), held)


def from_sharding(sharding: Sharding) -> ShardingEntry:
    held = None
    if sharding.held is not None:
        held = tuple(FragmentEntry(r, b.start, b.stop) for r, b in sharding.held)
    cuts = tuple([CutEntry(c.dim, c.axes) for c in sharding.cuts])  # empty: the default itself
    return ShardingEntry(cuts, dict(sharding.on), held)


def encode(manifest: Manifest) -> bytes:
    """Canonical bytes, sealed with their digest."""
    try:
        body = msgspec.json.encode(manifest)[:-1]
    except UnicodeEncodeError as error:  # of another system's checkpoint
        raise no_text(error) from None
    return body + f',"digest":"{hexdigest(body)}"}}'.encode()


_HEAD = re.compile(rb'\{"holdfast":(\d{1,9}),"step":(\d{1,18}),"run":(\d{1,9}),')
_SEAL = re.compile(rb',"digest":"([0-9a-f]{16})"\}\s*\Z')
HEAD_BYTES = 80


def decode_head(data: bytes, key: str) -> tuple[int, int, int]:
    """(version, step, run) from the first `HEAD_BYTES` bytes of a manifest of any version."""
    head = _HEAD.match(data)
    if not head:
        raise FormatError("not a holdfast manifest", key=key)
    version, step, run = map(int, head.groups())
    return version, step, run


def _check_version(data: bytes, key: str) -> None:
    version = decode_head(data, key)[0]
    if version != VERSION:
        raise UnsupportedVersion(
            f"format version {version}; this holdfast reads version {VERSION}",
            key=key,
            hint="install the holdfast that wrote it, or a newer one",
        )


def verified(data: bytes, key: str) -> bytes:
    """The bytes of a manifest of this version, without their seal.  Corrupt, UnsupportedVersion or
    FormatError if they are not what was written."""
    if len(data) > MAX_BYTES:
        raise FormatError(f"manifest of {len(data)} bytes; at most {MAX_BYTES}", key=key)
    _check_version(data, key)
    seal = _SEAL.search(data, max(len(data) - 64, 0))
    if not seal:
        raise Corrupt(
            "manifest is cut short: its seal is missing", key=key, start=0, stop=len(data)
        )
    body = data[: seal.start()]
    if (found := hexdigest(body)) != seal[1].decode():
        raise Corrupt(
            f"manifest differs from what was written: digest {found}, expected {seal[1].decode()}",
            key=key,
            start=0,
            stop=seal.start(),
            expected=seal[1].decode(),
            found=found,
        )
    return body


def decode(data: bytes, key: str) -> Manifest:
    """Parse and check a manifest.  Corrupt, UnsupportedVersion or FormatError if it is not sound."""
    body = verified(data, key)
    try:
        with uncollected():
            manifest = msgspec.json.decode(body + b"}", type=Manifest)
            head = (manifest.holdfast, manifest.step, manifest.run)
            _require(head == decode_head(data, key), "it states its version, step or run twice")
            check(manifest)
    except HoldfastError as error:
        error.key = error.key or key
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"malformed manifest: {error}", key=key) from None
    return manifest


def check(m: Manifest) -> None:
    """Check everything that later code relies on: no index, size, path or box may surprise it."""
    _require(m.step >= 0 and m.run >= 0, "negative step or run")
    _require(m.algorithm == ALGORITHM, f"unknown digest algorithm {m.algorithm!r}")
    whole_blocks = 0 < m.chunk_bytes <= MAX_CHUNK_BYTES and m.chunk_bytes % 4096 == 0
    _require(whole_blocks, f"chunk_bytes {m.chunk_bytes}")
    _require(len(m.mesh) <= MAX_DIMS, f"mesh of {len(m.mesh)} axes")
    _require(all(0 < n <= MAX_PLAN for _, n in m.mesh), f"mesh {m.mesh}")
    _require(m.layout.world * len(m.shardings) <= MAX_PLAN, f"mesh {m.mesh} has too many ranks")
    _require(len(m.layout.sizes) == len(m.mesh), f"mesh {m.mesh} names an axis twice")
    _require(_is_safe(m.attempt) and "/" not in m.attempt, f"attempt {m.attempt!r}")
    _check_depth(m.extras)
    for sharding in m.shardings:
        _check_sharding(sharding, m)
    _check_tensors(m)
    _check_files(m)
    for alias, name in m.aliases.items():
        _require(name in m.by_name and alias not in m.by_name, f"alias {alias!r} of {name!r}")


def _check_sharding(s: ShardingEntry, m: Manifest) -> None:
    sizes = m.layout.sizes
    cut = [a for c in s.cuts for a in c.axes]
    _require(len(cut) == len(set(cut)), "a sharding cuts over one axis twice")
    _require(all(a in sizes for a in [*cut, *s.on]), f"sharding over an unknown axis: {cut}")
    _require(not set(cut) & set(s.on), "a sharding both cuts over an axis and restricts it")
    _require(all(0 <= c.dim < MAX_DIMS for c in s.cuts), "a sharding cuts an impossible dim")
    for axis, coords in s.on.items():
        good = list(coords) == sorted(set(coords)) and all(0 <= c < sizes[axis] for c in coords)
        _require(good and bool(coords), f"coordinates {coords} on axis {axis!r}")
    _require(s.held is None or not (s.cuts or s.on), "a sharding is both listed and regular")
    ranks = [f.rank for f in s.held or ()]
    _require(all(0 <= r < m.layout.world for r in ranks), "a fragment of a rank that is not there")


def _check_depth(tree: Any) -> None:
    """Refuse extras that are nested too deep to be walked by recursion."""
    level, depth = [tree], 0
    while level:
        _require(depth <= MAX_DEPTH, "extras are nested too deep")
        level = [
            value
            for node in level
            if isinstance(node, (dict, list))
            for value in (node.values() if isinstance(node, dict) else node)
        ]
        depth += 1


def _check_tensors(m: Manifest) -> None:
    _require(len(m.by_name) == len(m.tensors), "two tensors have one name")
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
        if size is None:  # most tensors have a shape that others have
            size = sizes[alike] = _check_tensor(t, m, dims, boxes)
        total += size
        if t.sharding in boxes:
            listed += len(boxes[t.sharding])
            _require(listed <= MAX_LISTED, f"more than {MAX_LISTED} listed fragments")
    held = sum(f.extras - f.data for f in m.files)
    _require(total == held, f"tensors have {total} bytes, but files hold {held}")


def _check_tensor(t: TensorEntry, m: Manifest, dims: list[int], boxes: dict[int, list[Box]]) -> int:
    """Check one tensor's dtype, shape and sharding; returns its size in bytes."""
    _require(t.dtype in DTYPES, f"{t.name!r}: unknown dtype {t.dtype!r}")
    _require(0 <= t.sharding < len(m.shardings), f"{t.name!r}: no sharding {t.sharding}")
    _require(len(t.shape) <= MAX_DIMS, f"{t.name!r}: {len(t.shape)} dims")
    _require(dims[t.sharding] < len(t.shape), f"{t.name!r}: cut along a dim that it lacks")
    _require(all(0 <= n < 1 << 60 for n in t.shape), f"{t.name!r}: shape {t.shape}")
    size = dtype_of(t.dtype).bytes * prod(max(n, 1) for n in t.shape)
    _require(size < 1 << 60, f"{t.name!r}: shape {t.shape} is too large")
    parts = _full_parts(t, m.shardings[t.sharding], m.layout.sizes) if all(t.shape) else 0
    _require(parts <= len(m.files), f"{t.name!r}: {parts} parts, but {len(m.files)} files")
    if t.sharding in boxes:
        _require(len(boxes[t.sharding]) <= MAX_LISTED, f"more than {MAX_LISTED} listed fragments")
        _check_held(t, boxes[t.sharding])
    return size if all(t.shape) else 0


def _check_held(t: TensorEntry, boxes: list[Box]) -> None:
    """Check that listed fragments lie inside the tensor and hold every element of it once."""
    for box in boxes:
        inside = len(box.start) == len(box.stop) == len(t.shape) and all(
            0 <= a <= b <= n for a, b, n in zip(box.start, box.stop, t.shape)
        )
        _require(inside, f"{t.name!r}: fragment {box} is not inside {t.shape}")
    _require(num_corners(boxes, t.shape) <= MAX_LISTED, f"{t.name!r}: too many fragments to check")
    _require(tiles(boxes, t.shape), f"{t.name!r}: fragments overlap or do not cover {t.shape}")


def _full_parts(t: TensorEntry, s: ShardingEntry, sizes: dict[str, int]) -> int:
    """A lower bound of the parts that are not empty; each is in the file of another rank."""
    extent, parts = list(t.shape), 1
    for cut in s.cuts:
        step = -(-extent[cut.dim] // prod(sizes[a] for a in cut.axes))
        parts *= extent[cut.dim] // max(step, 1)
        extent[cut.dim] = step
    return parts


def _check_files(m: Manifest) -> None:
    _require(len(m.file_of) == len(m.files), "two files of one rank")
    for f in m.files:
        _require(_is_safe(f.path), f"file path {f.path!r} leaves the step's folder")
        _require(0 <= f.rank < m.layout.world, f"{f.path}: rank {f.rank}")
        chunks = -(-f.table // m.chunk_bytes)
        ordered = 8 <= f.data <= f.extras <= f.table < f.bytes < 1 << 60
        _require(ordered and f.bytes == f.table + 8 * chunks, f"{f.path}: offsets do not add up")
        _require(bool(re.fullmatch("[0-9a-f]{16}", f.digest)), f"{f.path}: digest {f.digest!r}")
    _require(len({f.path for f in m.files}) == len(m.files), "two files of one path")


def _is_safe(path: str) -> bool:
    """True if a relative path leads nowhere but down."""
    return all(p not in ("", ".", "..") for p in path.split("/")) and not set("\\\0") & set(path)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise FormatError(f"malformed manifest: {message}")
