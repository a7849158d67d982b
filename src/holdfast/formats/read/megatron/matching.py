"""Finding the parameters in buckets without names, by value, with proof.

A bucket's fp32 master weights, rounded to the model's dtype, are the model's weights, which are stored
under their names.  So every weight's shard is searched in the buckets: its first and last elements are
compared at each possible place, and the shards found must fill the bucket from its first to its last
element.

    bucket    |fc2 of layer 1 |fc1 of layer 1    |norm|..|norm|..|qkv of layer 1 |      ..: padding
               0               192                576     640     704

Shards that are equal element by element (norms that are all ones still) are told apart by Megatron's
order, which is that of the modules, reversed (`ordered`).  What is left in doubt is refused (`NotProved`).

Opening a checkpoint compares 64 elements of each shard and its master.  The first read of a state
compares the whole shard: one more read of the master, and a read of the 16-bit weight.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.base.errors import FormatError
from holdfast.base.text import listed
from holdfast.core.format.dtypes import numpy_dtype
from holdfast.core.layout import Box
from holdfast.core.store import Store
from holdfast.formats.read.foreign import Foreign, StoredPart
from holdfast.formats.read.megatron.buckets import MEGATRON_MASTER, Bucket, FlatTensor, Rank, writer
from holdfast.formats.read.sections import FilePlace, row_major_place

_ALIGN = 64
"""Elements; `_ParamAndGradBuffer` begins parameters at multiples of it, from their bucket's start."""
_ENDS = 32
"""Elements compared at each end of a shard when a checkpoint is opened."""
_BLOCK = 1 << 21
SAVE_BY_PARAMETER = (
    "let Megatron-LM load it on the same tensor and pipeline parallelism and save it again, with "
    "--dist-ckpt-optim-fully-reshardable or by holdfast; or load the weights alone"
)
_NORMS = (
    "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight",
    "self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight",
    "pre_cross_attn_layernorm.weight", "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight",
)  # fmt: skip
"""Norms of a layer, in the order of its modules."""
_LAST = "final_layernorm.weight"
"""The norm that comes after all layers."""
_LAYER = re.compile(r"(.*?)layers\.(\d+)\.")

_Weights = Mapping[str, Foreign]


class NotProved(Exception):
    """The parameters of a bucket cannot be found; the message states why."""


@dataclass(eq=False)
class RankPart:
    """The part of a weight that one rank has stored."""

    name: str
    part: StoredPart
    flat: FlatTensor
    """Its elements, row-major."""

    @property
    def box(self) -> Box:
        return self.part.fragment.box

    @property
    def size(self) -> int:
        return self.box.size


def optimizer_tensors(
    store: Store, buckets: list[Bucket], weights: _Weights
) -> dict[str, dict[str, Foreign]]:
    """Return the optimizer's tensors by state, then weight; the state `param` is the fp32 master.

    Weights in no bucket have no states, as they are not trained.  NotProved if the weights in a bucket
    cannot be found, or are ambiguous.
    """
    known = _Shards(store, weights)
    found: dict[int, tuple[RankPart, Bucket, int]] = {}
    used: dict[Rank, set[int]] = {}
    for (rank, _), some in groupby(buckets, key=lambda b: (b.rank, b.buffer)):
        slots = [s for b in some for s in _walk(b, known, used.setdefault(rank, set()))]
        for slot, shard in zip(slots, ordered(slots)):
            found.setdefault(id(shard), (shard, slot.bucket, slot.start))  # replicas: the first
    by_weight: dict[str, list[tuple[RankPart, Bucket, int]]] = {}
    for one in found.values():
        by_weight.setdefault(one[0].name, []).append(one)
    for name, places in by_weight.items():
        if len(places) < len(weights[name].parts):
            raise NotProved(f"only {len(places)} of the shards of {name!r} are in a bucket")
    result: dict[str, dict[str, Foreign]] = {}
    for name, places in by_weight.items():
        for state, tensor in _states(weights[name], places):
            result.setdefault(state, {})[name] = tensor
    return result


