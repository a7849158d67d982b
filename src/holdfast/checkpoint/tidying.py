"""Deleting: steps that need not stay, attempts that came to nothing, files that crashes left behind.

* *must*: a file that a manifest names is never deleted before the manifest;
* *should*: files that no manifest names are deleted (a crash leaves them; the next save sweeps them).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

from holdfast.arguments import count_of
from holdfast.checkpoint.claiming import Claim, is_abandoned
from holdfast.checkpoint.committing import check_files
from holdfast.checkpoint.names import (
    RootKeys,
    manifest_key,
    parse_attempt,
    read_head,
    read_manifest,
    step_prefix,
    verified_attempt,
)
from holdfast.errors import FormatError, HoldfastError, NotFound, UnsupportedVersion
from holdfast.events import emit
from holdfast.store import LocalStore, Store
from holdfast.store.local import sweep as sweep_unfinished

INDEX = ".safetensors.index.json"
"""Ending of the indexes beside a consolidated step's manifest, for Hugging Face's loaders."""

Lock: TypeAlias = AbstractContextManager[Any]
Marking: TypeAlias = AbstractContextManager[RootKeys]
_DIRECTORY = re.compile(r"steps/(\d{10})/([^/]+)")


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


def _marking(store: Store, keys: RootKeys | None, below: str = "steps/") -> Marking:
    """Return `keys`, whose owner deletes what is marked; else keys that do so at the end of the block."""
    return RootKeys(store, below=[below]) if keys is None else nullcontext(keys)


def _named(store: Store, step: int) -> str | None:
    """The attempt that a step's manifest names: "" if there is none, None if it may be any."""
    try:
        return verified_attempt(store, step)
    except NotFound:
        return ""
    except HoldfastError:
        return None


def discard(store: Store, step: int, attempt: str | None, keys: RootKeys | None = None) -> None:
    """Delete the files of an attempt, if there is one, unless the step's manifest names them.  With `keys`
    they are only marked there."""
    if attempt is None or _named(store, step) in (attempt, None):
        return
    with _marking(store, keys, step_prefix(step)) as keys:
        keys.mark_below(f"{step_prefix(step)}{attempt}/")


def prune(
    store: Store,
    keep: Keep,
    *,
    spare: Collection[int] = (),
    lock: Lock | None = None,
    keys: RootKeys | None = None,
) -> list[int]:
    """Delete what `keep` does not keep; returns the steps deleted.

    A damaged newest step does not count: the newest good step always stays.  So do steps to `spare`,
    which are being saved anew or lead to the newest state by records; `lock` keeps commits away while a
    manifest is deleted.  All files are deleted after all manifests; with `keys` they are only marked.
    """
    with _marking(store, keys) as keys:
        due = prunable(store, keep, spare, keys)
        gone = [step for step in due if delete_step(store, step, lock, keys)]
    for step in gone:
        emit("pruned", step=step)
    return gone


def prunable(
    store: Store, keep: Keep, spare: Collection[int] = (), keys: RootKeys | None = None
) -> list[int]:
    """The steps that `prune` would delete, oldest first."""
    if keep.last is None and keep.every is None:
        return []
    keys = keys or RootKeys(store)
    good = [s for s in keys.saved if s.is_proved]
    stay = {s.step for s in good[-(keep.last or 1) :]}
    stay |= {s.step for s in good if keep.every and s.step % keep.every == 0}
    due = [s.step for s in good if s.step not in stay and s.step not in spare]
    newest = next((s.step for s in reversed(good) if _sound(keys, s.step)), None) if due else None
    return [step for step in due if step != newest]


def _sound(keys: RootKeys, step: int) -> bool:
    """True if a step's manifest is readable and every file has its length.

    That was so of the step that this process has just committed: it is if its files are still listed.
    """
    last, named = keys.known.last
    if last == step and named <= set(keys.keys):
        return True
    try:
        check_files(keys.store, read_manifest(keys.store, step))
    except HoldfastError:
        return False
    return True


def delete_step(
    store: Store, step: int, lock: Lock | None = None, keys: RootKeys | None = None
) -> bool:
    """Delete the manifest first: from then on the step does not exist, whatever stops us.  The files are
    marked among `keys`, if given.

    `lock` is held from reading the manifest to deleting it, so that it is no newer one that goes.

    They are those that it named, and no others: another rank may be writing this very step anew.
    A step of a newer format stays (False): its files are not known here.  So does one whose manifest's
    beginning was damaged since it was read.
    """
    attempt, key = None, manifest_key(step)
    with lock or nullcontext():
        try:
            attempt = read_manifest(store, step).attempt
        except UnsupportedVersion:
            return False
        except FormatError:
            saved = read_head(store, step, key)
            if saved is not None and not saved.is_proved:
                return False
        store.delete(key)
    with _marking(store, keys, step_prefix(step)) as keys:
        keys.manifests.pop(step, None)
        if attempt is not None:
            keys.mark_below(f"{step_prefix(step)}{attempt}/")
            keys.marked += (k for k in keys.below(step_prefix(step)) if k.endswith(INDEX))
    return True


def sweep(
    store: Store, mine: Claim | None = None, upto: int = 0, keys: RootKeys | None = None
) -> list[str]:
    """Delete what no manifest names: attempts of older runs, and of this run up to number `upto`.

    Later ones of this run may be under way: another rank may already write the next save.  Attempts
    without a run go when their process is gone.  The only attempt of a committed step is the one that its
    manifest names: nobody deletes its files before the manifest.  With `keys` they are only marked there.
    """
    gone = []
    with _marking(store, keys) as keys:
        for step, theirs in keys.attempts.items():
            old = {a: k for a, k in theirs.items() if _is_old(a, mine, upto) or is_abandoned(a)}
            if not old or (len(theirs) == 1 and step in keys.manifests):
                continue  # nothing to delete, so nothing to prove
            named = _named(store, step)
            for attempt, images in old.items():
                if named not in (attempt, None):
                    keys.marked += images
                    gone.append(attempt)
    if isinstance(store, LocalStore):
        sweep_unfinished(store.root, lambda path: _is_of_old(path, mine, upto))
    return gone


def _is_of_old(directory: str, mine: Claim | None, upto: int) -> bool:
    match = _DIRECTORY.fullmatch(directory)
    return match is not None and _is_old(match[2], mine, upto)


def _is_old(attempt: str, mine: Claim | None, upto: int) -> bool:
    numbers = parse_attempt(attempt)
    return numbers is not None and mine is not None and numbers <= (mine.run, upto)
