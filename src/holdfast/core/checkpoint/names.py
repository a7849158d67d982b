"""Keys of a root: where a step's manifest and images lie, and which steps there are.

```
steps/0000001000/manifest.json                       the commit
steps/0000001000/<run>-<attempt>/r00003.safetensors  images of one try of one save
steps/notes.json                                     labels, and metrics of later evaluations (`notes`)
claims/0000000007.json                               run 7 took the root
log/0000000007/...                                   records of run 7 (`delta`)
```
A step exists if and only if its manifest does.  Steps are ordered by (run, step): a run that went back
to step 50 and saved step 60 has made the older run's step 100 history, not the newest state.

On object storage each look is a request that is paid and waited for.  So one listing serves all that is
done at one time (`RootKeys`), what is to be deleted goes by one request, and the beginning of a manifest,
which has its run, is read once (`Known`):

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
from dataclasses import dataclass, field
from functools import cached_property

from holdfast.base.arguments import MAX_STEP
from holdfast.base.errors import (
    Corrupt,
    FormatError,
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
from holdfast.core.store import Store, delete_many, keys_below, num_threads_for

AND_LOG = ("log/", "steps/")
"""The parts that a restart looks at, and a run with records that tidies up."""
CLAIMED_PARTS = ("claims/", *AND_LOG)
"""The parts that a claim looks at."""
FOLDERS = ("steps", "claims", "log")
"""The folders of a root.  They hold files of holdfast only."""
TOP_NAMES = frozenset({*FOLDERS, "job.json", "tuning.json"})
"""All that holdfast keeps directly below a root."""
STEP = r"(\d{10}|[1-9]\d{10,14})"
"""A step in a key: 10 digits, or as many as it has.  So keys are in the order of their steps only up to
9,999,999,999: whoever needs an order sorts the numbers."""
_MANIFEST = re.compile(rf"steps/{STEP}(?:/manifest\.json)?")
"""The key of a step's manifest, or of a step that is a link which leads nowhere."""
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
    """Number of the run; -1 if the step is not proved: then it is older than all that are."""
    step: int
    problem: str | None = field(default=None, compare=False)
    """The fault in the beginning of its manifest, which says where in time the step stands."""

    @property
    def is_proved(self) -> bool:
        """True if the manifest's beginning is sound.  `read_manifest` tells if all of it is."""
        return self.run >= 0


def step_prefix(step: int) -> str:
    if not 0 <= step <= MAX_STEP:
        raise UsageError(f"step {step} is not in 0..{MAX_STEP}")
    return f"steps/{step:010d}/"


def manifest_key(step: int) -> str:
    return step_prefix(step) + "manifest.json"


def parse_attempt(attempt: str) -> tuple[int, int] | None:
    """Return the run and the number of an attempt; None if it is by a process that took no claim."""
    match = _NUMBERED.fullmatch(attempt)
    return None if match is None else (int(match[1]), int(match[2]))


def run_of_log(key: str) -> int | None:
    """The run that a file below `log/` belongs to; None if it is none of ours (a script's log)."""
    match = _LOG.fullmatch(key)
    return None if match is None else int(match[1])


class Known:
    """The steps that a process has seen or committed, whose manifests' beginnings need not be read again.

    A manifest is replaced by another, and never changed.  While a run's claim is the newest, that run alone
    replaces any; if another process does all the same, what is known of the step is old.  So it only orders
    steps: whoever deletes a step, or restores it, reads its manifest anew.
    """

    def __init__(self) -> None:
        self.last: tuple[int, set[str]] = (-1, set())
        """The step that was committed last, and the keys of its files."""
        self.save_bytes = 0
        """Bytes of a full step, as the last one had; 0 if that is not known."""
        self.has_notes = False
        """True if this process has noted anything of the steps, or seen that there are notes."""
        self.stated: dict[int, tuple[int, object]] = {}
        """What `pruning` has read in manifests, by step, with its run."""
        self._saved: dict[int, Saved] = {}
        self._unsure: set[int] = set()
        """Steps whose commit is under way, or has ended nobody knows how."""

    def begin(self, step: int) -> None:
        """Say that the manifest of a step may be replaced from now on."""
        self._unsure.add(step)
        self._saved.pop(step, None)
        self.stated.pop(step, None)

    def add(self, manifest: Manifest) -> None:
        """Say that a manifest has been committed."""
        prefix = step_prefix(manifest.step)
        self.last = manifest.step, {prefix + file.path for file in manifest.objects}
        self.save_bytes = manifest.total_bytes
        self._saved[manifest.step] = Saved(manifest.run, manifest.step)
        self._unsure.discard(manifest.step)

    def learn(self, saved: Iterable[Saved]) -> None:
        """Remember steps whose manifests have been read."""
        for one in saved:
            if one.is_proved and one.step not in self._unsure:
                self._saved.setdefault(one.step, one)

    def among(self, steps: Iterable[int]) -> dict[int, Saved]:
        """Return the known steps among `steps`, and forget all others: another process deleted them."""
        there, known = set(steps), dict(self._saved)
        for step in known.keys() - there:
            self._saved.pop(step, None)
        return {step: one for step, one in known.items() if step in there}


