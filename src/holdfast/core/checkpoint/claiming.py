"""Claims: which run may write to a root, and whether the process of the last claim still runs."""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec

from holdfast.base.errors import Corrupt, Exists, NotFound, UsageError
from holdfast.base.host import host_id, is_sibling, process_state, start_time
from holdfast.base.wire import decode_json
from holdfast.core.checkpoint.names import (
    CLAIMED_PARTS,
    RootKeys,
    parse_attempt,
    read_head,
    run_of_log,
)
from holdfast.core.codec.digest import hexdigest
from holdfast.core.store import Store, get_small

_CLAIM = re.compile(r"claims/(\d{10})\.json")


class Claim(msgspec.Struct, frozen=True, omit_defaults=True):
    """The process that took a root, with facts by which to tell whether it still runs."""

    run: int
    host: str
    boot: str
    pid: int
    started: str
    job: str
    created: str
    best: tuple[str, str] | None = None
    """The metric, and `min` or `max`, that the run's `Keep(best=...)` goes by; None without such a rule."""

    def alive_elsewhere(self) -> bool:
        """True if the claimant is known to run now, and is neither this process nor a rank of an earlier
        attempt of this run, whose process may still serve as another rank."""
        is_of_this_run = int(os.environ.get("HOLDFAST_ATTEMPT", "1")) > 1 and is_sibling(self.pid)
        return self._fate() == "runs" and self.pid != os.getpid() and not is_of_this_run

    def is_of_this_process(self) -> bool:
        """True if this very process has claimed it."""
        return (self.boot, self.pid) == (host_id(), os.getpid()) and self._fate() == "runs"

    def is_over(self) -> bool:
        """True if the claimant has closed, or is known to be gone."""
        return self.started == "closed" or self._fate() == "gone"

    def _fate(self) -> str:
        return process_state(self.pid, self.started) if self.boot == host_id() else "unknown"

    def __str__(self) -> str:
        return f"run {self.run} (host {self.host}, pid {self.pid}, since {self.created})"


def claim_key(run: int) -> str:
    return f"claims/{run:010d}.json"


def claim(store: Store) -> Claim:
    """Take a root, as `take_root`."""
    return take_root(store, RootKeys(store, below=CLAIMED_PARTS))[0]


def take_root(
    store: Store, keys: RootKeys, above: int = 0, best: tuple[str, str] | None = None
) -> tuple[Claim, Claim | None]:
    """Take a root for this process, with the next run number above `above`.  Return the new claim and the
    newest one before it.  `keys`: a listing of the root's `CLAIMED_PARTS`.  `best`: as in `Claim`.

    The listing may be old.  Another run that has claimed since has taken the next number, or deleted the
    newest claim, which is read here; then claims are listed again.

    UsageError if the holder of the root is alive on this host.  A run on another host cannot be checked; it
    finds its claim superseded at its next commit.  Run numbers of existing steps and records are never used
    again, even if their claims are gone.
    """
    taken, claims = _last_saved(store, keys), keys.below("claims/") or None
    while True:
        held = newest_claim(store, claims)
        if held is not None and held.alive_elsewhere():
            raise UsageError(
                f"{store.url} is in use by {held}",
                hint="stop that run, or give this one a root of its own",
            )
        run = max(held.run if held else 0, taken, above) + 1
        mine = Claim(
            run=run,
            host=socket.gethostname(),
            boot=host_id() or "",
            pid=os.getpid(),
            started=start_time(os.getpid()) or "",
            job=os.environ.get("TORCHELASTIC_RUN_ID", ""),
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            best=best,
        )
        try:
            store.put(claim_key(run), msgspec.json.encode(mine), if_absent=True)
        except Exists:
            claims = None
            continue
        if held is not None:
            store.delete(claim_key(held.run))
        return mine, held


def greatest_run(store: Store, keys: RootKeys) -> int:
    """Return the greatest run number among the claims, steps and records of a root; 0 if there are none."""
    held = newest_claim(store, keys.below("claims/"))
    return max(held.run if held else 0, _last_saved(store, keys))


