"""Deleting steps: the choice by the rules of a `Keep`, and the deletion of one step.

Every deletion of steps uses this module: a run after a save, the upload to a home, `holdfast prune`.
Rules only keep steps.  A step that no rule keeps is deleted, unless it is pinned, needed, or unreadable
for a rule.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import msgspec

from holdfast.base.arguments import choice_of, count_of, text_of, unfit
from holdfast.base.errors import FormatError, HoldfastError, NotFound, UnsupportedVersion
from holdfast.base.events import emit
from holdfast.base.text import time_of
from holdfast.base.threads import in_threads
from holdfast.base.wire import decode_json
from holdfast.core.checkpoint.committing import check_lengths
from holdfast.core.checkpoint.names import (
    RootKeys,
    Saved,
    manifest_key,
    read_head,
    read_manifest,
    step_prefix,
)
from holdfast.core.checkpoint.notes import Metrics, Notes, notes_among, read_notes
from holdfast.core.checkpoint.tidying import INDEX, Keep, Lock, marking
from holdfast.core.format.manifest import verified
from holdfast.core.store import LocalStore, Store, num_threads_for

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])")

# -- rules ----------------------------------------------------------------------------------------


def check_rules(best: Any, newer: Any) -> tuple[str, int, str] | None:
    """Return `best` with its direction.  UsageError for invalid rules."""
    if newer is not None:
        seconds_in(newer)
    if best is None:
        return None
    what = "(metric, number of steps), or (metric, number of steps, 'min' or 'max')"
    if not isinstance(best, (tuple, list)) or len(best) not in (2, 3):
        raise unfit("Keep", "best", best, what)
    name = text_of(best[0], "Keep", "best[0]", "the name of a metric")
    way = choice_of(best[2], ("min", "max"), "Keep", "best[2]") if len(best) == 3 else "min"
    return name, count_of(best[1], "Keep", "best[1]"), way


def seconds_in(newer: Any, call: str = "Keep", name: str = "newer") -> float:
    """Parse a time such as `2d` to seconds.  UsageError."""
    what = "a time such as '36h' or '2d' (s, m, h, d)"
    match = _TIME.fullmatch(text_of(newer, call, name, what))
    if match is None:
        raise unfit(call, name, newer, what, typed=False)
    return float(match[1]) * _UNITS[match[2]]


# -- choosing -------------------------------------------------------------------------------------


def prune(
    store: Store,
    keep: Keep,
    *,
    spare: Collection[int] = (),
    owns: Callable[[Saved], bool] = lambda _: True,
    lock: Lock | None = None,
    keys: RootKeys | None = None,
) -> list[int]:
    """Delete the steps that `keep` does not keep; return the deleted steps.  Steps for which `owns` is
    false stay, and rules do not count them.

    The newest good step always stays, even if a damaged one is newer.  So do the steps in `spare`, which
    are being saved again or are bases of the newest records.  `lock` excludes commits while a manifest is
    deleted.  All files are deleted after all manifests; with `keys` they are only marked.
    """
    with marking(store, keys) as keys:
        due = prunable(store, keep, spare, keys, owns)
        gone = [step for step in due if delete_step(store, step, lock, keys)]
    for step in gone:
        emit("pruned", step=step)
    return gone


def prunable(
    store: Store,
    keep: Keep,
    spare: Collection[int] = (),
    keys: RootKeys | None = None,
    owns: Callable[[Saved], bool] = lambda _: True,
) -> list[int]:
    """The steps that `prune` would delete, oldest first.  Corrupt or FormatError for damaged notes."""
    if keep.keeps_all:
        return []
    keys = keys or RootKeys(store)
    good = [s for s in keys.saved if s.is_proved and owns(s)]
    stay = {s.step for s in good[-(keep.last or 1) :]} | set(spare)
    stay |= {s.step for s in good if keep.every and s.step % keep.every == 0}
    if any(s.step not in stay for s in good):
        notes = notes_among(keys)
        stay |= set(notes.pinned)
        stay |= _kept_as_best(keys, notes, keep, good)
        stay |= _kept_as_newer(keys, keep, [s for s in good if s.step not in stay])
    due = [s.step for s in good if s.step not in stay]
    newest = next((s.step for s in reversed(good) if _sound(keys, s.step)), None) if due else None
    due = [step for step in due if step != newest]
    if isinstance(store, LocalStore):
        due = [step for step in due if not store.is_behind_link(manifest_key(step))]
    return due


def _kept_as_best(keys: RootKeys, notes: Notes, keep: Keep, good: list[Saved]) -> set[int]:
    if keep.best is None:
        return set()
    (name, number), way = keep.best[:2], keep.best[2:]
    is_only_rule = (keep.last, keep.every, keep.newer) == (None, None, None)
    best, unknown = best_first(keys, notes, name, "".join(way), good)
    stay = {step for step, is_readable in unknown.items() if is_only_rule or not is_readable}
    return stay | {*best[:number]}


def best_first(
    keys: RootKeys, notes: Notes, metric: str, way: str, saved: list[Saved]
) -> tuple[list[int], dict[int, bool]]:
    """The steps with a finite value of a metric, the best first: the lowest, or with the `way` "max" the
    highest; of equal values the newer step.  Also the steps without the metric, and whether the manifest of
    each can be read."""
    sign = -1.0 if way == "max" else 1.0
    measured, unknown = list[tuple[float, int, int]](), dict[int, bool]()
    stated = _all_stated(keys, saved)
    for order, one in enumerate(saved):
        facts = stated[one.step]
        values = {**(facts.metrics if facts else {}), **notes.values(one.run, one.step)}
        value = values.get(metric)
        if facts is None or metric not in values:
            unknown[one.step] = facts is not None
        elif value is not None and math.isfinite(value):
            measured.append((sign * value, -order, one.step))
    return [step for _, _, step in sorted(measured)], unknown


def _kept_as_newer(keys: RootKeys, keep: Keep, doubtful: list[Saved]) -> set[int]:
    if keep.newer is None:
        return set()
    since = time.time() - seconds_in(keep.newer)
    stated = _all_stated(keys, doubtful)
    return {s.step for s in doubtful if _time_of(stated[s.step]) > since}


class Stated(msgspec.Struct, frozen=True):
    """Facts of a manifest that rules use."""

    created: str
    metrics: Metrics = {}


def _all_stated(keys: RootKeys, saved: list[Saved]) -> dict[int, Stated | None]:
    """Return the facts of each step; None if its manifest is unreadable.  Reads each manifest once."""
    found: dict[int, Stated | None] = {}

    def look(one: Saved) -> None:
        found[one.step] = _stated(keys, one)

    in_threads(look, saved, num_threads_for(keys.store))
    return found


def _stated(keys: RootKeys, saved: Saved) -> Stated | None:
    run, facts = keys.known.stated.get(saved.step, (-1, None))
    if run == saved.run and isinstance(facts, Stated):
        return facts
    key = manifest_key(saved.step)
    try:
        body = verified(keys.store.get(key), key)
        facts = decode_json(b"".join((body, b"}")), Stated)
    except (FormatError, NotFound, msgspec.DecodeError):
        return None
    keys.known.stated[saved.step] = saved.run, facts
    return facts


def _time_of(facts: Stated | None) -> float:
    """Return the time of a save in seconds since the epoch; infinite if unknown."""
    created = time_of(facts.created) if facts else None
    return math.inf if created is None else created


def _sound(keys: RootKeys, step: int) -> bool:
    """True if a step's manifest is readable and every file has its length.

    For the step that this process has just committed, only checks that its files are still listed.
    """
    last, named = keys.known.last
    if last == step and named <= set(keys.keys):
        return True
    try:
        check_lengths(keys.store, read_manifest(keys.store, step))
    except HoldfastError:
        return False
    return True


# -- deleting -------------------------------------------------------------------------------------


def delete_step(
    store: Store, step: int, lock: Lock | None = None, keys: RootKeys | None = None
) -> bool:
    """Delete a step: first its manifest, after which the step does not exist, then its files.  With `keys`,
    the files are only marked there.

    `lock` is held from reading the manifest to deleting it, so that no newer or newly pinned step is
    deleted. Only files that the manifest names are deleted: another rank may be saving this step again.

    Return False, and delete nothing, if the step is pinned, is gone, has a newer format (its files are
    unknown), or the beginning of its manifest is damaged.
    """
    manifest, key, prefix = None, manifest_key(step), step_prefix(step)
    with lock or nullcontext():
        if step in (read_notes(store) if keys is None else notes_among(keys)).pinned:
            return False
        try:
            manifest = read_manifest(store, step)
        except (NotFound, UnsupportedVersion):
            return False
        except FormatError:
            saved = read_head(store, step, key)
            if saved is not None and not saved.is_proved:
                return False
        store.delete(key)
    with marking(store, keys, prefix) as keys:
        keys.manifests.pop(step, None)
        if manifest is not None:
            own = f"{manifest.attempt}/"
            beside = [key.removeprefix(prefix) for key in keys.below(prefix)]
            named = [f.path for f in manifest.objects if f.path.startswith(own)]
            named += [name for name in beside if name.endswith(INDEX) and "/" not in name]
            keys.mark(prefix + name for name in named)
    return True
