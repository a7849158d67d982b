"""The sources of ranges of images: this node's memory, another node's agent, or storage."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Literal

import numpy as np

from holdfast.base.errors import AgentUnreachable, Corrupt, NotFound
from holdfast.base.events import count, emit
from holdfast.core.checkpoint.reading import Scratch
from holdfast.core.codec.digest import CHUNK_BYTES
from holdfast.core.codec.erasure import Octets
from holdfast.core.codec.stripes import Extent, Piece, Stripes
from holdfast.core.codec.table import DigestTable
from holdfast.core.store import Reader
from holdfast.tiers.memory.node.fetch import Peer

REBUILD_BYTES = 4 << 20
"""Bytes to rebuild at a time, which bounds memory."""


class FileImage:
    """An image in a file: of this node's agent (`local`), or of a durable save (`storage`)."""

    def __init__(self, reader: Reader, source: Literal["local", "storage"]) -> None:
        self.source = source
        self._reader = reader

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on, as `Reader.read`."""
        self._reader.read(offset, into)
        count(f"memory.{self.source}.bytes", len(into))

    def close(self) -> None:
        self._reader.close()


class RemoteImage:
    """An image in another node's memory.  One out of reach counts as gone: NotFound."""

    source = "peer"

    def __init__(self, peer: Peer, path: str, key: str) -> None:
        self._peer = peer
        self._path = path
        self._key = key

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on, as `Reader.read`."""
        try:
            self._peer.read(self._path, offset, into)
        except AgentUnreachable as error:
            raise NotFound(error.message, key=self._key, hint=error.hint) from None
        except (NotFound, Corrupt) as error:
            error.key = self._key
            raise

    def close(self) -> None:
        """The connection stays for the next image."""


class Tally:
    """The bytes that were read of each image, by key and source.  Thread-safe."""

    def __init__(self) -> None:
        self._bytes: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def add(self, key: str, source: str, size: int) -> None:
        with self._lock:
            self._bytes[key, source] += size

    def tell(self) -> None:
        """Emit an event `memory.read` for each image and source, and begin anew."""
        with self._lock:
            counted, self._bytes = self._bytes, Counter()
        for (key, source), size in sorted(counted.items()):
            emit("memory.read", key=key, source=source, bytes=size)


class TalliedReader:
    """A reader whose bytes are tallied."""

    def __init__(self, image: ImageReader, key: str, tally: Tally) -> None:
        self._image = image
        self._key = key
        self._tally = tally

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on, as `Reader.read`."""
        self._image.read(offset, into)
        self._tally.add(self._key, self._image.source, len(into))

    def close(self) -> None:
        self._image.close()


class RebuiltImage:
    """A lost image, rebuilt range by range from what is left of its group.

    `open_area(member, area)` opens what a member still has.
    """

    source = "rebuilt"

    def __init__(
        self,
        stripes: Stripes,
        lost: frozenset[int],
        member: int,
        open_area: Callable[[int, str], Reader],
    ) -> None:
        self._stripes = stripes
        self._lost = lost
        self._member = member
        self._open_area = open_area
        self._opened: dict[tuple[int, str], Reader] = {}
        self._lock = threading.Lock()
        self._scratch = Scratch()

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on, as `Reader.read`."""
        stop = offset + len(into)
        for at in range(offset, stop, REBUILD_BYTES):
            end = min(at + REBUILD_BYTES, stop)
            for piece in self._stripes.sources(self._lost, self._member, at, end):
                out = np.frombuffer(into, np.uint8)[piece.start - offset : piece.stop - offset]
                self._fill(piece, out)
        count("memory.rebuilt.bytes", len(into))

    def _fill(self, piece: Piece, out: Octets) -> None:
        if self._stripes.is_copy(piece):
            self._read(piece.reads[0], out)
            return
        size, start = sum(extent.size for extent in piece.reads), 0
        scratch = np.frombuffer(self._scratch.get(size), np.uint8)
        read = []
        for extent in piece.reads:
            read.append(scratch[start : start + extent.size])
            self._read(extent, read[-1])
            start += extent.size
        self._stripes.fill(piece, read, out)

    def _read(self, extent: Extent, out: Octets) -> None:
        place = (extent.member, extent.area)
        with self._lock:
            if place not in self._opened:
                self._opened[place] = self._open_area(*place)
        self._opened[place].read(extent.start, memoryview(out))  # type: ignore[arg-type]

    def close(self) -> None:
        for reader in self._opened.values():
            reader.close()
        self._opened.clear()


ImageReader = FileImage | RemoteImage | RebuiltImage


class Verified:
    """An image whose ranges are checked by its digest table before they are returned."""

    def __init__(self, reader: Reader, *, size: int, table: int, digest: str, key: str) -> None:
        self._reader = reader
        self._stop = table
        self._key = key
        self._tail = bytearray(size - table)
        reader.read(table, memoryview(self._tail))
        try:
            self._table = DigestTable.of(self._tail, digest, table)
        except Corrupt as error:
            error.key = key
            raise

    def read(self, start: int, stop: int, memory: memoryview) -> memoryview:
        """Return bytes start..stop, a part of `memory`, which has `room(stop - start)` bytes.  Corrupt."""
        if start >= stop:
            return memory[:0]
        first, end = start // CHUNK_BYTES, min(stop, self._stop)
        a, b = first * CHUNK_BYTES, min(-(-end // CHUNK_BYTES) * CHUNK_BYTES, self._stop)
        if a < b:
            self._reader.read(a, memory[: b - a])
            self._check(first, memory[: b - a])
        if stop > self._stop:
            memory[self._stop - a : stop - a] = self._tail[: stop - self._stop]
        return memory[start - a : stop - a]

    def has(self, first: int, digests: bytes) -> bool:
        """True if these are the digests of its chunks from `first` on."""
        return bytes(self._tail[8 * first : 8 * first + len(digests)]) == digests

    def _check(self, first: int, view: memoryview) -> None:
        try:
            self._table.check(first, view)
        except Corrupt as error:
            error.key = self._key
            raise


def room(size: int) -> int:
    """Return the bytes of memory that `Verified.read` takes for `size` bytes."""
    return size + 2 * CHUNK_BYTES
