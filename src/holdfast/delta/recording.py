"""What a rank's records hold, and where: gradients as the optimizer uses them, and what else changes."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.capture.job import Plan as Placing
from holdfast.capture.job import new_plan
from holdfast.compression.marks import HALVES, rounded_to
from holdfast.delta.packing import (
    PACKED,
    SPARSE,
    NotAsDeclared,
    Pack,
    Part,
    most_in,
    packed_name,
    parts_of,
    pays,
)
from holdfast.delta.segment import Plan
from holdfast.errors import UsageError
from holdfast.format.image import Image, plan_image
from holdfast.format.manifest import TensorEntry
from holdfast.group import Group
from holdfast.layout import Box, Mesh, Pieces
from holdfast.state.agreed import Agreement, Description, describe, merge
from holdfast.state.live import (
    Live,
    State,
    is_optimizer,
    is_stateful,
    named_buffers,
    named_parameters,
    stages,
)
from holdfast.state.optimizers import (
    all_param_names,
    named_groups,
    tensors_in,
)
from holdfast.state.placed import Placed, torch_dtype
from holdfast.state.snapshot import raw_array
from holdfast.state.wrapped import stepping

GRAD = "grad"
"""The state that a gradient counts as: `optim.h.0.weight.grad`."""
SPARE_ROOM = 4 << 10
"""For extras that grow."""
SMALL_BYTES = 1 << 20
SAMPLES = 1 << 10
MANY = 1 << 15
"""Elements from which on torch copies with several threads."""
MOST_ROUNDED = 1 << 24
"""Elements that are rounded at once on a device."""
ROUNDED = {str(dtype).removeprefix("torch."): dtype for dtype in HALVES}
"""States that gradients count as that are recorded in another dtype than their own."""


@dataclass
class Steps:
    """An optimizer of the state, and its parameters by name."""

    key: str
    optimizer: Optimizer
    groups: list[list[tuple[str, torch.Tensor]]]

    @property
    def params(self) -> Iterator[tuple[str, torch.Tensor]]:
        for pairs in self.groups:
            yield from pairs


def optimizers(state: State) -> list[Steps]:
    """Every optimizer of a state.  UsageError for those of engines, whose gradients are elsewhere."""
    found = []
    for key, value in state.items():
        if not is_optimizer(value):
            continue
        if not isinstance(value, Optimizer):
            raise UsageError(
                f"delta= does not know the gradients of {key!r}, a {type(value).__name__}",
                hint="use torch optimizers, or memory= and durable saves alone",
            )
        names = {i: n[0] for i, n in all_param_names(state, value, None).items()}
        groups = [(group, group["params"]) for group in value.param_groups]
        found.append(Steps(key, value, named_groups(groups, names)))
    if not found:
        raise UsageError("delta= needs an optimizer in the state")
    return found


def watched(steps: list[Steps]) -> list[torch.Tensor]:
    """Tensors whose version counters grow with every write to a parameter of these optimizers."""
    found = []
    for one in steps:
        for _, p in one.params:
            found += [p, local_of(p)] if isinstance(p, DTensor) else [p]
    return found


@dataclass(frozen=True)
class Mark:
    """What tells whether a tensor was written since: which it was, its counter of writes, and a sample of
    its values, because writes by way of `.data` are not counted."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    sample: bytes

    @staticmethod
    def of(tensor: torch.Tensor) -> Mark:
        local = local_of(tensor)
        sample = b""
        if local.device.type == "cpu" and local.numel():
            flat = (
                raw_array(local.reshape(-1)) if local.is_contiguous() else raw_array(local).ravel()
            )
            sample = flat[:: max(1, len(flat) // SAMPLES)].tobytes()
        version = tensor._version + (local._version if isinstance(tensor, DTensor) else 0)
        return Mark(weakref.ref(tensor), version, sample)

    def differs(self, before: Mark) -> bool:
        same = self.tensor() is before.tensor()
        return not same or (self.version, self.sample) != (before.version, before.sample)


def untrained(state: State) -> dict[str, torch.Tensor]:
    """Parameters that no optimizer of the state has, by name: frozen ones, or an average of the weights."""
    trained = {
        id(p)
        for value in state.values()
        if isinstance(value, Optimizer)
        for group in value.param_groups
        for p in group["params"]
    }
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        for module in stages(value) or ():
            for name, p in named_parameters(module):
                if id(p) not in trained:
                    found.setdefault(f"{key}.{name}", p)
    return found


def buffers(state: State) -> dict[str, torch.Tensor]:
    """Buffers and tensors of the user's own, by name."""
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        for module in stages(value) or ():
            for name, buffer in named_buffers(module):
                found.setdefault(f"{key}.{name}", buffer)
        if stages(value) is None and not is_optimizer(value) and not is_stateful(value):
            for path, tensor in tensors_in(value):
                found[f"{key}.{path}" if path else key] = tensor
    return found


def small(tensors: dict[str, torch.Tensor]) -> set[str]:
    """Those that are recorded at every step: batch norm's kernels write to theirs uncounted."""
    return {n for n, t in tensors.items() if t.numel() * t.element_size() <= SMALL_BYTES}


def grad_name(key: str, name: str) -> str:
    return f"{key}.{name}.{GRAD}"


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a plain tensor or a DTensor, detached."""
    with torch.no_grad():
        return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def held(steps: list[Steps], values: dict[str, torch.Tensor], dense: Collection[str] = ()) -> Live:
    """The tensors of a record; gradients lie as their parameters do.  `dense`: those that are recorded
    whole, whatever was declared of them."""
    live = Live()
    for one in steps:
        for name, p in one.params:
            full = grad_name(one.key, name)
            state = GRAD if full in dense else declared(p)
            live.add(full, state, p, steady=True)
    for name, tensor in values.items():
        live.add(name, "buffer", tensor, steady=False)
    return live


def declared(p: torch.Tensor) -> str:
    """The state that a parameter's gradient counts as, by what was declared of it."""
    if pays(p):
        return SPARSE
    dtype = rounded_to(p)
    return GRAD if dtype is None else str(dtype).removeprefix("torch.")


def agree(group: Group, live: Live, mesh: Mesh | None, number: int) -> Agreement:
    """What the records of all ranks hold together.  Collective; blocks."""

    def together(answers: list[bytes]) -> bytes:
        kinds = list(dict.fromkeys(answers))
        found = merge(kinds, [kinds.index(a) for a in answers], mesh)
        return msgspec.msgpack.encode(_one_state(found, kinds))

    data = group.ask(f"delta/plan/{number}", describe(live), together)
    return msgspec.msgpack.decode(data, type=Agreement)


def _one_state(agreement: Agreement, descriptions: list[bytes]) -> Agreement:
    """A gradient that one rank has to record whole is recorded whole by all; one that is rounded counts as
    of that dtype."""
    docs = [msgspec.msgpack.decode(d, type=Description) for d in descriptions]
    dense = {t.name for doc in docs for t in doc.tensors if t.state == GRAD}
    tensors = []
    for t in agreement.tensors:
        if t.name in dense:
            t = msgspec.structs.replace(t, state=GRAD)
        elif t.state in ROUNDED:
            t = msgspec.structs.replace(t, state=GRAD, dtype=t.state)
        tensors.append(t)
    return msgspec.structs.replace(agreement, tensors=tuple(tensors))


def plan_of(agreement: Agreement, few: tuple[TensorEntry, ...]) -> Plan:
    return Plan(agreement.mesh, agreement.shardings, agreement.tensors, agreement.aliases, few)


@dataclass
class Piece:
    """A part of a tensor, and where in a record it goes."""

    name: str
    """In records."""
    tensor: torch.Tensor
    """The parameter, or the value itself."""
    at: tuple[slice, ...] | None
    offset: int
    bytes: int
    dtype: torch.dtype
    """In records."""

    @property
    def is_rounded(self) -> bool:
        return bool(self.dtype != self.tensor.dtype)


@dataclass
class Layout:
    """Where everything lies in this rank's records."""

    image: Image
    grads: dict[str, list[Piece]]
    """By optimizer's key."""
    values: list[Piece]
    tensors: tuple[TensorEntry, ...]
    """Of the image; what is packed with as many bytes as it may have."""
    packs: dict[str, tuple[Pack, int]] = field(default_factory=dict)
    """By optimizer's key: its sparse gradients, and where in a slot they go."""
    _places: dict[tuple[int, str], list[Place]] = field(default_factory=dict)

    @property
    def rounded(self) -> set[str]:
        """The gradients that are recorded in another dtype than their own."""
        return {p.name for pieces in self.grads.values() for p in pieces if p.is_rounded}

    def forget_places(self) -> None:
        """Slots are of other memory now."""
        self._places.clear()

    def places(self, slot: int, memory: memoryview, key: str) -> list[Place]:
        """Of an optimizer's gradients in a slot."""
        if (slot, key) not in self._places:
            self._places[slot, key] = places(memory, self.grads[key])
        return self._places[slot, key]

    @staticmethod
    def of(
        agreement: Agreement,
        few: tuple[TensorEntry, ...],
        rank: int,
        live: Live,
        steps: list[Steps],
        room: int,
    ) -> Layout:
        """`few`: the tensors that are packed.  `room`: bytes for extras."""
        owner = {grad_name(one.key, name): (one.key, p) for one in steps for name, p in one.params}
        packs = packs_of(agreement, few, rank, live, {n: p for n, (_, p) in owner.items()})
        most = {pack.name: pack.most_bytes for pack in packs.values()}
        tensors = sized(agreement.tensors, most)
        placing: Placing = new_plan(msgspec.structs.replace(agreement, tensors=tensors), "")
        pieces = placing.placement.pieces(rank)
        image = plan_image(tensors, pieces, extras_bytes=room)
        layout = Layout(image, {one.key: [] for one in steps}, [], tensors)
        columns = (pieces.tensor, pieces.start, pieces.stop, pieces.offset, pieces.bytes)
        for index, start, stop, offset, size in zip(*(c.tolist() for c in columns)):
            entry = tensors[index]
            where = image.data_start + offset
            if entry.state == PACKED:
                key = entry.name.split(".", 1)[0]
                layout.packs[key] = packs[key], where
                continue
            n = len(entry.shape)
            at = within(live.tensors[entry.name].placed, Box(tuple(start[:n]), tuple(stop[:n])))
            key, source = owner.get(entry.name, ("", live.tensors[entry.name].source))
            pieces_of = layout.grads[key] if key else layout.values
            dtype = torch_dtype(entry.dtype)
            pieces_of.append(Piece(entry.name, source, at, where, size, dtype))
        return layout

    def seal(self, memory: memoryview, sizes: dict[str, int], extras: bytes) -> Image:
        """The image of a record whose packed tensors have these sizes, complete but for its digests."""
        image = self._closed_up(memory, sizes) if self.packs else self.image
        memory[: image.data_start] = image.header
        memory[image.extras_start : image.table_start] = extras.ljust(image.extras_bytes)
        return image

    def _closed_up(self, memory: memoryview, sizes: dict[str, int]) -> Image:
        """What packed tensors leave free is closed."""
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


def within(placed: Placed, box: Box) -> tuple[slice, ...] | None:
    """Where in a rank's part of a tensor a box lies; None if it is all of it."""
    return box.within(placed.box.start) if box.start and box != placed.box else None


def sized(tensors: tuple[TensorEntry, ...], sizes: dict[str, int]) -> tuple[TensorEntry, ...]:
    """With the lengths of those whose length differs from record to record."""
    return tuple(
        msgspec.structs.replace(t, shape=(sizes[t.name],)) if t.name in sizes else t
        for t in tensors
    )


def packs_of(
    agreement: Agreement,
    few: tuple[TensorEntry, ...],
    rank: int,
    live: Live,
    params: dict[str, torch.Tensor],
) -> dict[str, Pack]:
    """By optimizer's key, what this rank packs of the tensors `few`."""
    found: dict[str, list[Part]] = {}
    for part in parts_of(agreement, few, rank) if few else ():
        found.setdefault(part.key, []).append(part)
    return {
        key: Pack(
            packed_name(key, rank),
            parts,
            {part.name: params[part.name] for part in parts},
            {part: within(live.tensors[part.name].placed, part.box) for part in parts},
            {part: most_in(part, params[part.name]) for part in parts},
        )
        for key, parts in found.items()
    }


@dataclass
class Place:
    """Where in a slot of the ring a piece goes, as tensor and array."""

    piece: Piece
    into: torch.Tensor
    raw: np.ndarray[Any, Any] | None
    """For large pieces on the CPU: torch would copy them with threads that the training needs."""


def places(memory: memoryview, pieces: Iterable[Piece]) -> list[Place]:
    """Made once for each slot."""
    found = []
    for piece in pieces:
        view = memory[piece.offset : piece.offset + piece.bytes]
        like = local_of(piece.tensor)
        like = like if piece.at is None else like[piece.at]
        into = torch.frombuffer(view, dtype=torch.uint8).view(piece.dtype).view(like.shape)
        large = not piece.is_rounded and like.device.type == "cpu" and into.numel() >= MANY
        found.append(Place(piece, into, raw_array(into) if large else None))
    return found


def copy(placed: list[tuple[Place, torch.Tensor]]) -> None:
    """Each tensor's piece to its place.  Device copies are given to the current stream.  NotAsDeclared."""
    few: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    changed: dict[str, torch.Tensor] = {}
    less = ""
    with torch.no_grad():
        for place, tensor in placed:
            source = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if place.piece.at is not None:
                source = source[place.piece.at]
            if place.raw is not None:
                np.copyto(place.raw, raw_array(source))
            elif place.piece.is_rounded:
                changed[place.piece.name] = round_into(place.into, source)
                less = str(place.piece.dtype).removeprefix("torch.")
            else:
                few[0].append(place.into)
                few[1].append(source)
        if few[0]:
            torch._foreach_copy_(few[0], few[1], non_blocking=True)
    if changed and (found := torch.stack(list(changed.values()))).any():
        names = tuple(name for name, is_changed in zip(changed, found.tolist()) if is_changed)
        raise NotAsDeclared(names, f"values that {less} has not")


def round_into(into: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Copy float32 into bfloat16 or float16; a truth value on the source's device: whether bits were lost.

    In parts: on the CPU they stay in the cache and with this thread (if the source is contiguous), on a
    device they bound what memory it takes.
    """
    size = MANY - 1 if source.device.type == "cpu" else MOST_ROUNDED
    parts = zip(into.view(-1).split(size), source.reshape(-1).split(size))
    return torch.stack([_round_part(*part) for part in parts]).any()


def _round_part(into: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    bits = source.view(torch.int32)
    if into.dtype == torch.bfloat16:  # the upper half; of no number, too, which conversions change
        into.view(torch.int16).copy_((bits >> 16).to(torch.int16), non_blocking=True)
        return (bits & 0xFFFF).any()
    less = source.to(into.dtype)
    into.copy_(less, non_blocking=True)
    return (less.float().view(torch.int32) != bits).any()


def spread(
    placed: list[tuple[Place, torch.Tensor]], count: int
) -> list[list[tuple[Place, torch.Tensor]]]:
    """In parts of about as many bytes, at most `count`, none of them empty."""
    total, done = sum(place.piece.bytes for place, _ in placed), 0
    parts: list[list[tuple[Place, torch.Tensor]]] = [[] for _ in range(count)]
    for one in placed:
        parts[min(done * count // max(total, 1), count - 1)].append(one)
        done += one[0].piece.bytes
    return [part for part in parts if part]


def check_grad(name: str, p: torch.Tensor) -> None:
    """UsageError for a gradient that does not lie as its parameter."""
    grad = p.grad
    assert grad is not None
    if grad.dtype != p.dtype or grad.layout != torch.strided or grad.shape != p.shape:
        raise UsageError(
            f"{name}: a gradient of {grad.dtype} {tuple(grad.shape)} {grad.layout} for a parameter of "
            f"{p.dtype} {tuple(p.shape)} cannot be recorded",
            hint="dense gradients of the parameters' own dtype can; of those that are mostly zero "
            "(holdfast.compression.sparse) only the rest is recorded",
        )


def kind_of(optimizer: Optimizer) -> str:
    """Its class, so that a replay without the training script can make one."""
    kind = type(stepping(optimizer))
    return f"{kind.__module__}:{kind.__qualname__}"


def only_reads(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step is known to leave gradients as they are: torch's do, unless a fused
    kernel unscales them."""
    optimizer = stepping(optimizer)
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    looks_ahead = any(group.get("nesterov") for group in optimizer.param_groups)  # foreach writes
    return is_torchs and not looks_ahead and getattr(optimizer, "grad_scale", None) is None


def missing_of(one: Steps) -> tuple[str, ...]:
    return tuple(name for name, p in one.params if p.grad is None)


def encode_extras(extras: dict[str, Any]) -> bytes:
    return msgspec.json.encode(extras)
