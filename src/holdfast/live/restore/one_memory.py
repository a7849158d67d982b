"""Live tensors that share memory, with each other or with themselves, and what was saved of them.

A load that fills them element by element leaves the values that come last in all that lie at one place.
That is right only if the saved values agree there.  So they are read on the side before anything is
overwritten, and refused if two at one place differ.

Tensors of different names in one memory:

    b.load_state_dict(a.state_dict())      torch lets both optimizers keep the same moments
    {"actor": net, "critic": net}          one weight, under two keys
    {"all": flat, "head": flat[:8]}        a view of a part

The saved values of both names may be equal, as they are where the two shared memory at the save, too.  They
are put into a picture of the memory, in order, and compared: a tensor that has lost its values there would
lose them in the live memory, too.

    saved   all = 1 1 1 1 2 2 2 2     head = 1 1 1 1       fits
            all = 1 1 1 1 2 2 2 2     head = 3 3 3 3       3 3 3 3 2 2 2 2 is not what was saved as `all`

Names of one tensor within a module are aliases: `tied` compares their saved values.

A tensor whose elements share memory, an expanded one or windows that overlap:

    bias = torch.zeros(1).expand(10)      # ten elements, one number

It is no target itself: its values are put into the shared memory when the load is done.  Tensors of the
common kind, contiguous ones, cost one look.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.base.errors import FormatError, HoldfastError, LayoutError, StoreError, need
from holdfast.base.gc_pause import uncollected
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.reading import read_alone
from holdfast.core.checkpoint.rows import Want
from holdfast.core.format import extras
from holdfast.core.layout import Box
from holdfast.live.restore.mismatches import Mismatch
from holdfast.live.restore.targets import is_known, target_of
from holdfast.live.state.arrays import raw_array
from holdfast.live.state.named import Prepared
from holdfast.live.state.tensor_kinds import writing

need("torch", torch, "_neg_view")

ALIGNED = 16
"""Alignment of the picture of the memory, in bytes: enough for every dtype."""
MOST_COUNTED = 1 << 26
"""Elements of which the places are counted one by one, where strides alone do not tell."""


def _reach(tensor: torch.Tensor) -> int:
    """Elements from the first to the last of the memory that a tensor lies in."""
    return 1 + int(sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride())))


# -- tensors of different names -----------------------------------------------------------------


@dataclass(frozen=True)
class Lying:
    """A part of a live tensor, or an array, and the addresses, `start..stop`, between which it lies."""

    start: int
    stop: int
    name: str
    local: torch.Tensor
    saved: tuple[int, Box] | str
    """Number of the saved tensor and its part; of an array, the name."""
    tree: Any = None
    """The saved tree of an array."""

    @staticmethod
    def of(name: str, local: torch.Tensor, saved: tuple[int, Box] | str, tree: Any = None) -> Lying:
        start = local.data_ptr()
        stop = start + _reach(local) * local.element_size()
        return Lying(start, stop, name, local, saved, tree)

    def view(self, memory: torch.Tensor, base: int) -> torch.Tensor:
        """The part in a picture of the memory, bytes that begin at address `base`."""
        local = self.local
        offset = (self.start - base) // local.element_size()
        view = torch.empty(0, dtype=local.dtype)
        view.set_(memory.untyped_storage(), offset, local.shape, local.stride())
        view = view.conj() if local.is_conj() else view
        return torch._neg_view(view) if local.is_neg() else view


def two_values(
    checkpoint: Checkpoint, live: Prepared, arrays: Sequence[tuple[str, np.ndarray[Any, Any], Any]]
) -> list[Mismatch]:
    """Differences: pairs of tensors and arrays in one memory of which different values were saved.  Reads
    these alone.  `arrays`: those of plain values, each with what was saved of it."""
    found: list[Mismatch] = []
    with uncollected():
        groups = list(_groups(checkpoint, live, arrays))
    for group in groups:
        if len({one.saved for one in group}) > 1:
            found += _differing(checkpoint, group)
    return sorted(dict.fromkeys(found), key=lambda one: one.name)


def _groups(
    checkpoint: Checkpoint, live: Prepared, arrays: Sequence[tuple[str, np.ndarray[Any, Any], Any]]
) -> Iterator[list[Lying]]:
    """Yield groups of tensors and arrays that share memory, directly or by way of others."""
    by_device: dict[torch.device, list[Lying]] = {}
    find, entries = checkpoint.manifest.find, checkpoint.manifest.tensors
    for name, t in live.tensors.items():
        index = find(name)
        if index is None or entries[index].shape != t.placed.shape:
            continue
        for part in t.parts:
            if part.local.numel() and part.local.data_ptr():
                lying = Lying.of(name, part.local, (index, part.box))
                by_device.setdefault(part.local.device, []).append(lying)
    for name, array, tree in arrays:
        # such as one that runs backwards: torch has no such tensor
        with suppress(TypeError, ValueError):
            if array.size and array.flags.writeable:
                lying = Lying.of(name, torch.from_numpy(array), name, tree)
                by_device.setdefault(lying.local.device, []).append(lying)
    for found in by_device.values():
        found.sort(key=lambda one: one.start)
        group, reach = found[:1], found[0].stop
        for one in found[1:]:
            if one.start < reach:
                group.append(one)
            else:
                yield from [group] if len(group) > 1 else []
                group = [one]
            reach = max(reach, one.stop)
        yield from [group] if len(group) > 1 else []


def _differing(checkpoint: Checkpoint, group: list[Lying]) -> list[Mismatch]:
    """Mismatches of parts whose memory overlaps."""
    group = [one for one in group if one.tree is None or _decoded(one) is not None]
    values = [
        torch.empty(one.local.shape, dtype=one.local.dtype) if one.tree is None else _decoded(one)
        for one in group
    ]
    wants = []
    for one, value in zip(group, values):
        if isinstance(one.saved, tuple):
            index, box = one.saved
            entry = checkpoint.manifest.tensors[index]
            wants.append(Want(index, box, target_of(value, entry.dtype, one.name)))
    with suppress(FormatError, StoreError):  # met again, by all ranks together
        read_alone(checkpoint.images, wants)
        base = group[0].start // ALIGNED * ALIGNED
        memory = torch.zeros(max(one.stop for one in group) - base, dtype=torch.uint8)
        views = [one.view(memory, base) for one in group]
        for view, value in zip(views, values):
            view.copy_(value)
        lost = [i for i, value in enumerate(values) if not _same(views[i], value)]
        return [_taken(group, views, values, i) for i in lost]
    return []


def _decoded(array: Lying) -> torch.Tensor | None:
    """The saved values of an array; None if they do not go into it: it will be replaced."""
    with suppress(HoldfastError, TypeError, ValueError):
        found = extras.decode(array.tree)
        if isinstance(found, np.ndarray):
            value = torch.from_numpy(np.array(found))
            if (value.shape, value.dtype) == (array.local.shape, array.local.dtype):
                return value
    return None


def _taken(
    group: list[Lying], views: list[torch.Tensor], values: list[torch.Tensor], lost: int
) -> Mismatch:
    """The mismatch of the part that lost its values and the first part that overwrites it."""
    other = lost
    for other in range(lost + 1, len(group)):
        views[lost].copy_(values[lost])
        views[other].copy_(values[other])
        if not _same(views[lost], values[lost]):
            break
    both = f"{group[lost].name} and {group[other].name}"
    return Mismatch("one memory", both)


def _same(view: torch.Tensor, value: torch.Tensor) -> bool:
    """True if they have the same bits."""
    found = view.resolve_conj().resolve_neg().contiguous()
    return raw_array(found).tobytes() == raw_array(value).tobytes()


# -- tensors whose elements share memory --------------------------------------------------------


def overlaps(tensor: torch.Tensor) -> bool:
    """True if two elements share a place in memory, or may and are too many to count."""
    if tensor.is_contiguous():
        return False
    dims = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape) if n > 1)
    if not tensor.numel() or not dims:
        return False
    if dims[0][0] == 0:
        return True
    reach = 0
    for stride, size in dims:  # each dim steps over all that the smaller ones reach: as in a slice
        if stride <= reach:
            return tensor.numel() > MOST_COUNTED or _share_a_place(tensor)
        reach += stride * (size - 1)
    return False


def _share_a_place(tensor: torch.Tensor) -> bool:
    """True if two elements lie at one place; counted, for strides that interleave."""
    places = np.zeros(1, np.int64)
    for stride, size in zip(tensor.stride(), tensor.shape):
        places = (places[:, None] + np.arange(size) * stride).reshape(-1)
    return len(np.unique(places)) < len(places)


@dataclass(frozen=True)
class Aside:
    """Memory of its own for the values of a tensor that shares its memory with itself."""

    name: str
    shared: torch.Tensor
    values: torch.Tensor

    @staticmethod
    def of(name: str, shared: torch.Tensor) -> Aside:
        """An `Aside` on the CPU that is not filled yet."""
        return Aside(name, shared, torch.empty(shared.shape, dtype=shared.dtype))

    def check(self) -> None:
        """LayoutError unless values that share a place agree, bit for bit."""
        memory = torch.zeros(_reach(self.shared), dtype=self.values.dtype)
        view = raw_array(memory.as_strided(self.shared.shape, self.shared.stride()))
        values = raw_array(self.values)
        np.copyto(view, values)
        if view.tobytes() != values.tobytes():
            raise LayoutError(
                f"{self.name!r}: elements of the live tensor share memory (shape "
                f"{tuple(self.shared.shape)}, strides {self.shared.stride()}), and what was saved differs "
                "where they do",
                hint="give it memory of its own: tensor.clone(), or tensor.contiguous() after expand()",
            )

    def put(self) -> None:
        """Write the values to the shared memory.  LayoutError as `check`."""
        self.check()
        with writing(self.shared):
            start = self.shared.storage_offset()
            memory = self.shared.as_strided((_reach(self.shared),), (1,), start)
            host = memory.cpu().resolve_conj().resolve_neg().clone()
            view = host.as_strided(self.shared.shape, self.shared.stride())
            np.copyto(raw_array(view), raw_array(self.values))
            memory.copy_(host)


def read_overlapping(checkpoint: Checkpoint, live: Prepared) -> dict[int, Aside]:
    """An `Aside` for each part, by its id, that shares its memory with itself and is to be loaded.

    Reads what was saved of them, alone.  LayoutError if it cannot be in such memory.
    """
    asides: dict[int, Aside] = {}
    wants = []
    for name, t in live.tensors.items():
        for part in t.parts:
            if overlaps(part.local) and is_known(checkpoint, name):
                aside = asides[id(part)] = Aside.of(name, part.local)
                dtype = checkpoint.info(name).dtype
                target = target_of(aside.values, dtype, name)
                wants.append(Want(checkpoint.index(name), part.box, target))
    if wants:
        with suppress(FormatError, StoreError):  # met again, by all ranks together
            read_alone(checkpoint.images, wants)
            for aside in asides.values():
                aside.check()
    return asides
