"""Committing, claiming, pruning: the writes that decide what exists.

Invariants (docs/format.md states them for other implementations):

* *must*: every byte that a manifest names is durable before the manifest is written;
* *must*: a file that a manifest names is never written again and never deleted before the manifest;
* *must*: a run whose claim is not the newest commits nothing;
* *should*: files that no manifest names are deleted (a crash leaves them; the next save sweeps them).
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from holdfast.checkpoint.names import committed, manifest_key, read_manifest, step_prefix
from holdfast.checkpoint.reading import in_threads
from holdfast.errors import (
    Exists,
    FormatError,
    HoldfastError,
    NotFound,
    StoreError,
    UnsupportedVersion,
    UsageError,
)
from holdfast.events import emit
from holdfast.format.manifest import FileEntry, Manifest, encode
from holdfast.store import Store

INDEX = ".safetensors.index.json"
"""What a consolidated step has beside its manifest, for Hugging Face's loaders."""

CHECK_THREADS = 8

_CLAIM = re.compile(r"claims/(\d{10})\.json")
_IMAGE = re.compile(r"steps/(\d{10})/(\d{4,})-(\d{6})/[^/]+")


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


@dataclass(frozen=True, slots=True)
class Keep:
    """Which steps stay: the newest `last`, and every step that is a multiple of `every`.

    None keeps all.  The newest step stays in any case.
    """

    last: int | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        for name in ("last", "every"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UsageError(f"Keep({name}={value!r}): must be a positive number or None")


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
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


def commit(store: Store, manifest: Manifest, mine: Claim | None = None) -> None:
    """Make a step exist.  Everything that the manifest names must be durable already.

    StoreError if a file cannot be seen from here or has another length: then nothing is committed.
    """
    if mine is not None:
        check_claim(store, mine)
    check_files(store, manifest)
    store.put(manifest_key(manifest.step), encode(manifest))


def check_files(store: Store, manifest: Manifest) -> None:
    """StoreError unless every file of a manifest is there, with its length."""
    prefix = step_prefix(manifest.step)

    def check(file: FileEntry) -> None:
        try:
            size = store.size(prefix + file.path)
        except NotFound:
            raise StoreError(
                f"the file of rank {file.rank} cannot be seen by rank 0",
                key=prefix + file.path,
                hint="is the root on a file system that all hosts share?",
            ) from None
        if size != file.bytes:
            raise StoreError(
                f"the file of rank {file.rank} has {size} bytes, {file.bytes} were written",
                key=prefix + file.path,
            )

    in_threads(check, list(manifest.files), CHECK_THREADS)


def attempt_of(store: Store, step: int) -> str | None:
    """The attempt that a step's manifest names; None if there is no (readable) one."""
    try:
        return read_manifest(store, step).attempt
    except HoldfastError:
        return None


def discard(store: Store, step: int, attempt: str) -> None:
    """Delete one attempt's files, unless the step's manifest names them."""
    try:
        if read_manifest(store, step).attempt == attempt:
            return
    except NotFound:
        pass
    except HoldfastError:
        return  # an unreadable manifest may name them
    for key in store.list(f"{step_prefix(step)}{attempt}/"):
        store.delete(key)


def prune(
    store: Store,
    keep: Keep,
    *,
    spare: Collection[int] = (),
    lock: AbstractContextManager[Any] | None = None,
) -> list[int]:
    """Delete what `keep` does not keep; returns the steps deleted.

    A damaged newest step does not count: the newest good step always stays.  So do steps to `spare`,
    which are being saved anew; `lock` keeps commits away while a manifest is deleted.
    """
    due = [step for step in prunable(store, keep) if step not in spare]
    gone = [step for step in due if delete_step(store, step, lock)]
    for step in gone:
        emit("pruned", step=step)
    return gone


def prunable(store: Store, keep: Keep) -> list[int]:
    """The steps that `prune` would delete, oldest first."""
    saved = committed(store)
    if (keep.last is None and keep.every is None) or not saved:
        return []
    good = [s for s in saved if s.run >= 0]
    stay = {s.step for s in good[-(keep.last or 1) :]}
    stay |= {s.step for s in good if keep.every and s.step % keep.every == 0}
    stay |= {s.step for s in saved if s.run < 0}
    stay |= set(next(([s.step] for s in reversed(good) if _sound(store, s.step)), []))
    return [s.step for s in saved if s.step not in stay]


def _sound(store: Store, step: int) -> bool:
    """Whether a step's manifest is readable and every file has its length."""
    try:
        manifest = read_manifest(store, step)
        prefix = step_prefix(step)
        return all(store.size(prefix + f.path) == f.bytes for f in manifest.files)
    except HoldfastError:
        return False


def delete_step(store: Store, step: int, lock: AbstractContextManager[Any] | None = None) -> bool:
    """Delete the manifest first: from then on the step does not exist, whatever stops us.

    `lock` is held from reading the manifest to deleting it, so that it is no newer one that goes.

    Then the files that it named, and no others: another rank may be writing this very step anew.
    A step of a newer format stays (False): its files are not known here.
    """
    attempt = None
    with lock or nullcontext():
        try:
            attempt = read_manifest(store, step).attempt
        except UnsupportedVersion:
            return False
        except FormatError:
            pass
        store.delete(manifest_key(step))
    named = f"{step_prefix(step)}{attempt}/"
    for key in store.list(step_prefix(step)) if attempt else ():
        if key.startswith(named) or key.endswith(INDEX):
            store.delete(key)
    return True


def sweep(store: Store, mine: Claim, upto: int) -> list[str]:
    """Delete what no manifest names: attempts of older runs, and of this run up to number `upto`.

    Later ones of this run may be under way: another rank may already write the next save.
    """
    orphans: dict[int, dict[str, list[str]]] = {}
    for key in store.list("steps/"):
        match = _IMAGE.fullmatch(key)
        if match and (int(match[2]), int(match[3])) <= (mine.run, upto):
            attempt = f"{match[2]}-{match[3]}"
            orphans.setdefault(int(match[1]), {}).setdefault(attempt, []).append(key)
    gone = []
    for step, attempts in orphans.items():
        try:
            named = read_manifest(store, step).attempt
        except NotFound:
            named = None
        except HoldfastError:
            continue
        for attempt, keys in attempts.items():
            if attempt != named:
                for key in keys:
                    store.delete(key)
                gone.append(attempt)
    return gone


__all__ = [
    "Claim",
    "Keep",
    "attempt_of",
    "claim",
    "commit",
    "delete_step",
    "discard",
    "newest_claim",
    "prunable",
    "prune",
    "release",
    "sweep",
]
