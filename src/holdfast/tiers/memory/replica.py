"""A rank makes its guard from its own replica of the state: no tensors cross the network.

If state is replicated along the data-parallel axis, every member of a group holds the tensors that the
others save.  So it can lay out their images itself, byte for byte, and make its copies or parity of them in
the window between two optimizer steps (REFT's asynchronous redundant copying and erasure coding; Wang et
al., 2023).  The agents afterwards exchange what only one rank has: its extras and the digest table, at the
end of an image, a few kilobytes.

The layout of the others' images is known from the previous snapshot; if it turns out to have changed, the
agents exchange everything, once.  They always do if an image holds buffers that the forward pass changes
(the statistics of batch norm), which may differ from replica to replica.  At every snapshot, the digests of
the chunks that were laid out here show whether the replicas are equal.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.core.codec.digest import CHUNK_BYTES, digest_chunks
from holdfast.core.codec.stripes import Contribution, Stripes
from holdfast.core.format.image import Image, plan_image
from holdfast.core.format.manifest import FileEntry, TensorEntry
from holdfast.core.layout import Box
from holdfast.live.saving.planning import SavePlan
from holdfast.live.state.arrays import raw_array
from holdfast.live.state.carrying import CarriedCopies
from holdfast.live.state.devices import Moment, after, devices_in, on_streams, page_locks
from holdfast.live.state.named import Collected, LiveTensor
from holdfast.live.state.snapshot import SetAside

WINDOW_BYTES = 4 << 20
"""Bytes that are laid out at a time; what fits in a core's cache is not written to memory."""

Flat = NDArray[np.uint8]


@dataclass
class _Read:
    """Bytes `skip..skip + size` of a tensor, which go to `at` of the window that they are in."""

    source: torch.Tensor
    skip: int
    at: int
    size: int
    is_live: bool
    """True if the training's next optimizer step changes it."""

    def into(self, window: Flat, source: torch.Tensor) -> None:
        """Copy from `source`, which is the tensor where it is now."""
        part = window[self.at : self.at + self.size]
        if source.device.type != "cpu":
            flat = source.reshape(-1).view(torch.uint8)[self.skip : self.skip + self.size]
            torch.from_numpy(part).copy_(flat)
            return
        raw = raw_array(source)
        if self.size == raw.nbytes and not raw.flags.c_contiguous:
            np.copyto(part.view(raw.dtype).reshape(raw.shape), raw)
        else:
            flat = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
            np.copyto(part, flat[self.skip : self.skip + self.size])


