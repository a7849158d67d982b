"""Deleting failed attempts and files that crashes left; `pruning` deletes steps.

* *must*: a file that a manifest names is never deleted before the manifest;
* *should*: files that no manifest names are deleted (a crash leaves them; the next save sweeps them).
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

from holdfast.base.arguments import MAX_STEP, count_of
from holdfast.base.entry import options, public
from holdfast.base.errors import HoldfastError, NotFound
from holdfast.core.checkpoint.claiming import Claim, is_abandoned
from holdfast.core.checkpoint.names import (
    STEP,
    RootKeys,
    parse_attempt,
    step_prefix,
    verified_attempt,
)
from holdfast.core.store import LocalStore, Store
from holdfast.core.store.local import sweep_temp_files

INDEX = ".safetensors.index.json"
"""Ending of Hugging Face's indexes beside a consolidated step's manifest."""

Lock: TypeAlias = AbstractContextManager[Any]
_Marking: TypeAlias = AbstractContextManager[RootKeys]
_DIRECTORY = re.compile(rf"steps/{STEP}/([^/]+)")


@options
@dataclass(frozen=True, slots=True)
class Keep:
    """The steps to keep: the newest `last`, multiples of `every`, the `best` by a metric, and those `newer`
    than a time.  A step that no rule keeps is deleted.

    Without any rule all steps stay.  The newest step and pinned steps always stay.

    `best=("loss", 3)`: the 3 steps with the lowest loss; `("accuracy", 3, "max")`: the highest.  Values
    that are not finite never count; of equal values the newer step counts.  Steps without the metric are
    left to the other rules, and stay if there is no other.
    `newer="2d"`: steps saved within two days (`s`, `m`, `h`, `d`), by the time in the manifest (rank 0's
    clock) and the clock of the deleting host.
    """

    last: int | None = None
    every: int | None = None
    best: tuple[str, int] | tuple[str, int, str] | None = None
    newer: str | None = None

    @public
    def __post_init__(self) -> None:
        for name in ("last", "every"):
            n = getattr(self, name)
            if n is not None:
                n = count_of(
                    n,
                    "Keep",
                    name,
                    most=MAX_STEP,
                    hint="leave it out, or say None, and no step stays because of it",
                )
                object.__setattr__(self, name, n)
        if self.best is not None or self.newer is not None:
            from holdfast.core.checkpoint.pruning import check_rules

            object.__setattr__(self, "best", check_rules(self.best, self.newer))

    @property
    def keeps_all(self) -> bool:
        """True if there is no rule."""
        return (self.last, self.every, self.best, self.newer) == (None, None, None, None)


def marking(store: Store, keys: RootKeys | None, below: str = "steps/") -> _Marking:
    """Return `keys`, whose owner deletes marked keys; else new keys, deleted at the end of the block."""
    return RootKeys(store, below=[below]) if keys is None else nullcontext(keys)


def _named(store: Store, step: int) -> str | None:
    """The attempt of a step's manifest; "" if there is no manifest, None if it cannot be read."""
    try:
        return verified_attempt(store, step)
    except NotFound:
        return ""
    except HoldfastError:
        return None


def discard(store: Store, step: int, attempt: str | None, keys: RootKeys | None = None) -> None:
    """Delete the files of an attempt unless the step's manifest names it; with `keys`, only mark them."""
    if attempt is None or _named(store, step) in (attempt, None):
        return
    with marking(store, keys, step_prefix(step)) as keys:
        keys.mark_below(f"{step_prefix(step)}{attempt}/")


def sweep(
    store: Store, mine: Claim | None = None, upto: int = 0, keys: RootKeys | None = None
) -> list[str]:
    """Delete what no manifest names: attempts of older runs, and of this run up to number `upto`.

    Later ones of this run may be under way: another rank may already write the next save.  Attempts
    without a run go when their process is gone.  The only attempt of a committed step is the one that its
    manifest names: nobody deletes its files before the manifest.  With `keys` they are only marked there.
    """
    gone = []
    with marking(store, keys) as keys:
        for step, theirs in keys.attempts.items():
            old = {a: k for a, k in theirs.items() if _is_old(a, mine, upto) or is_abandoned(a)}
            if not old or (len(theirs) == 1 and step in keys.manifests):
                continue  # nothing to delete
            named = _named(store, step)
            for attempt, images in old.items():
                if named not in (attempt, None):
                    keys.marked += images
                    gone.append(attempt)
    if isinstance(store, LocalStore):
        sweep_temp_files(store.root, lambda path: _is_of_old(path, mine, upto))
    return gone


def _is_of_old(directory: str, mine: Claim | None, upto: int) -> bool:
    match = _DIRECTORY.fullmatch(directory)
    return match is not None and _is_old(match[2], mine, upto)


def _is_old(attempt: str, mine: Claim | None, upto: int) -> bool:
    numbers = parse_attempt(attempt)
    return numbers is not None and mine is not None and numbers <= (mine.run, upto)
