"""Buckets: the distributed optimizer's flat buffers, and their places in files.

Under `dp_reshardable` (Megatron-LM's default) and `dp_zero_gather_scatter` each data-parallel group stores
its buffers unchanged: flat parameters back to back, in the order of gradients, each aligned to 64 elements.

    chained_0.optimizer.distributed.dp_group_idx_3.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)
        .bucket_idx_1.exp_avg      one flat tensor for each bucket and state, without the padding at its end
        .per_bucket_numel          archives: lengths with that padding, and without; hyper-parameters
    ....dp_group_idx_3.param_state      or one archive: the buckets of a buffer end to end, by state

Buckets have no parameter names; `holdfast.formats.read.megatron.matching` finds them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.base.errors import FormatError
from holdfast.core.format.dtypes import DTYPES, numpy_dtype
from holdfast.core.layout import Box, whole
from holdfast.core.layout.fragment import flat_fragments
from holdfast.core.store import Store
from holdfast.formats.read.dcp import Contents, section_tree
from holdfast.formats.read.foreign import Foreign, StoredPart
from holdfast.formats.read.megatron.other_state import check_contiguous, known
from holdfast.formats.read.sections import FilePlace, row_major_place
from holdfast.formats.read.torchfile import TensorRef

BY_BUCKET = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(.+)")
_BUCKET = re.compile(r"gbuf_idx_(\d+)\.dtype_\(torch\.(\w+), torch\.\w+\)\.bucket_idx_(\d+)\.(\w+)")
_DTYPE = re.compile(r"[a-z]+\d\w*")
_WRITER = re.compile(r"(?:.*/)?__(\d+)_\d+\.distcp")
MEGATRON_MASTER = "param"
Rank = tuple[int, int]
"""A data-parallel group's buffers: (optimizer of a chain, index of the group)."""


class FlatTensor:
    """A tensor as a row-major sequence of elements, read from its parts."""

    def __init__(self, store: Store, tensor: Foreign) -> None:
        self._store = store
        self.tensor = tensor
        self._parts = sorted(tensor.parts, key=lambda p: p.fragment.box.start)
        self._starts = [
            p.fragment.box.start[0] if len(tensor.shape) == 1 else 0 for p in self._parts
        ]
        self._places: dict[int, FilePlace] = {}

    @cached_property
    def size(self) -> int:
        return whole(self.tensor.shape).size

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int, StoredPart]]:
        """(start, stop, offset in the part's storage, part) of the parts of `start..stop`."""
        at = max(bisect_right(self._starts, start) - 1, 0)
        for first, part in zip(self._starts[at:], self._parts[at:]):
            if first >= stop:
                return
            low, high = max(start, first), min(stop, first + part.fragment.box.size)
            if low < high:
                yield low, high, part.fragment.offset + low - first, part

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Elements `start..stop`."""
        dtype = numpy_dtype(self.tensor.dtype)
        data = bytearray((stop - start) * dtype.itemsize)
        for low, high, offset, part in self.pieces(start, stop):
            path, begin = self._place(part)
            into = memoryview(data)[(low - start) * dtype.itemsize :]
            size = (high - low) * dtype.itemsize
            self._store.read(path, begin + offset * dtype.itemsize, into[:size])
        return np.frombuffer(data, dtype)

    def _place(self, part: StoredPart) -> FilePlace:
        if id(part) not in self._places:
            self._places[id(part)] = row_major_place(part.sources[0])
        return self._places[id(part)]

    def box_parts(self, start: int, box: Box) -> Iterator[StoredPart]:
        """Parts of `box` of another tensor, stored here from element `start` on, row-major."""
        for low, high, offset, part in self.pieces(start, start + box.size):
            for fragment in flat_fragments(box, low - start, high - start, offset):
                yield StoredPart(fragment, part.sources, part.path)


@dataclass(eq=False)
class Bucket:
    """A bucket, or the buckets of a buffer end to end: one flat tensor per state."""

    rank: Rank
    buffer: int
    """Index of the buffer; there is one per model chunk and dtype."""
    title: str
    dtype: str
    """Dtype of the parameters; states have their own."""
    states: dict[str, FlatTensor] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.states[MEGATRON_MASTER].size

    @cached_property
    def writers(self) -> set[int]:
        """The ranks that wrote it: those of its data-parallel group."""
        return {r for flat in self.states.values() for p in flat.tensor.parts for r in writer(p)}


def writer(part: StoredPart) -> list[int]:
    """The rank that wrote a part's file; empty if its name does not state it."""
    match = _WRITER.fullmatch(part.path)
    return [int(match[1])] if match else []


