"""An opened step: names, shapes, values, extras.  Torch-free.

with holdfast.open("runs/gpt") as c:
    c.step, c.names(), c.read("model.wte.weight", ((0, 10), None))
"""

from __future__ import annotations

import operator
import os
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import nan
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from holdfast.base.arguments import count_of, flag_of, named_step_of, path_of, unfit
from holdfast.base.entry import public
from holdfast.base.errors import FormatError, UsageError
from holdfast.base.suggest import did_you_mean
from holdfast.base.wire import decode_json
from holdfast.core.checkpoint.files import Files
from holdfast.core.checkpoint.lone import root_at
from holdfast.core.checkpoint.names import read_manifest, step_prefix, steps_text
from holdfast.core.checkpoint.reading import read_alone
from holdfast.core.checkpoint.rows import RAW, Array, ArrayTarget, Want
from holdfast.core.checkpoint.unproved import newest_manifest
from holdfast.core.format.dtypes import DTYPES, numpy_dtype
from holdfast.core.format.extras import FROZEN, decode, referred
from holdfast.core.format.manifest import FileEntry, Manifest
from holdfast.core.layout import Box, Sharding, whole
from holdfast.core.store import Store

_Range = slice | tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in the manifest.  `shape`: of the whole tensor; `dtype`: torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    state: str
    replica: str
    sharding: Sharding
    bytes: int