@dataclass
class _Piece:
    """Bytes `start..stop` of an image, and the tensor that they are read from."""

    start: int
    stop: int
    source: torch.Tensor
    is_live: bool = True

    def read(self, start: int, stop: int, at: int) -> _Read:
        """Return the read of bytes `start..stop` of the piece, from as few elements or rows of the
        tensor as possible."""
        source, size = self.source, stop - start
        if source.is_contiguous():
            source = source.reshape(-1)
        unit = source[0].numel() * source.element_size()
        first = start // unit
        return _Read(source[first : -(-stop // unit)], start - first * unit, at, size, self.is_live)


class ReplicaImage:
    """The image of another rank up to its extras, laid out from this rank's tensors."""

    def __init__(self, image: Image, pieces: list[_Piece]) -> None:
        header = torch.frombuffer(bytearray(image.header), dtype=torch.uint8)
        self._pieces = [_Piece(0, len(header), header, is_live=False), *pieces]
        self._starts = [p.start for p in self._pieces]

    def reads(self, start: int, stop: int) -> Iterator[_Read]:
        """Yield the reads that make up bytes `start..stop`."""
        at = start
        number = bisect_right(self._starts, at) - 1
        while at < stop:
            piece = self._pieces[number]
            end = min(stop, piece.stop)
            yield piece.read(at - piece.start, end - piece.start, at - start)
            at, number = end, number + 1


def replica_image(
    plan: SavePlan,
    file: FileEntry,
    live: Collected,
    aside: SetAside,
    recomputed: Mapping[str, LiveTensor],
) -> ReplicaImage | None:
    """Return the image that `file` describes; None if this rank does not hold all of its tensors.

    `recomputed`: tensors that are recomputed here, by name; they do not change until they are read.
    """
    image, found = image_of(plan, file), []
    if image is None:
        return None
    for entry, box, at, size in pieces_of(plan, image, file.rank):
        name, own = entry.name, recomputed.get(entry.name)
        is_aside = own is None and name in live.aside
        source = _held(own or live.tensors.get(name), box, aside if is_aside else None)
        if source is None:
            return None
        if size:
            found.append(_Piece(at, at + size, source, own is None and not is_aside))
    return ReplicaImage(image, found)


def image_of(plan: SavePlan, file: FileEntry) -> Image | None:
    """Return the layout of a rank's image by a plan; None if `file` is laid out in another way."""
    pieces = plan.placement.pieces(file.rank)
    image = plan_image(plan.agreement.tensors, pieces, extras_bytes=file.table - file.extras)
    laid_out = (image.data_start, image.extras_start, image.table_start, image.total_bytes)
    return image if laid_out == (file.data, file.extras, file.table, file.bytes) else None


def pieces_of(
    plan: SavePlan, image: Image, rank: int
) -> Iterator[tuple[TensorEntry, Box, int, int]]:
    """Yield (tensor, part of it, offset in the image, bytes) of each piece of a rank's image."""
    pieces = plan.placement.pieces(rank)
    columns = (pieces.tensor, pieces.start, pieces.stop, pieces.offset, pieces.bytes)
    for index, start, stop, offset, size in zip(*(c.tolist() for c in columns)):
        entry = plan.agreement.tensors[index]
        n = len(entry.shape)
        yield entry, Box(tuple(start[:n]), tuple(stop[:n])), image.data_start + offset, size


def _held(t: LiveTensor | None, box: Box, kept: SetAside | None) -> torch.Tensor | None:
    """Return a part of a tensor; None if this rank does not hold all of it, or the tensor is a buffer,
    which may differ between ranks.  `kept`: its values that were set aside; None if they were not."""
    if t is None or not t.steady:
        return None
    for number, part in enumerate(t.parts):
        if part.box & box == box:
            held = part.local.detach() if kept is None else kept[t.name, number]
            return held[box.within(part.box.start)]
    return None


@dataclass
class _Window:
    """The source of bytes `at..stop` of the guard: `size` bytes of a member's image, from `start` on."""

    of: Contribution
    at: int
    stop: int
    start: int
    size: int
    reads: list[_Read]


class ReplicaGuard:
    """This rank's guard, up to the others' extras; `fill` makes it anew for each snapshot."""

    def __init__(
        self,
        stripes: Stripes,
        me: int,
        files: Sequence[FileEntry],
        images: dict[int, ReplicaImage],
        devices: Sequence[torch.device],
    ) -> None:
        self.stripes = stripes
        self.seen: list[tuple[int, int, bytes]] = []
        """(member, first chunk, digests) of the chunks as they are on this rank, from the last
        `fill`."""
        self.files = tuple(files)
        pinned = any(device.type in page_locks for device in devices)
        self._scratch = torch.empty(WINDOW_BYTES, dtype=torch.uint8, pin_memory=pinned).numpy()
        self._devices = devices
        self._windows = list(self._planned(me, images))
        self.sources = [r.source for w in self._windows for r in w.reads if r.is_live]
        """The training's own tensors that are read, in the order of the reads."""

    def _planned(self, me: int, images: dict[int, ReplicaImage]) -> Iterator[_Window]:
        for c in self.stripes.contributions(me):
            member = c.source.member
            last = min(c.source.stop, self.files[member].extras)
            for start, end in _windows(c.source.start, c.source.start + self.stripes.block_bytes):
                stop = max(min(end, last), start)
                at = c.at + start - c.source.start
                reads = list(images[member].reads(start, stop))
                if reads or c.index == 0:
                    yield _Window(c, at, at + end - start, start, stop - start, reads)

    def fill(
        self,
        view: memoryview,
        carried: CarriedCopies | None = None,
        first: int = 0,
        ready: Moment | None = None,
    ) -> None:
        """Make the guard in `view`, which is memory of the agent.

        In `carried`, the `sources` begin at number `first`.  Nothing is read before `ready`; without
        `ready`, nothing before all work that the device has been given.
        """
        streams = [after(ready, device, "guard") for device in self._devices]
        with on_streams(streams):
            self._fill(view, carried, first, streams)

    def _fill(
        self,
        view: memoryview,
        carried: CarriedCopies | None,
        number: int,
        streams: Sequence[torch.Stream],
    ) -> None:
        self.seen = []
        kept: Any = np.frombuffer(view, np.uint8)
        for window in self._windows:
            block, c = self._scratch[: window.size], window.of
            for read in window.reads:
                if carried is None or not read.is_live:
                    read.into(block, read.source)
                else:
                    source = carried.take(number)
                    carried.before(streams)
                    read.into(block, source)
                    carried.done()
                number += read.is_live
            if window.size:
                self._keep_digests(c.source.member, window.start, block)
            rows = kept[window.at : window.stop]
            self.stripes.code.accumulate({c.row: rows}, c.index, block, fresh=c.index == 0)

    def _keep_digests(self, member: int, at: int, block: Flat) -> None:
        """Keep the digests of the chunks that lie entirely in `block`: bytes of an image from `at` on."""
        first, stop = -(-at // CHUNK_BYTES), (at + len(block)) // CHUNK_BYTES
        if first < stop:
            digests = np.empty(stop - first, "<u8")
            chunks: Any = block[first * CHUNK_BYTES - at : stop * CHUNK_BYTES - at]
            digest_chunks(memoryview(chunks), digests)
            self.seen.append((member, first, digests.tobytes()))


def _windows(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield ranges that end at multiples of `WINDOW_BYTES`, so that no chunk but the first and last is in
    two of them."""
    while start < stop:
        end = min((start // WINDOW_BYTES + 1) * WINDOW_BYTES, stop)
        yield start, end
        start = end


def replica_guard(
    plan: SavePlan,
    live: Collected,
    aside: SetAside,
    recomputed: Mapping[str, LiveTensor],
    stripes: Stripes,
    files: Sequence[FileEntry],
    me: int,
) -> ReplicaGuard | None:
    """Return a guard from this rank's own tensors; None if it does not hold what the others save."""
    images = {}
    for member in {c.source.member for c in stripes.contributions(me)}:
        image = replica_image(plan, files[member], live, aside, recomputed)
        if image is None:
            return None
        images[member] = image
    return ReplicaGuard(stripes, me, files, images, devices_in(live))
