"""Warnings about steps with a damaged manifest when another step is used.

The beginning of a manifest states the run and number of its step.  If that is damaged, the order of the
step is unknown.  It then counts as the oldest step, so that a good step is used.  But it may be the newest,
and its training would be lost, so a warning names it.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.base.errors import HoldfastError, NotFound, NotRecoverable, warn_user
from holdfast.base.text import first_of
from holdfast.core.checkpoint.names import MOST_TRIES, Saved, committed, manifest_key, read_manifest
from holdfast.core.format.manifest import Manifest
from holdfast.core.store import Store

_MOST = 5


def newest(store: Store) -> int:
    """The newest committed step.  NotRecoverable if there is none; HoldfastWarning about unproved ones."""
    saved = committed(store)
    step = newest_step(saved, store.url)
    tell_passed_over(store.url, saved, step)
    return step


def newest_manifest(store: Store) -> Manifest:
    """The manifest of the newest committed step.  Tries again if a saving run deletes that step meanwhile;
    NotFound after several tries.  Else as `newest`."""
    for _ in range(MOST_TRIES):
        step = newest(store)
        try:
            return read_manifest(store, step)
        except NotFound as error:
            gone = error
    raise gone


def newest_step(saved: list[Saved], url: str) -> int:
    """The newest of a root's steps.  NotRecoverable if there is none."""
    if not saved:
        raise NotRecoverable(
            f"no checkpoint in {url}", hint="check the path; `holdfast ls` lists steps"
        )
    return max(saved).step


def tell_passed_over(url: str, saved: Iterable[Saved], taken: int) -> None:
    """HoldfastWarning if steps are not proved, unless one of them is taken."""
    unproved = [s for s in saved if not s.is_proved]
    if unproved and taken not in {s.step for s in unproved}:
        which = "it" if len(unproved) == 1 else "one of them"
        _warn(
            url,
            unproved,
            f"step {taken} is taken, though {which} may be the newest",
        )


def tell_unreadable(store: Store, saved: Iterable[Saved]) -> int | None:
    """Return the newest step whose manifest can be read; None if there is none.  HoldfastWarning about
    steps that are not proved, and newer ones whose manifest is damaged."""
    steps = sorted(saved)
    unproved, found = [s for s in steps if not s.is_proved], None
    for one in reversed([s for s in steps if s.is_proved]):
        try:
            found = read_manifest(store, one.step).step
            break
        except NotFound:  # a run has deleted it since
            continue
        except HoldfastError as error:
            unproved.append(Saved(one.run, one.step, problem=error.message))
    if unproved:
        _warn(store.url, unproved, "restore() passes over such a step")
    return found


def _warn(url: str, unproved: list[Saved], so: str) -> None:
    parts = [f"step {s.step}: {manifest_key(s.step)} {s.problem}" for s in reversed(unproved)]
    warn_user(
        f"{url} has steps whose manifest cannot be read ({'; '.join(first_of(parts, _MOST))}): {so}",
        f"`holdfast verify {url}@{unproved[-1].step}`; bring the file back from a copy, or delete it",
    )