class Checkpoint:
    """One committed step of a root.  Reads on demand; caches only digest tables."""

    def __init__(self, store: Store, manifest: Manifest, *, verify: bool = True) -> None:
        self.store = store
        self.manifest = manifest
        self.images = Files(store, step_prefix(manifest.step), manifest, verify=verify)
        self.format = "holdfast"
        """The prefix that names a foreign checkpoint's format (`dcp`, ...); else `holdfast`."""
        self.others: tuple[Checkpoint, ...] = ()
        """Further copies of a foreign checkpoint's replicated tensors, which should be equal."""
        self.refused: dict[str, str] = {}
        """By key of a foreign checkpoint that cannot be read: the reason and what to do."""

    @staticmethod
    @public
    def open(
        url: str | os.PathLike[str], step: int | str | None = None, *, verify: bool = True
    ) -> Checkpoint:
        """Open a step by its number or label, or the newest, of a root; or the step whose folder `url` is.
        NotFound or NotRecoverable if there is none.

        HoldfastWarning if another step, with a damaged manifest, may be the newest.
        """
        call = "Checkpoint.open"
        step = None if step is None else named_step_of(step, call)
        flag_of(verify, call, "verify")
        store = root_at(path_of(url, call, "url"))
        if isinstance(step, str):
            from holdfast.core.checkpoint.naming import manifest_named

            manifest = manifest_named(store, step)
        else:
            manifest = newest_manifest(store) if step is None else read_manifest(store, step)
        return Checkpoint(store, manifest, verify=verify)

    @cached_property
    def files(self) -> Mapping[str, bytes]:
        """The files kept beside the step, by name; read and verified on access."""
        from holdfast.core.checkpoint.attached import Attachments

        return Attachments(self.images)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Metrics by name, given with the save or noted later; NaN for values that were not finite."""
        from holdfast.core.checkpoint.notes import read_notes

        m = self.manifest
        noted = read_notes(self.store).values(m.run, m.step) if self.format == "holdfast" else {}
        return {k: nan if v is None else v for k, v in {**m.metrics, **noted}.items()}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing, as no file stays open; for `with`."""

    def __repr__(self) -> str:
        return f"<Checkpoint {self.store.url} step {self.step}, {len(self.names())} tensors>"

    @property
    def step(self) -> int:
        """The step's number."""
        return self.manifest.step

    @property
    def mesh(self) -> str:
        """The mesh of the save, in words."""
        return str(self.manifest.layout)

    def names(self) -> list[str]:
        """Names of all tensors in the order of the save, then aliases of tied ones."""
        return [t.name for t in self.manifest.tensors] + list(self.manifest.aliases)

    @public
    def index(self, name: str) -> int:
        """Number of a tensor in the manifest; UsageError with near misses for an unknown name."""
        if not isinstance(name, str) or not name:
            typed = not isinstance(name, str)
            raise unfit("Checkpoint", "name", name, "the name of a tensor", typed=typed)
        found = self.manifest.find(name)
        if found is None:
            raise UsageError(
                f"no tensor {name!r:.300} in step {self.step}",
                hint=did_you_mean(name, self.names()),
            )
        return found

    @public
    def info(self, name: str) -> TensorInfo:
        """Shape, dtype and sharding of a tensor."""
        index = self.index(name)
        t = self.manifest.tensors[index]
        sharding = self.manifest.placement.table.shardings[t.sharding]
        size = whole(t.shape).size * DTYPES[t.dtype].bytes
        return TensorInfo(name, t.dtype, t.shape, t.state, t.replica, sharding, size)

    @public
    def read(self, name: str, box: Sequence[_Range] | Box | None = None) -> Array:
        """Read and verify a tensor, or its part `box`, as a new array of the tensor's dtype.  Blocks.

        `box`: (start, stop), a slice or None per dim.  UsageError; Corrupt.
        """
        index = self.index(name)
        t = self.manifest.tensors[index]
        wanted = to_box(box, t.shape, name)
        try:
            values = np.empty(wanted.shape, numpy_dtype(t.dtype))
        except MemoryError as error:
            hint = "read it in parts: read(name, box)"
            raise UsageError(f"{name!r} {wanted.shape}: {error}", hint=hint) from None
        raw = values.view(RAW[values.dtype.itemsize])
        read_alone(self.images, [Want(index, wanted, ArrayTarget(raw))])
        return values

    @cached_property
    def extras(self) -> dict[str, Any]:
        """Extras that all ranks share, by key, in plain Python (tensors as arrays)."""
        return {k: decode(v, plain_tensor) for k, v in self.manifest.extras.items()}

    @cached_property
    def left_out(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of frozen parameters that were not saved (`trainable_only`), by name.
        FormatError."""
        trees = [e for e in self.manifest.extras.items() if e[0].endswith(f".{FROZEN}")]
        for name in (n for n in self.manifest.per_rank if n.endswith(f".{FROZEN}")):
            every = map(self.rank_extras, sorted(self.manifest.file_of))
            trees += [(name, theirs[name]) for theirs in every if name in theirs]
        try:
            return {
                f"{name.removesuffix(FROZEN)}{inside}": (str(dtype), tuple(map(int, shape)))
                for name, tree in trees
                for inside, (dtype, shape) in tree.items()
            }
        except (TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"malformed extras: what was left out: {error}") from None

    @cached_property
    def object_tensors(self) -> set[str]:
        """Names of tensors in the state_dict of an object, which extras refer to."""
        return set(referred(self.manifest.extras))

    def rank_extras(self, rank: int) -> dict[str, Any]:
        """Encoded per-rank extras of one rank (RNG, data loader)."""
        rank = count_of(rank, "Checkpoint.rank_extras", "rank", least=0)
        file = self.manifest.file_of.get(rank)
        return self.file_extras(file) if file is not None else {}

    def file_extras(self, file: FileEntry) -> dict[str, Any]:
        """`rank_extras` of the rank of `file`.  Verified."""
        if file.extras == file.table:
            return {}
        data = self.images.part(file, file.extras, file.table)
        try:
            found = decode_json(data, dict[str, Any])
        except msgspec.DecodeError as error:
            raise FormatError(f"malformed extras: {error}", key=self.images.key(file)) from None
        return found


def plain_tensor(tag: str, body: Any) -> Any:
    """Decode a tensor in extras: a small one as an array, a large one as its name."""
    match tag:
        case "$tensor":
            dtype, shape, data = body
            return np.frombuffer(b64decode(data), numpy_dtype(dtype)).reshape(shape)
        case "$at":
            return body
        case "$object" | "$quantized":
            return decode(body, plain_tensor)
        case "$dtype" if isinstance(body, str):
            return body
        case "$optimizer":
            groups = [
                {"params": g["params"], **decode(g["hyper"], plain_tensor)} for g in body["groups"]
            ]
            states = {p: decode(s, plain_tensor) for p, s in body["state"].items()}
            return {"param_groups": groups, "state": states}
    raise FormatError(f"malformed extras: unknown tag {tag!r}")


def to_box(box: Sequence[_Range] | Box | None, shape: tuple[int, ...], name: str) -> Box:
    """Convert a user's box to a Box.  UsageError if it does not lie in `shape`."""
    if box is None:
        return whole(shape)
    try:
        ranges = [*zip(box.start, box.stop, strict=True)] if isinstance(box, Box) else [*box]
        if len(ranges) != len(shape):
            raise UsageError(f"{name!r} has {len(shape)} dims {shape}, the box {len(ranges)}")
        found = [_range(r, n) for r, n in zip(ranges, shape)]
    except (TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise unfit(
            "Checkpoint.read", "box", box, "a Box, or (start, stop), a slice or None for each dim",
            typed=False, hint=str(error),
        ) from None  # fmt: skip
    if not all(0 <= a <= b <= n for (a, b), n in zip(found, shape)):
        raise UsageError(f"box {box} does not lie in {name!r} of shape {shape}")
    return Box(tuple(a for a, _ in found), tuple(b for _, b in found))


def _range(r: _Range, n: int) -> tuple[int, int]:
    """Start and stop of a range; any integer type.  TypeError or ValueError if it is no range."""
    if r is None:
        return 0, n
    if isinstance(r, slice):
        start, stop, step = r.indices(n)
        if step != 1:
            raise UsageError(f"box with slice {r}: only step 1 can be read")
        return start, max(stop, start)
    start, stop = r
    return operator.index(start), operator.index(stop)


__all__ = ["Checkpoint", "TensorInfo", "steps_text", "to_box"]