@dataclass
class BucketOptimizers:
    """Optimizers that a checkpoint stores by bucket."""

    buckets: list[Bucket]
    saved: list[dict[str, Any]]
    """Each chained optimizer's hyper-parameters and loss scaler, as one data-parallel group wrote them."""


def stored(store: Store, contents: Contents) -> BucketOptimizers | None:
    """Read the buckets of a checkpoint; None if it has none.  FormatError if malformed."""
    found: dict[tuple[Rank, int, int], Bucket] = {}
    for t in contents.tensors:
        match = BY_BUCKET.fullmatch(t.name)
        if match is None:
            continue
        rank, at = _rank(match), _BUCKET.fullmatch(match[3])
        if at is None or len(t.shape) != 1:
            raise FormatError(f"{t.name!r}: no state of a bucket that is known")
        key = (rank, int(at[1]), int(at[3]))
        one = found.setdefault(key, Bucket(rank, int(at[1]), t.name.rpartition(".")[0], at[2]))
        one.states[at[4]] = FlatTensor(store, t)
    objects: dict[str, dict[Rank, Any]] = {}
    for name, info in contents.objects.items():
        match = BY_BUCKET.fullmatch(name.partition("/")[0])
        if match and match[3] in ("param_state", "optimizer", "grad_scaler"):
            objects.setdefault(match[3], {})[_rank(match)] = _value(store, info)
    for rank, state in sorted(objects.get("param_state", {}).items()):
        found |= {(rank, number, 0): one for number, one in _coalesced(store, rank, state)}
    if not found:
        return None
    _check(list(found.values()))
    return BucketOptimizers([one for _, one in sorted(found.items())], _saved(objects))


def _rank(match: re.Match[str]) -> Rank:
    return int(match[1] or 0), int(match[2])


def _value(store: Store, info: Any) -> Any:
    value = section_tree(store, info, known())
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _coalesced(store: Store, rank: Rank, state: Any) -> Iterator[tuple[int, Bucket]]:
    """The buffers of `dp_zero_gather_scatter`: {number: {dtypes: {state: tensor}}}."""
    title = f"optimizer.distributed.dp_group_idx_{rank[1]}.param_state"
    if not isinstance(state, dict) or not state.get("buckets_coalesced"):
        raise FormatError(f"{title!r}: not what Megatron-Core writes")
    for number, buffers in state.items():
        if number == "buckets_coalesced":
            continue
        for dtypes, tensors in buffers.items():
            first = _DTYPE.search(str(dtypes))  # a tuple of two, or text where DCP wrote the dict
            one = Bucket(rank, int(number), f"{title}.{number}", first[0] if first else "")
            for name, ref in tensors.items():
                if isinstance(ref, TensorRef) and len(ref.shape) == 1:
                    full = f"{title}.{number}.{name}"
                    check_contiguous(ref, full)
                    one.states[name] = FlatTensor(store, ref.foreign(full, name))
            yield int(number), one


def _check(buckets: list[Bucket]) -> None:
    for one in buckets:
        sizes = {name: flat.size for name, flat in one.states.items()}
        if MEGATRON_MASTER not in sizes or len(set(sizes.values())) != 1 or one.dtype not in DTYPES:
            raise FormatError(f"{one.title!r}: states of {sizes} elements beside {one.dtype}")


def _saved(objects: dict[str, dict[Rank, Any]]) -> list[dict[str, Any]]:
    """Return what each chained optimizer saved; all groups write the same, the first is taken."""
    found: dict[int, dict[str, Any]] = {}
    for what in ("optimizer", "grad_scaler"):
        for (chain, _), value in sorted(objects.get(what, {}).items(), key=lambda item: item[0]):
            found.setdefault(chain, {}).setdefault(what, value)
    return [one for _, one in sorted(found.items())]
