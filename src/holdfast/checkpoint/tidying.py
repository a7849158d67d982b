"""Deleting: steps that need not stay, attempts that came to nothing, files that crashes left behind.

* *must*: a file that a manifest names is never deleted before the manifest;
* *should*: files that no manifest names are deleted (a crash leaves them; the next save sweeps them).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from holdfast.arguments import count_of
from holdfast.checkpoint.claiming import Claim, is_abandoned
from holdfast.checkpoint.names import (
    committed,
    manifest_key,
    read_manifest,
    stated_attempt,
    step_prefix,
    verified_attempt,
)
from holdfast.errors import FormatError, HoldfastError, NotFound, UnsupportedVersion
from holdfast.events import emit
from holdfast.store import LocalStore, Store
from holdfast.store.local import sweep as sweep_unfinished

INDEX = ".safetensors.index.json"
"""Ending of the indexes beside a consolidated step's manifest, for Hugging Face's loaders."""

_DIRECTORY = re.compile(r"steps/(\d{10})/([^/]+)")
_IMAGE = re.compile(rf"{_DIRECTORY.pattern}/[^/]+")
_NUMBERED = re.compile(r"(\d{4,})-(\d{6,})")


@dataclass(frozen=True, slots=True)
class Keep:
    """The steps that stay: the newest `last`, and every step that is a multiple of `every`.

    None keeps all.  The newest step stays in any case.
    """

    last: int | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        for name in ("last", "every"):
            n = getattr(self, name)
            if n is not None:
                n = count_of(
                    n,
                    "Keep",
                    name,
                    hint="leave it out, or say None, and no step stays because of it",
                )
                object.__setattr__(self, name, n)


def attempt_of(store: Store, step: int) -> str | None:
    """The attempt that a step's manifest names; None if there is no (readable) one."""
    try:
        return verified_attempt(store, step)
    except HoldfastError:
        return None


def discard(store: Store, step: int, attempt: str) -> None:
    """Delete one attempt's files, unless the step's manifest names them."""
    try:
        if verified_attempt(store, step) in (attempt, None):
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
    which are being saved anew or lead to the newest state by records; `lock` keeps commits away while a
    manifest is deleted.
    """
    due = prunable(store, keep, spare)
    gone = [step for step in due if delete_step(store, step, lock)]
    for step in gone:
        emit("pruned", step=step)
    return gone


def prunable(store: Store, keep: Keep, spare: Collection[int] = ()) -> list[int]:
    """The steps that `prune` would delete, oldest first."""
    saved = committed(store)
    if (keep.last is None and keep.every is None) or not saved:
        return []
    good = [s for s in saved if s.is_proved]
    stay = {s.step for s in good[-(keep.last or 1) :]}
    stay |= {s.step for s in good if keep.every and s.step % keep.every == 0}
    stay |= {s.step for s in saved if not s.is_proved}
    stay |= set(next(([s.step] for s in reversed(good) if _sound(store, s.step)), []))
    return [s.step for s in saved if s.step not in stay and s.step not in spare]


def _sound(store: Store, step: int) -> bool:
    """True if a step's manifest is readable and every file has its length."""
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


def sweep(store: Store, mine: Claim | None = None, upto: int = 0) -> list[str]:
    """Delete what no manifest names: attempts of older runs, and of this run up to number `upto`.

    Later ones of this run may be under way: another rank may already write the next save.  Attempts
    without a run go when their process is gone.
    """
    found: dict[int, dict[str, list[str]]] = {}
    for key in store.list("steps/"):
        match = _IMAGE.fullmatch(key)
        if match:
            found.setdefault(int(match[1]), {}).setdefault(match[2], []).append(key)
    gone = []
    for step, theirs in found.items():
        attempts = {a: k for a, k in theirs.items() if _is_old(a, mine, upto) or is_abandoned(a)}
        if not attempts or list(attempts) == [stated_attempt(store, step)]:
            continue  # nothing to delete, so nothing to prove
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
    if isinstance(store, LocalStore):
        sweep_unfinished(store.root, lambda path: _is_of_old(path, mine, upto))
    return gone


def _is_of_old(directory: str, mine: Claim | None, upto: int) -> bool:
    match = _DIRECTORY.fullmatch(directory)
    return match is not None and _is_old(match[2], mine, upto)


def _is_old(attempt: str, mine: Claim | None, upto: int) -> bool:
    match = _NUMBERED.fullmatch(attempt)
    if match is None or mine is None:
        return False
    return (int(match[1]), int(match[2])) <= (mine.run, upto)


def came_later(attempt: str, than: str) -> bool:
    """True if `attempt` is newer than `than`, of one run and step: one by a process without a claim
    beats numbered ones; otherwise the higher number wins."""
    mine, other = _NUMBERED.fullmatch(attempt), _NUMBERED.fullmatch(than)
    if mine is None or other is None:
        return mine is None and other is not None
    return int(mine[2]) > int(other[2])