class RootKeys:
    """The keys of steps, as one listing has shown them, and what they say.

    `below`: what else the listing is to show.  At the end of a block with them, what was marked is deleted:
    nothing that a manifest names.
    """

    def __init__(
        self, store: Store, known: Known | None = None, below: Collection[str] = ("steps/",)
    ) -> None:
        self.store = store
        self.known = known or Known()
        self.sizes = keys_below(store, below)
        """Length of each object, or -1 where it is not known."""
        self.keys = [*self.sizes]
        self.marked: list[str] = []
        """Keys to delete at the end of the block."""
        matches = ((key, _MANIFEST.fullmatch(key)) for key in self.keys)
        self.manifests = {int(match[1]): key for key, match in matches if match}
        """Key of the manifest of each step."""
        self._saved: list[Saved] | None = None

    @property
    def saved(self) -> list[Saved]:
        """Every committed step, oldest to newest.  One whose manifest's head is damaged counts as the
        oldest of all: it is not proved.  One of a newer format has its place, so that it is noticed.

        Reads them once.  No `cached_property`: before Python 3.12 that holds a lock of all roots meanwhile.
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
        """The keys of the images of each step, by the attempt that they are of."""
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
        """Mark what lies in the folder `prefix`, which is listed anew if it is not among the keys; nothing
        in folders within."""
        found = self.below(prefix) or self.store.list(prefix)
        self.mark(key for key in found if "/" not in key.removeprefix(prefix))

    def mark(self, keys: Iterable[str]) -> None:
        """Mark keys for deletion; from now on they count as gone."""
        gone = set(keys)
        self.marked += sorted(gone)
        self.keys = [key for key in self.keys if key not in gone]


MOST_TRIES = 10
"""Attempts to read a root whose steps are deleted between the listing and the read."""


def seen(
    store: Store, known: Known | None = None, below: Collection[str] = ("steps/",)
) -> RootKeys:
    """The keys of a root.  Listed anew while there were steps and all are gone when they are looked at: a
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
    """The numbers of all committed steps, ascending, by the names of their manifests."""
    return sorted(RootKeys(store).manifests)


def read_head(store: Store, step: int, key: str) -> Saved | None:
    """Read run and step from the beginning of a manifest; None if the manifest was deleted meanwhile."""
    data = bytearray(MANIFEST_HEAD_BYTES)
    try:
        store.read(key, 0, memoryview(data))
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
    """Describe the fault of a manifest with a damaged beginning; None if it was deleted meanwhile."""
    try:
        size = store.size(key)
    except NotFound:
        return None
    if not size:
        return "is empty (0 bytes)"
    if size < MANIFEST_HEAD_BYTES:
        return f"is cut short ({size} bytes)"
    return f"does not begin as a manifest does ({size:,} bytes)"


def verified_attempt(store: Store, step: int) -> str | None:
    """The attempt that a step's manifest names, which is verified but not parsed: it may name very many
    tensors.  NotFound, Corrupt or FormatError as `read_manifest`."""
    return attempt_in(store.get(manifest_key(step)), step)


def attempt_in(data: bytes, step: int) -> str | None:
    """The attempt that the manifest with these bytes names, as `verified_attempt`."""
    match = ATTEMPT_RE.match(verified(data, manifest_key(step)))
    return match[1].decode() if match else None


def read_manifest(store: Store, step: int) -> Manifest:
    """The manifest of a step.  NotFound with what there is; Corrupt or FormatError if unsound."""
    key = manifest_key(step)
    try:
        manifest = decode_manifest(store.get(key), key)
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
    return manifest


def check_step(manifest: Manifest, step: int) -> None:
    """Corrupt if a manifest lies under another step's key: somebody has copied a folder."""
    if manifest.step != step:
        key = manifest_key(step)
        raise Corrupt(f"manifest is of step {manifest.step}, not {step}", key=key, step=step)


def steps_text(steps: list[int], most: int = 10) -> str:
    """List steps for a message: the last `most` of them."""
    steps = sorted(steps)
    text = ", ".join(map(str, steps[-most:]))
    return ("..., " if len(steps) > most else "") + (text or "none")
