"""Keys of a root: its manifests, images, records, claims and notes, and the steps that exist.

```
steps/0000001000/manifest.json                       the commit
steps/0000001000/<run>-<attempt>/r00003.safetensors  images of one try of one save
steps/notes.json                                     labels, and metrics of later evaluations (`notes`)
claims/0000000007.json                               run 7 took the root
log/0000000007/...                                   records of run 7 (`tiers.records`)
```
A step exists if and only if its manifest does.  Steps are ordered by (run, step): if a run went back to
step 50 and saved step 60, that step is newer than the older run's step 100.

On object storage each look-up is a request that costs time and money.  So one listing serves all uses at
one time (`RootKeys`), deletions are collected into one request, and the beginning of each manifest, which
states its run, is read once (`Known`):

    known = Known()                        # of a run: what it has read and committed
    with RootKeys(store, known, AND_LOG) as keys:            # one request: steps/ and log/
        keys.saved                         # a request for each manifest that is not known yet
        keys.attempts                      # none
        keys.marked += keys.below("log/")  # none
                                           # one request: deletes what is marked
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

from holdfast.base.arguments import MAX_STEP
from holdfast.base.errors import (
    Corrupt,
    FormatError,
    HoldfastError,
    NotFound,
    StoreError,
    UsageError,
)
from holdfast.base.threads import in_threads
from holdfast.core.format.manifest import (
    MANIFEST_HEAD_BYTES,
    Manifest,
    decode_head,
    decode_manifest,
    verified,
)
from holdfast.core.store import Store, delete_many, keys_below, num_threads_for, read_range
from holdfast.core.store.contract import size_at

AND_LOG = ("log/", "steps/")
"""The parts of a root that a restart, and tidying with records, list."""
CLAIMED_PARTS = ("claims/", *AND_LOG)
"""The parts of a root that a claim lists."""
FOLDERS = ("steps", "claims", "log")
"""The folders of a root, which hold only holdfast's files."""
TOP_NAMES = frozenset({*FOLDERS, "job.json", "tuning.json"})
"""All names that holdfast uses directly below a root."""
STEP = r"(\d{10}|[1-9]\d{10,14})"
"""A step in a key: 10 digits or more, so keys sort like their steps only up to 9,999,999,999."""
_MANIFEST = re.compile(rf"steps/{STEP}(?:/manifest\.json)?")
"""Matches the key of a step's manifest, or a step that is a link without a target."""
_IMAGE = re.compile(rf"steps/{STEP}/([^/]+)/[^/]+")
_NUMBERED = re.compile(r"(\d{4,})-(\d{6,})")
_LOG = re.compile(
    rf"log/(\d{{10}})/(?:{STEP}-{STEP}/r\d{{5,}}\.log|plan-[0-9a-f]{{16}}\.json|r\d{{5,}}-\d+\.writing)"
)
ATTEMPT_RE = re.compile(rb'\{"holdfast":\d+,"step":\d+,"run":\d+,"attempt":"([\w.-]+)"', re.ASCII)

NOTES_KEY = "steps/notes.json"
"""Labels and metrics of a root's steps; see `notes`."""


@dataclass(frozen=True, slots=True, order=True)
class Saved:
    """A committed step; ordered oldest to newest."""

    run: int
    """Number of the run; -1 if the step is not proved, which makes it older than all proved steps."""
    step: int
    problem: str | None = field(default=None, compare=False)
    """What is wrong with the beginning of the manifest, which states the step's order; None if sound."""

    @property
    def is_proved(self) -> bool:
        """True if the manifest's beginning is sound; `read_manifest` checks all of it."""
        return self.run >= 0


def step_prefix(step: int) -> str:
    if not 0 <= step <= MAX_STEP:
        raise UsageError(f"step {step} is not in 0..{MAX_STEP}")
    return f"steps/{step:010d}/"


def manifest_key(step: int) -> str:
    return step_prefix(step) + "manifest.json"


def parse_attempt(attempt: str) -> tuple[int, int] | None:
    """Return the run and the number of an attempt; None if it was made without a claim."""
    match = _NUMBERED.fullmatch(attempt)
    return None if match is None else (int(match[1]), int(match[2]))


def run_of_log(key: str) -> int | None:
    """The run of a file below `log/`; None if it is not holdfast's (a script's log)."""
    match = _LOG.fullmatch(key)
    return None if match is None else int(match[1])