def _states(
    weight: Foreign, places: list[tuple[RankPart, Bucket, int]]
) -> Iterator[tuple[str, Foreign]]:
    """Every state of a weight, as the bucket's elements from `start` on."""
    proofs = [_Proof(shard, bucket, start) for shard, bucket, start in places]
    for state in places[0][1].states:
        parts: list[StoredPart] = []
        for (shard, bucket, start), proof in zip(places, proofs):
            if state not in bucket.states:
                raise NotProved(f"{bucket.title!r} has no {state!r}")
            here = bucket.states[state].box_parts(start, shard.box)
            parts += [replace(p, sources=(proof.before(p),)) for p in here]
        dtype = places[0][1].states[state].tensor.dtype
        yield state, Foreign(weight.name, dtype, weight.shape, state, tuple(parts))


class _Proof:
    """Proof that elements of a bucket are a weight's: compares all before the first read."""

    def __init__(self, shard: RankPart, bucket: Bucket, start: int) -> None:
        self._shard, self._bucket, self._start = shard, bucket, start
        self._lock = threading.Lock()
        self._proved = False

    def before(self, part: StoredPart) -> Callable[[], FilePlace]:
        """Return a locator of a part that first checks the proof."""

        def place() -> FilePlace:
            with self._lock:
                if not self._proved and not same(self._shard, self._bucket, self._start):
                    raise FormatError(
                        f"{self._bucket.title!r}: its master weights are not those of "
                        f"{self._shard.name!r}, although their ends are",
                        key=part.path,
                        hint=SAVE_BY_PARAMETER,
                    )
                self._proved = True
            return row_major_place(part.sources[0])

        return place


def same(shard: RankPart, bucket: Bucket, start: int) -> bool:
    """True if the masters from `start` on, rounded, equal a shard, element by element."""
    return all(
        _equal(shard, bucket, start, a, min(a + _BLOCK, shard.size))
        for a in range(0, shard.size, _BLOCK)
    )


def _equal(shard: RankPart, bucket: Bucket, start: int, a: int, b: int) -> bool:
    here, there = shard.flat.read(a, b), bucket.states[MEGATRON_MASTER].read(start + a, start + b)
    return np.array_equal(_bits(_rounded(there, bucket.dtype)), _bits(here))


