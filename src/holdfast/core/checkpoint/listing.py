"""Contents of a root: its committed steps, whether each is complete, and leftovers of crashes.

Checks manifests and the lengths of files; `verifying` checks the bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from holdfast.base.errors import HoldfastError, NotFound
from holdfast.base.text import first_of
from holdfast.base.threads import in_threads
from holdfast.core.checkpoint.names import (
    ATTEMPT_RE,
    STEP,
    RootKeys,
    Saved,
    manifest_key,
    parse_attempt,
    read_manifest,
    step_prefix,
    verified_attempt,
)
from holdfast.core.format.manifest import MANIFEST_HEAD_BYTES, FileEntry, Manifest
from holdfast.core.store import Store, num_threads_for, read_range


@dataclass(frozen=True, slots=True)
class Step:
    """A committed step; `problem`: why it is incomplete, else None; `manifest` is None if unreadable."""

    step: int
    run: int
    manifest: Manifest | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """Files of a save that no manifest names, after a crash or during a save."""

    step: int
    name: str
    num_files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Listing:
    """A root: steps from oldest to newest, and unreferenced attempts."""

    steps: tuple[Step, ...]
    attempts: tuple[Attempt, ...]

    @property
    def newest_good(self) -> int | None:
        """The step that a restore would take."""
        return next((s.step for s in reversed(self.steps) if s.problem is None), None)


def stated_attempt(store: Store, step: int) -> str | None:
    """The attempt in the beginning of a step's manifest, not verified; None if there is none."""
    try:
        data = read_range(store, manifest_key(step), 0, MANIFEST_HEAD_BYTES + 128)
    except HoldfastError:
        return None
    match = ATTEMPT_RE.match(data)
    return match[1].decode() if match else None


def came_later(attempt: str, than: str) -> bool:
    """True if `attempt` is newer than `than`, of the same run and step: an attempt without a claim is newer
    than a numbered one; of two numbered ones the higher number is."""
    mine, other = parse_attempt(attempt), parse_attempt(than)
    if mine is None or other is None:
        return mine is None and other is not None
    return mine[1] > other[1]


def attempt_of(store: Store, step: int) -> str | None:
    """The attempt of a step's manifest; None if there is no readable manifest."""
    try:
        return verified_attempt(store, step)
    except HoldfastError:
        return None


def survey_root(store: Store) -> Listing:
    """Read every manifest, and list the length of every file."""
    keys, sizes = RootKeys(store), dict(store.entries("steps/"))
    read: dict[int, Manifest | HoldfastError] = {}

    def look(step: int) -> None:
        try:
            read[step] = read_manifest(store, step)
        except HoldfastError as error:
            read[step] = error

    in_threads(look, list(keys.manifests), num_threads_for(store))
    sound = [one for one in read.values() if isinstance(one, Manifest)]
    keys.known.learn(Saved(manifest.run, manifest.step) for manifest in sound)
    steps = tuple(_judge(store, saved, read[saved.step], sizes) for saved in keys.saved)
    return Listing(steps, tuple(_unreferenced(steps, sizes)))


def _judge(
    store: Store, saved: Saved, manifest: Manifest | HoldfastError, sizes: Mapping[str, int]
) -> Step:
    if not isinstance(manifest, Manifest):
        problem = f"manifest.json {saved.problem}" if saved.problem else manifest.message
        return Step(saved.step, saved.run, None, f"damaged manifest: {problem}")
    prefix = step_prefix(saved.step)
    doubtful = (f for f in manifest.objects if sizes.get(prefix + f.path) != f.bytes)
    found = ((f.path, wrong_size(store, manifest, f)) for f in doubtful)
    faults = [f"{path} {fault}" for path, fault in found if fault]
    return Step(saved.step, manifest.run, manifest, "; ".join(first_of(faults, 1)) or None)


def wrong_size(store: Store, manifest: Manifest, file: FileEntry) -> str | None:
    """Describe what is wrong with a file; None if it exists with the stated length."""
    try:
        found = store.size(step_prefix(manifest.step) + file.path)
    except NotFound:
        return "is missing"
    except HoldfastError as error:
        return f"cannot be looked at: {error.message}"
    if found != file.bytes:
        return f"has {found:,} bytes instead of {file.bytes:,}"
    return None


def _unreferenced(steps: tuple[Step, ...], sizes: Mapping[str, int]) -> Iterator[Attempt]:
    named = {step_prefix(s.step) + f.path for s in steps if s.manifest for f in s.manifest.objects}
    unreadable = {s.step for s in steps if s.manifest is None}
    found: dict[tuple[int, str], list[int]] = {}
    for key, size in sizes.items():
        parts = key.split("/")
        if len(parts) < 4 or not re.fullmatch(STEP, parts[1]) or key in named:
            continue
        if int(parts[1]) in unreadable or key == manifest_key(int(parts[1])):
            continue
        found.setdefault((int(parts[1]), parts[2]), []).append(size)
    for (step, name), lengths in sorted(found.items()):
        yield Attempt(step, name, len(lengths), sum(lengths))