class Known:
    """Cache of the steps that a process has seen or committed.

    Only the run with the newest claim should replace manifests, but another process may do so all the same.
    So the cache only orders steps: read the manifest again before deleting or restoring a step.
    """

    def __init__(self) -> None:
        self.last: tuple[int, set[str]] = (-1, set())
        """The last committed step, and the keys of its files."""
        self.save_bytes = 0
        """Bytes of the last full step; 0 if unknown."""
        self.has_notes = False
        """True if this process has written or seen notes."""
        self.stated: dict[int, tuple[int, object]] = {}
        """Run and facts from manifests that `pruning` has read, by step."""
        self._saved: dict[int, Saved] = {}
        self._unsure: set[int] = set()
        """Steps whose commit is under way, or has an unknown result."""

    def begin(self, step: int) -> None:
        """Record that a commit of a step begins."""
        self._unsure.add(step)
        self._saved.pop(step, None)
        self.stated.pop(step, None)

    def add(self, manifest: Manifest) -> None:
        """Record that a manifest was committed."""
        prefix = step_prefix(manifest.step)
        self.last = manifest.step, {prefix + file.path for file in manifest.objects}
        self.save_bytes = manifest.total_bytes
        self._saved[manifest.step] = Saved(manifest.run, manifest.step)
        self._unsure.discard(manifest.step)

    def learn(self, saved: Iterable[Saved]) -> None:
        """Add steps whose manifests were read."""
        for one in saved:
            if one.is_proved and one.step not in self._unsure:
                self._saved.setdefault(one.step, one)

    def among(self, steps: Iterable[int]) -> dict[int, Saved]:
        """Return the known steps among `steps`; forget all other steps, which were deleted."""
        there, known = set(steps), dict(self._saved)
        for step in known.keys() - there:
            self._saved.pop(step, None)
        return {step: one for step, one in known.items() if step in there}


class RootKeys:
    """The keys of a root from one listing, of the prefixes `below`.

    As a context manager it deletes the marked keys at the end of the block; mark no key that a manifest
    names.
    """

    def __init__(
        self, store: Store, known: Known | None = None, below: Collection[str] = ("steps/",)
    ) -> None:
        self.store = store
        self.known = known or Known()
        self.sizes = keys_below(store, below)
        """Length of each object by key; -1 if unknown."""
        self.keys = [*self.sizes]
        self.marked: list[str] = []
        """Keys to delete at the end of the block."""
        matches = ((key, _MANIFEST.fullmatch(key)) for key in self.keys)
        self.manifests = {int(match[1]): key for key, match in matches if match}
        """Key of each step's manifest, by step."""
        self._saved: list[Saved] | None = None

    @property
    def saved(self) -> list[Saved]:
        """Every committed step, oldest to newest.  Steps with a damaged beginning of the manifest are not
        proved, and come first.  Steps of a newer format have their place.

        Reads manifests once.  Not a `cached_property`, which before Python 3.12 locks across all roots.
        """
        if self._saved is None:
            self._saved = self._read()
        return self._saved

    def _read(self) -> list[Saved]:
        found: dict[int, Saved | None] = {**self.known.among(self.manifests)}

        def look(step: int) -> None:
            found[step] = read_head(self.store, step, self.manifests[step])

        unknown = [step for step in self.manifests if step not in found]
        in_threads(look, unknown, num_threads_for(self.store))
        saved = sorted(filter(None, found.values()))
        self.known.learn(saved)
        return saved

    @cached_property
    def attempts(self) -> dict[int, dict[str, list[str]]]:
        """Keys of images by step and attempt."""
        found: dict[int, dict[str, list[str]]] = {}
        for key in self.keys:
            if match := _IMAGE.fullmatch(key):
                found.setdefault(int(match[1]), {}).setdefault(match[2], []).append(key)
        return found

    def __enter__(self) -> RootKeys:
        return self

    def __exit__(self, *_: object) -> None:
        delete_many(self.store, self.marked)

    def below(self, prefix: str) -> list[str]:
        """Return the listed keys that begin with `prefix`."""
        return [key for key in self.keys if key.startswith(prefix)]

    def mark_below(self, prefix: str) -> None:
        """Mark the files of the folder `prefix`, but not of folders within it.  Lists the folder if it is
        not among the keys."""
        found = self.below(prefix) or self.store.list(prefix)
        self.mark(key for key in found if "/" not in key.removeprefix(prefix))

    def mark(self, keys: Iterable[str]) -> None:
        """Mark keys for deletion; from now on they count as deleted."""
        gone = set(keys)
        self.marked += sorted(gone)
        self.keys = [key for key in self.keys if key not in gone]


