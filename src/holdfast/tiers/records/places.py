"""The layout of a rank's records, and the copies into their places."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from holdfast.core.format.image import Image, plan_image
from holdfast.core.format.manifest import TensorEntry
from holdfast.core.layout import Box
from holdfast.core.layout.pieces import Pieces
from holdfast.live.saving.planning import new_plan
from holdfast.live.state.agreed import Agreement
from holdfast.live.state.arrays import raw_array
from holdfast.live.state.named import Collected, LiveTensor
from holdfast.live.state.placed import box_in, local_of, memory_of, torch_dtype
from holdfast.tiers.records.optimizers import NamedOptimizer, grad_name
from holdfast.tiers.records.packing import (
    PACKED,
    NotAsDeclared,
    Pack,
    PackedPart,
    most_nonzero_in,
    packed_name,
    parts_of,
)

MANY = 1 << 15
"""Number of elements from which on torch copies with several threads."""
MOST_ROUNDED = 1 << 24
"""Number of elements, at most, that are rounded at once on a device."""


@dataclass
class RecordPiece:
    """A part of a tensor, and its place in a record."""

    name: str
    """Its name in records."""
    tensor: torch.Tensor
    """The parameter, or the value itself."""
    at: tuple[slice, ...] | None
    """Slices of the part in this rank's tensor; None if it is all of it."""
    offset: int
    """Byte of the slot at which it begins."""
    bytes: int
    dtype: torch.dtype
    """Its dtype in records."""

    @property
    def is_rounded(self) -> bool:
        return bool(self.dtype != self.tensor.dtype)


@dataclass
class RecordLayout:
    """The places of everything in this rank's records."""

    image: Image
    grads: dict[str, list[RecordPiece]]
    """Pieces of gradients, by optimizer's key."""
    values: list[RecordPiece]
    tensors: tuple[TensorEntry, ...]
    """Tensors of the image; packed ones with the most bytes that they may take."""
    packs: dict[str, tuple[Pack, int]] = field(default_factory=dict)
    """Sparse gradients, and the byte of a slot at which they begin, by optimizer's key."""
    _places: dict[tuple[int, str], list[Place]] = field(default_factory=dict)

    @property
    def rounded(self) -> set[str]:
        """Names of the gradients that are recorded in another dtype than their own."""
        return {p.name for pieces in self.grads.values() for p in pieces if p.is_rounded}

    @property
    def tensors_here(self) -> list[torch.Tensor]:
        """The local tensors of parameters and values that have pieces in this rank's records."""
        pieces = [p for some in self.grads.values() for p in some] + self.values
        return [local_of(piece.tensor) for piece in pieces]

    def forget_places(self) -> None:
        """Forget all places: slots are in other memory now."""
        self._places.clear()

    def places(self, slot: int, memory: memoryview, key: str) -> list[Place]:
        """The places of an optimizer's gradients in a slot; made at the first call."""
        if (slot, key) not in self._places:
            self._places[slot, key] = places(memory, self.grads[key])
        return self._places[slot, key]

    @staticmethod
    def of(
        agreement: Agreement,
        sparse: tuple[TensorEntry, ...],
        rank: int,
        live: Collected,
        optimizers: list[NamedOptimizer],
        room: int,
    ) -> RecordLayout:
        """Lay out a rank's records.  `sparse`: the gradients that are packed.  `room`: bytes for extras."""
        owner = {
            grad_name(one.key, name): (one.key, p) for one in optimizers for name, p in one.params
        }
        packs = packs_of(agreement, sparse, rank, live, {n: p for n, (_, p) in owner.items()})
        most = {pack.name: pack.most_bytes for pack in packs.values()}
        tensors = sized(agreement.tensors, most)
        plan = new_plan(msgspec.structs.replace(agreement, tensors=tensors), "")
        pieces = plan.placement.pieces(rank)
        image = plan_image(tensors, pieces, extras_bytes=room)
        layout = RecordLayout(image, {one.key: [] for one in optimizers}, [], tensors)
        columns = (pieces.tensor, pieces.start, pieces.stop, pieces.offset, pieces.bytes)
        for index, start, stop, offset, size in zip(*(c.tolist() for c in columns)):
            entry = tensors[index]
            where = image.data_start + offset
            if entry.state == PACKED:
                key = entry.name.split(".", 1)[0]
                layout.packs[key] = packs[key], where
                continue
            n = len(entry.shape)
            at = within(live.tensors[entry.name], Box(tuple(start[:n]), tuple(stop[:n])))
            key, source = owner.get(entry.name, ("", live.tensors[entry.name].source))
            pieces_of = layout.grads[key] if key else layout.values
            dtype = torch_dtype(entry.dtype)
            pieces_of.append(RecordPiece(entry.name, source, at, where, size, dtype))
        return layout

    def seal(self, memory: memoryview, sizes: dict[str, int], extras: bytes) -> Image:
        """Complete the image of a record in `memory`, but for its digests; return its layout.  `sizes`:
        bytes of packed tensors, by name."""
        image = self._close_gaps(memory, sizes) if self.packs else self.image
        memory[: image.data_start] = image.header
        memory[image.extras_start : image.table_start] = extras.ljust(image.extras_bytes)
        return image

    def _close_gaps(self, memory: memoryview, sizes: dict[str, int]) -> Image:
        """Close the gaps that packed tensors leave in `memory`; return the image of the result."""
        sizes = {pack.name: sizes.get(pack.name, 0) for pack, _ in self.packs.values()}
        before, tensors = self.image.pieces, sized(self.tensors, sizes)
        size, stop = before.bytes.copy(), before.stop.copy()
        for row, index in enumerate(before.tensor.tolist()):
            if tensors[index].name in sizes:
                size[row] = stop[row, 0] = sizes[tensors[index].name]
        keep = size > 0
        now = Pieces(
            before.tensor[keep],
            before.start[keep],
            stop[keep],
            (np.cumsum(size) - size)[keep],
            size[keep],
        )
        image = plan_image(tensors, now, extras_bytes=self.image.extras_bytes)
        was = self.image.data_start + before.offset[keep]
        is_at = image.data_start + now.offset
        for old, new, n in zip(was.tolist(), is_at.tolist(), now.bytes.tolist()):
            if old != new:
                memory[new : new + n] = bytes(memory[old : old + n])
        return image