def _rounded(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        return values.astype(numpy_dtype(dtype))


def _bits(values: NDArray[Any]) -> NDArray[Any]:
    """Values as unsigned integers, so that -0 and NaN compare by bits; all NaNs are equal."""
    unsigned = np.dtype(f"u{values.dtype.itemsize}")
    return np.where(np.isnan(values), np.iinfo(unsigned).max, values.view(unsigned))


class _Shards:
    """All shards of the weights, by their first elements."""

    def __init__(self, store: Store, weights: _Weights) -> None:
        self._by_head: dict[tuple[str, int], dict[bytes, list[RankPart]]] = {}
        for name, weight in weights.items():
            for part in weight.parts:
                self._add(store, name, weight, part)

    def _add(self, store: Store, name: str, weight: Foreign, part: StoredPart) -> None:
        box, f = part.fragment.box, part.fragment
        if not box.size or not f.is_dense or weight.dtype not in ("float32", "float16", "bfloat16"):
            return
        alone = replace(weight, shape=(box.size,), parts=(_line(part),))
        shard = RankPart(name, part, FlatTensor(store, alone))
        n = min(_ENDS, box.size)
        head = _bits(shard.flat.read(0, n)).tobytes()
        self._by_head.setdefault((weight.dtype, n), {}).setdefault(head, []).append(shard)

    def at(self, bucket: Bucket, start: int) -> list[RankPart]:
        """Return the shards whose first and last elements equal a bucket's at `start`."""
        left = min(bucket.size - start, _ENDS)
        head = _rounded(bucket.states[MEGATRON_MASTER].read(start, start + left), bucket.dtype)
        found = []
        for (dtype, n), by_head in self._by_head.items():
            if dtype == bucket.dtype and n <= left:
                found += by_head.get(_bits(head[:n]).tobytes(), [])
        return [s for s in found if start + s.size <= bucket.size and self._ends(s, bucket, start)]

    def _ends(self, shard: RankPart, bucket: Bucket, start: int) -> bool:
        return _equal(shard, bucket, start, max(shard.size - _ENDS, 0), shard.size)


def _line(part: StoredPart) -> StoredPart:
    """The part as one of a flattened tensor."""
    size = part.fragment.box.size
    return replace(part, fragment=replace(part.fragment, box=Box((0,), (size,)), strides=(1,)))


@dataclass(eq=False)
class _Slot:
    """A place in a bucket, and the shards with its values: one, unless several are equal."""

    bucket: Bucket
    start: int
    shards: list[RankPart]


def _walk(bucket: Bucket, known: _Shards, used: set[int]) -> Iterator[_Slot]:
    """Yield the slots that fill a bucket, in order.  NotProved."""
    at, bases = 0, {0}
    while at < bucket.size:
        slot = _next(bucket, known, used, at, bases)
        if slot is None and bucket.size - at < _ALIGN:
            return
        if slot is None:
            raise NotProved(
                f"no weight of the model is what lies at element {at} of {bucket.title!r}"
            )
        if slot.start == at:
            bases.add(at % _ALIGN)  # perhaps another bucket, whose parameters are aligned from here
        if len(slot.shards) == 1:
            used.add(id(slot.shards[0]))
        yield slot
        at = slot.start + slot.shards[0].size


def _next(bucket: Bucket, known: _Shards, used: set[int], at: int, bases: set[int]) -> _Slot | None:
    """Next slot: after padding, or at once (a gated layer's second half; another bucket)."""
    aligned = sorted(at + (base - at) % _ALIGN for base in bases)
    for start in dict.fromkeys([*aligned, at]):
        if start < bucket.size:
            found = [s for s in known.at(bucket, start) if id(s) not in used]
            if len(found) > 1:
                mine = [s for s in found if bucket.writers.issuperset(writer(s.part))]
                found = [s for s in mine or found if same(s, bucket, start)]
            if len({s.size for s in found}) > 1:
                raise NotProved(f"{_named(found)} begin alike, all that the shorter one has")
            if found:
                return _Slot(bucket, start, found)
    return None


# -- weights that are equal -----------------------------------------------------------------------


def ordered(slots: list[_Slot]) -> list[RankPart]:
    """Return the shard of each slot of a buffer.

    Equal ones are dealt out by Megatron's order: layers and the modules in them, the last one first.  There
    must be as many slots as the layers of this buffer, known by their other weights, have such shards.
    NotProved if not.
    """
    found = {id(slot): slot.shards[0] for slot in slots if len(slot.shards) == 1}
    layers = {_layer(shard.name) for shard in found.values()} - {None}
    ties: dict[frozenset[int], list[_Slot]] = {}
    for slot in slots:
        if len(slot.shards) > 1:
            ties.setdefault(frozenset(map(id, slot.shards)), []).append(slot)
    for alike in ties.values():
        shards = [s for s in alike[0].shards if _layer(s.name) in layers]
        if len(shards) < len(alike):
            shards += [s for s in alike[0].shards if s.name.endswith(_LAST)]
        order = _order([s.name for s in shards])
        if order is None or len(set(order)) < len(order) or len(shards) != len(alike):
            raise NotProved(f"{_named(alike[0].shards)} are equal element by element")
        last_first = sorted(range(len(shards)), key=order.__getitem__, reverse=True)
        found |= {id(slot): shards[i] for slot, i in zip(alike, last_first)}
    result = [found[id(slot)] for slot in slots]
    numbers = [layer[1] for shard in result if (layer := _layer(shard.name))]
    if ties and numbers != sorted(numbers, reverse=True):
        raise NotProved("its layers are not in order, and some of its weights are equal")
    return result


def _named(shards: list[RankPart]) -> str:
    return f"shards of {listed(sorted({repr(s.name) for s in shards}), 4)}"


def _layer(name: str) -> tuple[str, int] | None:
    """The block and the number of the layer that a weight is part of."""
    match = _LAYER.match(name)
    return (match[1], int(match[2])) if match else None


def _order(names: list[str]) -> list[tuple[float, ...]] | None:
    """Return places in the order of modules: of norms, or of one weight of several layers."""
    found = [_numbered(name) for name in names]
    if len({template for template, _ in found}) == 1:
        return [numbers for _, numbers in found]
    order: list[tuple[float, ...]] = []
    for name in names:
        match = _LAYER.match(name)
        end = name[match.end() :] if match else ""
        if end not in _NORMS and not name.endswith(_LAST):
            return None
        rank = next((i for i, norm in enumerate(_NORMS) if end == norm), 0)
        order.append((int(match[2]), rank) if match else (float("inf"), 0))
    return order


def _numbered(name: str) -> tuple[str, tuple[float, ...]]:
    """A name with `{}` for each number, and the numbers."""
    words = name.split(".")
    numbers = tuple(float(w) for w in words if w.isdigit())
    return ".".join("{}" if w.isdigit() else w for w in words), numbers