MOST_TRIES = 10
"""Most attempts to read a root whose steps are deleted between listing and reading."""


def seen(
    store: Store, known: Known | None = None, below: Collection[str] = ("steps/",)
) -> RootKeys:
    """List the keys of a root.  Lists again if all listed steps are gone when their manifests are read: a
    run that keeps one step has saved another."""
    keys = RootKeys(store, known, below)
    for _ in range(MOST_TRIES):
        if keys.saved or not keys.manifests:
            break
        keys = RootKeys(store, known, below)
    return keys


def committed(store: Store) -> list[Saved]:
    """Every committed step, as `RootKeys.saved`."""
    return seen(store).saved


def step_numbers(store: Store) -> list[int]:
    """The numbers of all committed steps, ascending, from the keys of manifests."""
    return sorted(RootKeys(store).manifests)


def read_head(store: Store, step: int, key: str) -> Saved | None:
    """Read run and step from the beginning of a manifest; None if it was deleted meanwhile."""
    try:
        data = read_range(store, key, 0, MANIFEST_HEAD_BYTES)
        _, stated, run = decode_head(bytes(data), key)
    except NotFound:
        return Saved(-1, step, "is a link that leads nowhere") if key in store.list(key) else None
    except (FormatError, Corrupt):
        fault = _fault(store, key)
        return None if fault is None else Saved(-1, step, fault)
    if stated != step:
        return Saved(-1, step, f"states that it is of step {stated}")
    return Saved(run, step)


def _fault(store: Store, key: str) -> str | None:
    """Describe what is wrong with a manifest's beginning; None if it was deleted meanwhile."""
    size = size_at(store, key)
    if size is None:
        return None
    if not size:
        return "is empty (0 bytes)"
    if size < MANIFEST_HEAD_BYTES:
        return f"is cut short ({size} bytes)"
    return f"does not begin as a manifest does ({size:,} bytes)"


def verified_attempt(store: Store, step: int) -> str | None:
    """The attempt of a step's manifest, which is verified but not parsed, as it may be large.  NotFound,
    Corrupt or FormatError as `read_manifest`."""
    return _attempt(store.get(manifest_key(step)), step)


def attempt_in(data: bytes, step: int) -> str | None:
    """The attempt in the bytes of a manifest; None if they are not sound."""
    with suppress(HoldfastError):
        return _attempt(data, step)
    return None


def _attempt(data: bytes, step: int) -> str | None:
    match = ATTEMPT_RE.match(verified(data, manifest_key(step)))
    return match[1].decode() if match else None


def read_manifest(store: Store, step: int) -> Manifest:
    """Read the manifest of a step.  NotFound lists the steps that exist; Corrupt or FormatError."""
    return manifest_with_bytes(store, step)[0]


def manifest_with_bytes(store: Store, step: int) -> tuple[Manifest, bytes]:
    """`read_manifest`, with the bytes that were read."""
    key = manifest_key(step)
    try:
        data = store.get(key)
        manifest = decode_manifest(data, key)
    except NotFound:
        raise NotFound(
            f"no step {step} in {store.url}",
            step=step,
            key=key,
            hint=f"steps there: {steps_text(step_numbers(store))}",
        ) from None
    except (FormatError, StoreError) as error:
        error.step = step
        raise
    check_step(manifest, step)
    return manifest, data


def check_step(manifest: Manifest, step: int) -> None:
    """Corrupt if a manifest lies under another step's key, as in a copied folder."""
    if manifest.step != step:
        key = manifest_key(step)
        raise Corrupt(f"manifest is of step {manifest.step}, not {step}", key=key, step=step)


def steps_text(steps: list[int], most: int = 10) -> str:
    """List steps for a message: the last `most` of them."""
    steps = sorted(steps)
    text = ", ".join(map(str, steps[-most:]))
    return ("..., " if len(steps) > most else "") + (text or "none")
