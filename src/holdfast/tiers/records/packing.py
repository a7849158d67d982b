"""Sparse gradients in records: the nonzero elements and their positions.

Gradients with few nonzero elements are divided among ranks as all tensors of a record are, but a rank's
pieces are not stored whole: consecutive pieces of one dtype form one long row of elements, whose nonzero
entries are packed (`holdfast.core.codec.sparse`).  All rows of an optimizer are one tensor of the record,
`<optimizer>.packed.r<rank>`, whose length differs from record to record.

The nonzero elements are found in the gradient that the optimizer uses.  So nothing that changes gradients
before that (clipping, unscaling, noise) can make a record wrong; it can only make it too large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from holdfast.base.errors import FormatError, HoldfastError
from holdfast.core.codec.sparse import Ints, most_bytes, pack_sparse, unpack_sparse
from holdfast.core.format.dtypes import dtype_of
from holdfast.core.format.manifest import TensorEntry, from_sharding
from holdfast.core.layout import Box, Mesh, Sharding
from holdfast.live.gradient_compression.marks import most_nonzero
from holdfast.live.saving.planning import new_plan
from holdfast.live.state.agreed import Agreement, product
from holdfast.live.state.arrays import raw_array
from holdfast.live.state.placed import torch_dtype

SPARSE = "sparse"
"""The state of a gradient that is packed, and not stored whole."""
PACKED = "packed"
BLOCK = 1 << 18
"""Number of elements that are searched at once: their truth values stay in the cache."""


class NotAsDeclared(HoldfastError):
    """Gradients are not as declared: `names` have `what`, and have to be recorded whole."""

    def __init__(self, names: tuple[str, ...], what: str) -> None:
        super().__init__(f"gradients have {what}")
        self.names = names
        self.what = what


@dataclass(frozen=True)
class PackedPart:
    """A rank's piece of a sparse gradient."""

    name: str
    dtype: str
    box: Box

    @property
    def key(self) -> str:
        return self.name.split(".", 1)[0]


def pays_to_pack(p: torch.Tensor) -> bool:
    """True if a parameter's gradient was declared so sparse that it is smaller when packed."""
    most, size = most_nonzero(p), p.element_size()
    if most is None or size not in _INTEGER:
        return False
    return bool(most_bytes(most, p.numel(), size) < p.numel() * size)


def most_nonzero_in(part: PackedPart, p: torch.Tensor) -> int:
    """Number of elements, at most, that may be nonzero in a part of a parameter's gradient."""
    return min(most_nonzero(p) or 0, part.box.size)


def packed_name(key: str, rank: int) -> str:
    return f"{key}.{PACKED}.r{rank:05d}"


def split_off_sparse(agreement: Agreement, world: int) -> tuple[Agreement, tuple[TensorEntry, ...]]:
    """The agreement with packed tensors in place of sparse gradients, and these gradients."""
    sparse = tuple(t for t in agreement.tensors if t.state == SPARSE)
    if not sparse:
        return agreement, ()
    shardings = list(agreement.shardings)
    tensors = [t for t in agreement.tensors if t.state != SPARSE]
    mesh = Mesh(agreement.mesh)
    for rank in range(world):
        alone = from_sharding(Sharding((), product(mesh, [rank]) or ()))
        if alone not in shardings:
            shardings.append(alone)
        at = shardings.index(alone)
        for key in dict.fromkeys(t.name.split(".", 1)[0] for t in sparse):
            tensors.append(TensorEntry(packed_name(key, rank), "uint8", (0,), at, PACKED))
    return Agreement(agreement.mesh, tuple(shardings), tuple(tensors), agreement.aliases), sparse


def parts_of(agreement: Agreement, sparse: tuple[TensorEntry, ...], rank: int) -> list[PackedPart]:
    """A rank's pieces of sparse gradients, in order."""
    whole = Agreement(agreement.mesh, agreement.shardings, sparse, {})
    pieces = new_plan(whole, "").placement.pieces(rank)
    parts = []
    for index, start, stop in zip(
        *(c.tolist() for c in (pieces.tensor, pieces.start, pieces.stop))
    ):
        n = len(sparse[index].shape)
        box = Box(tuple(start[:n]), tuple(stop[:n]))
        parts.append(PackedPart(sparse[index].name, sparse[index].dtype, box))
    return parts


def lanes(parts: list[PackedPart]) -> Iterator[list[PackedPart]]:
    """Consecutive parts of one dtype, whose elements form one row."""
    for _, lane in groupby(parts, lambda part: part.dtype):
        yield list(lane)