def _last_saved(store: Store, keys: RootKeys) -> int:
    runs = [*runs_of_steps(store, keys), *map(run_of_log, keys.below("log/"))]
    return max(filter(None, runs), default=0)


def runs_of_steps(store: Store, keys: RootKeys) -> Iterator[int]:
    """The runs of full steps, from the names of their attempts, or from the manifest of a step without a
    numbered attempt."""
    for step, key in keys.manifests.items():
        named = [parse_attempt(attempt) for attempt in keys.attempts.get(step, ())]
        yield from (numbers[0] for numbers in named if numbers)
        if not named or None in named:
            saved = read_head(store, step, key)
            yield saved.run if saved else 0


def newest_claim(store: Store, claims: list[str] | None = None) -> Claim | None:
    """The newest claim of a root; `claims`: the keys of claims, if just listed."""
    for key in reversed(store.list("claims/") if claims is None else claims):
        match = _CLAIM.fullmatch(key)
        if match is None:
            continue
        try:
            found = decode_json(get_small(store, key), Claim)
        except NotFound:
            if key not in store.list(key):  # superseded since the listing
                return newest_claim(store)
            found = None  # a link without a target
        except (Corrupt, msgspec.DecodeError):
            found = None
        run = int(match[1])
        damaged = found is None or found.run != run
        return Claim(run, "?", "?", 0, "?", "", "?") if damaged else found
    return None


def is_newest(store: Store, mine: Claim) -> bool:
    """True if no other run has taken the root since; one request, for the keys of claims."""
    runs = (_CLAIM.fullmatch(key) for key in store.list("claims/"))
    return max((int(match[1]) for match in runs if match), default=-1) == mine.run


def check_claim(store: Store, mine: Claim) -> None:
    """UsageError if another run has taken the root since, or the claim is gone."""
    if is_newest(store, mine):
        return
    held = newest_claim(store)
    if held is None:
        raise UsageError(
            f"{store.url} has no claim: the root was moved, emptied or deleted.  Run {mine.run} stops "
            "committing",
            hint="start the run again with the present place of the root",
        )
    if held.run != mine.run and held.is_of_this_process():
        raise UsageError(
            f"{store.url} was taken over by run {held.run}, another Checkpointer of this process, while "
            f"the first one was open; its run {mine.run} stops committing",
            hint="call close() on the first one before you make another, also in a notebook's cell that is "
            "run again",
        )
    if held.run != mine.run:
        raise UsageError(
            f"{store.url} was taken over by {held}; this run {mine.run} stops committing",
            hint="two runs must not write to one root; stop one of them",
        )


def release(store: Store, mine: Claim) -> None:
    """Release the root when a run closes.  The run's number stays taken, as its manifests have it.

    A claim that another run has removed is not written again.
    """
    key = claim_key(mine.run)
    if is_newest(store, mine):
        gone = msgspec.structs.replace(mine, pid=0, started="closed")
        with suppress(NotFound, Exists, Corrupt):
            store.put(key, msgspec.json.encode(gone), replacing=get_small(store, key))


_ONCE = re.compile(r"once-([0-9a-f]{16})-(\d+)-(\d+)-[0-9a-f]{8}")


def once_attempt() -> str:
    """Return a unique attempt for a save without a claim; its name tells whether its process still runs.

    Must be called in the process that will commit.
    """
    where, pid = host_id(), os.getpid()
    since = start_time(pid) if where else None
    return f"once-{hexdigest((where or '').encode())}-{pid}-{since or 0}-{secrets.token_hex(4)}"


def is_abandoned(attempt: str) -> bool:
    """True if an attempt without a claim is by a process of this boot of this host that is gone."""
    match, where = _ONCE.fullmatch(attempt), host_id()
    if match is None or where is None:
        return False
    return (
        match[1] == hexdigest(where.encode()) and process_state(int(match[2]), match[3]) == "gone"
    )
