"""The entries of writers at work: when a training process has died or left an attempt, its writer may still
have records in memory that are not in the log yet."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from holdfast.base.errors import Corrupt, HoldfastError, NotFound
from holdfast.base.events import emit, span
from holdfast.base.host import host_id, process_state, start_time
from holdfast.base.wire import decode_json
from holdfast.core.store import Store, get_small

_WRITING = re.compile(r"log/\d{10}/r\d{5,}-\d+\.writing")
POLL_S = 0.02
WAIT_S = 120.0
"""Seconds to wait for a writer that is alive: storage may be slow."""


class WriterEntry(msgspec.Struct, frozen=True):
    """A writer at work: its host, its pid, and when it started."""

    place: str
    pid: int
    started: str

    def is_here(self) -> bool:
        """True if it is known to be at work on this host."""
        return self.place == host_id() and process_state(self.pid, self.started) == "runs"


def writing_key(run: int, rank: int, pid: int) -> str:
    return f"log/{run:010d}/r{rank:05d}-{pid}.writing"


def announce(store: Store, run: int, rank: int, pid: int) -> None:
    """Announce that a process writes a rank's records.  The rank does so before it hands over any record,
    as it may die before its writer begins.  Blocks; StoreError."""
    writer = WriterEntry(host_id() or "", pid, start_time(pid) or "")
    store.put(writing_key(run, rank, pid), msgspec.json.encode(writer))


def withdraw(store: Store, run: int, rank: int) -> None:
    """Delete the entry of this process, which has written all its records."""
    with suppress(HoldfastError):
        store.delete(writing_key(run, rank, os.getpid()))


def writers(store: Store, keys: Iterable[str], run: int) -> dict[str, WriterEntry]:
    """The writers of runs before `run` with an entry among `keys`, by key.  One whose entry is gone by now,
    or is damaged, counts as one that is not at work."""
    found = {}
    for key in keys:
        if _WRITING.fullmatch(key) is not None and int(key.split("/")[1]) < run:
            try:
                found[key] = decode_json(get_small(store, key), WriterEntry)
            except (NotFound, Corrupt, msgspec.DecodeError):
                found[key] = WriterEntry("", 0, "")
    return found


def ended(store: Store, keys: Iterable[str], run: int) -> list[str]:
    """Keys of the entries of writers of runs before `run` that are not known to be at work."""
    return [key for key, one in writers(store, keys, run).items() if not one.is_here()]


def await_others(others: dict[str, WriterEntry], limit_s: float = WAIT_S) -> list[str]:
    """Wait until none of these writers is at work on this host; return the keys of those that still are.

    Writers on other hosts cannot be seen.
    """
    left = []
    until = time.monotonic() + limit_s
    with span("replay.writers") as fields:
        for key, one in others.items():
            fields["waited"] = fields.get("waited", 0) + one.is_here()
            while one.is_here():
                if time.monotonic() > until:
                    emit("replay.not_awaited", key=key, pid=one.pid)
                    left.append(key)
                    break
                time.sleep(POLL_S)
    return left