@dataclass(frozen=True)
class Pack:
    """An optimizer's sparse gradients on this rank."""

    name: str
    parts: list[PackedPart]
    params: Mapping[str, torch.Tensor]
    at: Mapping[PackedPart, tuple[slice, ...] | None]
    """Slices of a part in this rank's gradient; None if it is all of it."""
    most: Mapping[PackedPart, int]
    """Number of a part's elements, at most, that may be nonzero: there is room for no more."""

    @property
    def most_bytes(self) -> int:
        """Bytes that they take at most, if they are as sparse as declared."""
        return sum(
            most_bytes(
                sum(self.most[part] for part in lane),
                sum(part.box.size for part in lane),
                dtype_of(lane[0].dtype).bytes,
            )
            for lane in lanes(self.parts)
        )

    def into(self, memory: memoryview, each: Callable[..., Iterable[Any]] = map) -> int:
        """Pack the nonzero elements into `memory`; return the number of bytes.  NotAsDeclared if there are
        too many.  `each`: `map`, or one over threads."""
        found = list(each(self._nonzero, self.parts))
        pairs = list(zip(self.parts, found))
        if dense := tuple(p.name for p, (at, _) in pairs if len(at) > self.most[p]):
            raise NotAsDeclared(dense, "more nonzero elements than declared")
        nonzero_of = dict(pairs)
        end = 0
        for lane in lanes(self.parts):
            starts = np.cumsum([0] + [part.box.size for part in lane]).tolist()
            positions = [nonzero_of[part][0] + start for part, start in zip(lane, starts)]
            values = [nonzero_of[part][1] for part in lane if len(nonzero_of[part][1])]
            data = pack_sparse(np.concatenate(positions), np.concatenate(values or [_NONE]))
            memory[end : end + len(data)] = data.data
            end += len(data)
        return end

    def _nonzero(self, part: PackedPart) -> tuple[Ints, NDArray[Any]]:
        grad = self._grad(part)
        return (_NOWHERE, _NONE) if grad is None else nonzero(grad)

    def _grad(self, part: PackedPart) -> torch.Tensor | None:
        grad, at = self.params[part.name].grad, self.at[part]
        if grad is None:
            return None
        source = grad.to_local() if isinstance(grad, DTensor) else grad
        return source if at is None else source[at]


MOST_AT_ONCE = 1 << 30
"""Number of elements that are searched at once on a device; torch refuses 2^31 on CUDA."""

_NONE = np.zeros(0, np.uint8)
_NOWHERE = np.zeros(0, np.int64)


def nonzero(tensor: torch.Tensor) -> tuple[Ints, NDArray[Any]]:
    """Positions, row by row, of the elements whose bits are not zero, and these elements as integers.

    As bits are compared, a negative zero is not zero.
    """
    with torch.no_grad():
        if tensor.device.type != "cpu":
            bits = tensor.reshape(-1).view(_INTEGER[tensor.element_size()])
            on_device = torch.cat(
                [
                    bits[i : i + MOST_AT_ONCE].nonzero().squeeze(1) + i
                    for i in range(0, len(bits) or 1, MOST_AT_ONCE)
                ]
            )
            return on_device.cpu().numpy(), bits[on_device].cpu().numpy()
        raw = raw_array(tensor).reshape(-1)
    positions = _nonzero_positions(raw)
    return positions, raw[positions]


def _nonzero_positions(raw: NDArray[Any]) -> Ints:
    """Positions of the nonzero elements.  First finds groups of eight with one: numpy's own search over
    truth values takes twice as long."""
    differs = np.zeros(BLOCK, bool)
    groups = differs.view(np.uint64)
    positions = [np.zeros(0, np.int64)]
    for start in range(0, len(raw), BLOCK):
        block = raw[start : start + BLOCK]
        np.not_equal(block, 0, out=differs[: len(block)])
        differs[len(block) :] = False
        some = np.flatnonzero(groups != 0)
        within = np.flatnonzero(groups[some].view(bool))
        positions.append((some[within >> 3] << 3) + (within & 7) + start)
    return np.concatenate(positions)


_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Entries:
    """The nonzero elements of one packed part."""

    part: PackedPart
    at: Ints
    """Counted row by row within the part."""
    values: torch.Tensor

    def into(self, local: torch.Tensor, box: Box) -> None:
        """Write those elements that lie in `box` into `local`, this rank's memory of it."""
        shape = self.part.box.shape or (1,)
        start, offset = self.part.box.start or (0,), box.start or (0,)
        where = [c + (a - b) for c, a, b in zip(np.unravel_index(self.at, shape), start, offset)]
        inside = np.ones(len(self.at), bool)
        for c, n in zip(where, box.shape or (1,)):
            inside &= (c >= 0) & (c < n)
        every = bool(inside.all())
        index = [torch.from_numpy(c if every else c[inside]).to(local.device) for c in where]
        values = self.values if every else self.values[torch.from_numpy(inside)]
        with torch.no_grad():
            local.view(local.shape or (1,))[tuple(index)] = values.to(local.device)


def entries(parts: list[PackedPart], data: NDArray[np.uint8]) -> Iterator[Entries]:
    """The entries of each of these parts, which one rank has packed as `data`.  FormatError."""
    for lane in lanes(parts):
        size = dtype_of(lane[0].dtype).bytes
        at, raw, data = unpack_sparse(data, np.dtype(f"i{size}"))
        ends = np.cumsum([part.box.size for part in lane])
        if len(at) and at[-1] >= ends[-1]:
            raise FormatError(f"an entry at {at[-1]} of {ends[-1]} elements")
        cuts = np.searchsorted(at, ends)
        values = torch.from_numpy(raw).view(torch_dtype(lane[0].dtype))
        first = 0
        for part, end, last in zip(lane, ends.tolist(), cuts.tolist()):
            yield Entries(part, at[first:last] - (end - part.box.size), values[first:last])
            first = last
