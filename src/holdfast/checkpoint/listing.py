"""Contents of a root: every committed step and whether it is complete, what crashes left behind.

Looks at manifests and at the lengths of files, not at their bytes (`verifying` does that).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.checkpoint.names import Saved, committed, manifest_key, read_manifest, step_prefix
from holdfast.errors import HoldfastError, NotFound
from holdfast.format.manifest import FileEntry, Manifest
from holdfast.store import Store


@dataclass(frozen=True, slots=True)
class Step:
    """A committed step; `problem` says why it is not complete; `manifest` is None if unreadable."""

    step: int
    run: int
    manifest: Manifest | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """Files of a save that no manifest names: a crash, or a save that is under way."""

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


def survey(store: Store) -> Listing:
    """Read every manifest and the length of every file."""
    steps = tuple(_look(store, saved) for saved in committed(store))
    return Listing(steps, tuple(_unreferenced(store, steps)))


def _look(store: Store, saved: Saved) -> Step:
    try:
        manifest = read_manifest(store, saved.step)
    except HoldfastError as error:
        problem = f"manifest.json {saved.problem}" if saved.problem else error.message
        return Step(saved.step, saved.run, None, f"damaged manifest: {problem}")
    found = ((f.path, wrong_size(store, manifest, f)) for f in manifest.files)
    faults = [f"{path} {fault}" for path, fault in found if fault]
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return Step(saved.step, manifest.run, manifest, faults[0] + more if faults else None)


def wrong_size(store: Store, manifest: Manifest, file: FileEntry) -> str | None:
    """Say what is wrong with a file's length; None if it is there and as long as it must be."""
    try:
        found = store.size(step_prefix(manifest.step) + file.path)
    except NotFound:
        return "is missing"
    except HoldfastError as error:
        return f"cannot be looked at: {error.message}"
    if found != file.bytes:
        return f"has {found:,} bytes instead of {file.bytes:,}"
    return None


def _unreferenced(store: Store, steps: tuple[Step, ...]) -> Iterator[Attempt]:
    named = {step_prefix(s.step) + f.path for s in steps if s.manifest for f in s.manifest.files}
    unreadable = {s.step for s in steps if s.manifest is None}
    found: dict[tuple[int, str], list[int]] = {}
    for key in store.list("steps/"):
        parts = key.split("/")
        if len(parts) < 4 or not parts[1].isdigit() or key in named:
            continue
        if int(parts[1]) in unreadable or key == manifest_key(int(parts[1])):
            continue
        try:
            found.setdefault((int(parts[1]), parts[2]), []).append(store.size(key))
        except NotFound:
            continue  # deleted since it was listed
    for (step, name), sizes in sorted(found.items()):
        yield Attempt(step, name, len(sizes), sum(sizes))