def within(t: LiveTensor, box: Box) -> tuple[slice, ...] | None:
    """Slices of a box in this rank's tensor; None if the box is all of it."""
    part, local = t.parts[t.holder(box)], local_of(t.source)
    if part.box.shape != tuple(local.shape):  # beside other parts, or padding
        inside = box_in(part.local, local).start
        return box.within(tuple(a - i for a, i in zip(part.box.start, inside)))
    return box.within(part.box.start) if box.start and box != part.box else None


def sized(tensors: tuple[TensorEntry, ...], sizes: dict[str, int]) -> tuple[TensorEntry, ...]:
    """The tensors, those named in `sizes` with these lengths."""
    return tuple(
        msgspec.structs.replace(t, shape=(sizes[t.name],)) if t.name in sizes else t
        for t in tensors
    )


def packs_of(
    agreement: Agreement,
    sparse: tuple[TensorEntry, ...],
    rank: int,
    live: Collected,
    params: dict[str, torch.Tensor],
) -> dict[str, Pack]:
    """This rank's parts of the `sparse` gradients, to be packed, by optimizer's key."""
    parts_by_key: dict[str, list[PackedPart]] = {}
    for part in parts_of(agreement, sparse, rank) if sparse else ():
        parts_by_key.setdefault(part.key, []).append(part)
    return {
        key: Pack(
            packed_name(key, rank),
            parts,
            {part.name: params[part.name] for part in parts},
            {part: within(live.tensors[part.name], part.box) for part in parts},
            {part: most_nonzero_in(part, params[part.name]) for part in parts},
        )
        for key, parts in parts_by_key.items()
    }


@dataclass
class Place:
    """The place of a piece in a slot of the ring, as tensor and array."""

    piece: RecordPiece
    into: torch.Tensor
    raw: np.ndarray[Any, Any] | None
    """For large pieces on the CPU alone: torch would copy them with threads that the training needs."""

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece in this rank's tensor; shares memory."""
        local = memory_of(tensor)
        return local if self.piece.at is None else local[self.piece.at]


def places(memory: memoryview, pieces: Iterable[RecordPiece]) -> list[Place]:
    """Places of pieces in the memory of a slot."""
    made = []
    for piece in pieces:
        view = memory[piece.offset : piece.offset + piece.bytes]
        like = local_of(piece.tensor)
        like = like if piece.at is None else like[piece.at]
        into = torch.frombuffer(view, dtype=torch.uint8).view(piece.dtype).view(like.shape)
        large = not piece.is_rounded and like.device.type == "cpu" and into.numel() >= MANY
        made.append(Place(piece, into, raw_array(into) if large else None))
    return made


def copy(placed: list[tuple[Place, torch.Tensor]]) -> None:
    """Copy pieces of tensors to their places; on devices, queue the copies on the current stream.

    NotAsDeclared if a rounded gradient has lost bits.
    """
    many: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    rounded: dict[str, torch.Tensor] = {}
    """True on its device for each rounded gradient that has lost bits."""
    smaller = ""
    with torch.no_grad():
        for place, source in placed:
            if place.raw is not None:
                np.copyto(place.raw, raw_array(source))
            elif place.piece.is_rounded:
                rounded[place.piece.name] = round_into(place.into, source)
                smaller = str(place.piece.dtype).removeprefix("torch.")
            else:
                many[0].append(place.into)
                many[1].append(source)
        if many[0]:
            torch._foreach_copy_(many[0], many[1], non_blocking=True)
    if rounded and (loses := torch.stack(list(rounded.values()))).any():
        names = tuple(name for name, has_lost in zip(rounded, loses.tolist()) if has_lost)
        raise NotAsDeclared(names, f"values that {smaller} cannot hold")


def round_into(into: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Copy float32 into bfloat16 or float16; return a truth value on its device: true if bits were lost.

    Works in parts: on the CPU they stay in the cache and on this thread (if the source is contiguous), on a
    device they bound the memory needed.
    """
    size = MANY - 1 if source.device.type == "cpu" else MOST_ROUNDED
    parts = zip(into.view(-1).split(size), source.reshape(-1).split(size))
    return torch.stack([_round_part(*part) for part in parts]).any()


def _round_part(into: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    bits = source.view(torch.int32)
    if into.dtype == torch.bfloat16:  # the upper half: a conversion would change the bits of a NaN
        into.view(torch.int16).copy_((bits >> 16).to(torch.int16), non_blocking=True)
        return (bits & 0xFFFF).any()
    smaller = source.to(into.dtype)
    into.copy_(smaller, non_blocking=True)
    return (smaller.float().view(torch.int32) != bits).any()


def spread(
    placed: list[tuple[Place, torch.Tensor]], count: int
) -> list[list[tuple[Place, torch.Tensor]]]:
    """Split into at most `count` parts of about equal bytes, none of them empty."""
    total, done = sum(place.piece.bytes for place, _ in placed), 0
    parts: list[list[tuple[Place, torch.Tensor]]] = [[] for _ in range(count)]
    for one in placed:
        parts[min(done * count // max(total, 1), count - 1)].append(one)
        done += one[0].piece.bytes
    return [part for part in parts if part]
