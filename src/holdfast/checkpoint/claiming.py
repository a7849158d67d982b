"""Claims: which run may write to a root, and whether the process that did is still there."""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from pathlib import Path

import msgspec

from holdfast.checkpoint.names import committed
from holdfast.codec.digest import hexdigest
from holdfast.errors import Exists, NotFound, UsageError
from holdfast.store import Store

_CLAIM = re.compile(r"claims/(\d{10})\.json")


class Claim(msgspec.Struct, frozen=True):
    """Who took a root: enough to tell whether that process is still there."""

    run: int
    host: str
    boot: str
    pid: int
    started: str
    job: str
    created: str

    def alive_elsewhere(self) -> bool:
        """Whether the claimant runs on this host now and is not this process."""
        if self.boot != boot_id() or self.pid == os.getpid():
            return False
        return process_start(self.pid) == self.started

    def is_over(self) -> bool:
        """Whether the claimant has closed, or was on this host and is gone."""
        return self.started == "closed" or (self.boot == boot_id() and not self.alive_elsewhere())

    def __str__(self) -> str:
        return f"run {self.run} (host {self.host}, pid {self.pid}, since {self.created})"


def boot_id() -> str:
    """Where process numbers mean the same processes: a boot of a host, and a pid namespace in it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def process_start(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot: tells a process from a later one of its pid."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rsplit(")", 1)[1].split()
    return None if fields[0] in "ZX" else fields[19]


def claim(store: Store) -> Claim:
    """Take a root: the next run number, for this process.

    UsageError if the process that holds it is alive on this host.  A run on another host cannot be
    seen; it finds itself superseded at its next commit.
    """
    while True:
        held = newest_claim(store)
        if held is not None and held.alive_elsewhere():
            raise UsageError(
                f"{store.url} is in use by {held}",
                hint="stop that run, or give this one a root of its own",
            )
        floor = max([s.run for s in committed(store)], default=0)
        run = max(held.run if held else 0, floor) + 1
        mine = Claim(
            run=run,
            host=socket.gethostname(),
            boot=boot_id(),
            pid=os.getpid(),
            started=process_start(os.getpid()) or "",
            job=os.environ.get("TORCHELASTIC_RUN_ID", ""),
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )
        try:
            store.put(f"claims/{run:010d}.json", msgspec.json.encode(mine), if_absent=True)
        except Exists:
            continue
        if held is not None:
            store.delete(f"claims/{held.run:010d}.json")
        return mine


def newest_claim(store: Store) -> Claim | None:
    for key in reversed(store.list("claims/")):
        match = _CLAIM.fullmatch(key)
        if match is None:
            continue
        try:
            found = msgspec.json.decode(store.get(key), type=Claim)
        except NotFound:
            return newest_claim(store)  # superseded since it was listed: there is a newer one
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = None
        run = int(match[1])
        damaged = found is None or found.run != run
        return Claim(run, "?", "?", 0, "?", "", "?") if damaged else found
    return None


def check_claim(store: Store, mine: Claim) -> None:
    """UsageError if another run has taken the root since."""
    held = newest_claim(store)
    if held is None or held.run != mine.run:
        raise UsageError(
            f"{store.url} was taken over by {held or 'nobody'}; this is run {mine.run}, which "
            "commits no more",
            hint="two runs must not write to one root; stop one of them",
        )


def release(store: Store, mine: Claim) -> None:
    """A closed run holds its root no more.  Its number stays taken through its manifests."""
    held = newest_claim(store)
    if held is not None and held.run == mine.run:
        gone = msgspec.structs.replace(mine, pid=0, started="closed")
        store.put(f"claims/{mine.run:010d}.json", msgspec.json.encode(gone))


_ONCE = re.compile(r"once-([0-9a-f]{16})-(\d+)-(\d+)-[0-9a-f]{8}")


def once_attempt() -> str:
    """The attempt of a save that takes no claim: unique, and tells whether its process still runs."""
    pid = os.getpid()
    where = hexdigest(boot_id().encode())
    return f"once-{where}-{pid}-{process_start(pid) or 0}-{secrets.token_hex(4)}"


def is_abandoned(attempt: str) -> bool:
    """Whether an attempt is by a process of this host that took no claim and is gone."""
    match = _ONCE.fullmatch(attempt)
    if match is None or match[1] != hexdigest(boot_id().encode()) or match[3] == "0":
        return False
    return process_start(int(match[2])) != match[3]
