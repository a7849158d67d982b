"""Memory that the ranks of a host share."""

from __future__ import annotations

import mmap
import os
import secrets

import msgspec

from holdfast.base.host import host_id
from holdfast.core.group import Group

_NONCE_BYTES = 16


class HostWindow:
    """A memory file per rank, mapped by every rank of the host.  Leaves nothing behind on a crash.

    A rank opens another's file under /proc by process and descriptor number.  In another container these
    may be another file's, so a random number is sent and must be found behind the window's bytes; if it is
    not, or if memory cannot be shared at all, the other rank counts as remote.
    """

    def __init__(self, group: Group, size: int) -> None:
        self.theirs: dict[int, memoryview] = {}
        self._maps: list[mmap.mmap] = []
        nonce, fd = secrets.token_bytes(_NONCE_BYTES), -1
        try:
            try:
                fd = os.memfd_create("holdfast-window")
                os.ftruncate(fd, size + _NONCE_BYTES)
                self._maps.append(mmap.mmap(fd, size + _NONCE_BYTES))
                self._maps[0][size:] = nonce
                self.mine = memoryview(self._maps[0])[:size]
            except OSError:
                self.mine = memoryview(bytearray(size))
            card = msgspec.msgpack.encode((_host() if self._maps else "", os.getpid(), fd, nonce))
            for rank, data in enumerate(group.all_gather(card)):
                if rank != group.rank and self._maps:
                    self._map(rank, msgspec.msgpack.decode(data), size)
            seen = msgspec.msgpack.encode(list(self.theirs))
            for rank, data in enumerate(group.all_gather(seen)):  # both ways, or not at all
                if group.rank not in msgspec.msgpack.decode(data):
                    self.theirs.pop(rank, None)
        finally:
            if fd >= 0:
                os.close(fd)

    def _map(self, rank: int, card: tuple[str, int, int, bytes], size: int) -> None:
        host, pid, fd, nonce = card
        if not host or host != _host():
            return
        try:
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY)
            try:
                if os.fstat(opened).st_size != size + _NONCE_BYTES:
                    return
                mapped = mmap.mmap(opened, size + _NONCE_BYTES, prot=mmap.PROT_READ)
            finally:
                os.close(opened)
        except OSError:
            return  # another container: bytes are sent instead
        if mapped[size:] != nonce:
            mapped.close()
            return
        self._maps.append(mapped)
        self.theirs[rank] = memoryview(mapped)[:size]

    def close(self) -> None:
        """Free the memory; its views must not be used any more."""
        self.mine.release()
        for view in self.theirs.values():
            view.release()
        for mapped in self._maps:
            try:
                mapped.close()
            except BufferError:
                pass  # an error's traceback holds a view; the map is freed with it


def _host() -> str:
    """Identity of the host and its process namespace; empty if unknown."""
    where = host_id()
    return f"{where} {os.environ.get('HOLDFAST_TEST_HOST', '')}" if where else ""
