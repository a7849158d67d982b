"""Keys of a root: where a step's manifest and images lie, and which steps there are.

```
steps/0000001000/manifest.json                       the commit
steps/0000001000/<run>-<attempt>/r00003.safetensors  images of one try of one save
claims/0000000007.json                               run 7 took the root
log/0000000007/...                                   records of run 7 (`delta`)
```
A step exists if and only if its manifest does.  Steps are ordered by (run, step): a run that went back
to step 50 and saved step 60 has made the older run's step 100 history, not the newest state.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from holdfast.errors import (
    Corrupt,
    FormatError,
    HoldfastError,
    NotFound,
    NotRecoverable,
    StoreError,
    UsageError,
)
from holdfast.format.manifest import HEAD_BYTES, Manifest, decode, decode_head, verified
from holdfast.store import Store

FOLDERS = ("steps", "claims", "log")
"""Folders that a root consists of, in which nobody else's files belong."""
_MANIFEST = re.compile(r"steps/(\d{10})(?:/manifest\.json)?")
"""The key of a step's manifest, or of a step that is a link which leads nowhere."""
_LOG = re.compile(
    r"log/(\d{10})/(?:\d{10}-\d{10}/r\d{5,}\.log|plan-[0-9a-f]{16}\.json|r\d{5,}-\d+\.writing)"
)
_SEGMENT = re.compile(r"log/(\d{10})/(\d{10})-(\d{10})/r(\d{5,})\.log")
_ATTEMPT = re.compile(rb'\{"holdfast":\d+,"step":\d+,"run":\d+,"attempt":"([\w.-]+)"', re.ASCII)


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
    if not 0 <= step < 10**10:
        raise UsageError(f"step {step} is not in 0..9999999999")
    return f"steps/{step:010d}/"


def manifest_key(step: int) -> str:
    return step_prefix(step) + "manifest.json"


def run_of_log(key: str) -> int | None:
    """The run that a file below `log/` belongs to; None if it is none of ours (a script's log)."""
    match = _LOG.fullmatch(key)
    return None if match is None else int(match[1])


def parse_segment(key: str) -> tuple[int, int, int, int] | None:
    """Return run, first step, last step and rank of a file of records; None if a key is of none."""
    match = _SEGMENT.fullmatch(key)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]), int(match[4]))


def segments(store: Store, since: int = 0) -> list[str]:
    """Keys of all segments that have records after step `since`."""
    found = []
    for key in store.list("log/"):
        parsed = parse_segment(key)
        if parsed is not None and parsed[2] > since:
            found.append(key)
    return found


def last_recorded(store: Store, run: int, step: int) -> int:
    """The last step after `step` that `run`, or a later run, has recorded, by the names of
    segments; 0 if there is none."""
    found = map(parse_segment, segments(store, step))
    return max((last for of_run, _, last, _ in filter(None, found) if of_run >= run), default=0)


def is_recorded(store: Store, step: int) -> bool:
    """True if some run has recorded the step, by the names of segments."""
    found = filter(None, map(parse_segment, segments(store, step - 1)))
    return any(first <= step for _, first, _, _ in found)


def committed(store: Store) -> list[Saved]:
    """Every committed step, oldest to newest.  One whose manifest's head is damaged counts as the
    oldest of all: it is not proved.  One of a newer format has its place, so that it is noticed."""
    found = []
    for key in store.list("steps/"):
        match = _MANIFEST.fullmatch(key)
        if match is None:
            continue
        try:
            found.append(_head(store, key, int(match[1])))
        except NotFound:
            if key in store.list(key):  # else it was deleted since it was listed
                problem = "is a link that leads nowhere"
                found.append(Saved(-1, int(match[1]), problem))
    return sorted(found)


def _head(store: Store, key: str, step: int) -> Saved:
    data = bytearray(HEAD_BYTES)
    try:
        store.read(key, 0, memoryview(data))
        _, stated, run = decode_head(bytes(data), key)
    except (FormatError, Corrupt):
        return Saved(-1, step, _fault(store, key))
    if stated != step:
        return Saved(-1, step, f"states that it is of step {stated}")
    return Saved(run, step)


def _fault(store: Store, key: str) -> str:
    """Say what is wrong with a manifest whose beginning is not sound."""
    size = store.size(key)
    if not size:
        return "is empty (0 bytes)"
    if size < HEAD_BYTES:
        return f"is cut short ({size} bytes)"
    return f"does not begin as a manifest does ({size:,} bytes)"


def stated_attempt(store: Store, step: int) -> str | None:
    """The attempt that the beginning of a step's manifest states; not verified.  None if it states none."""
    data = bytearray(HEAD_BYTES + 128)
    try:
        store.read(manifest_key(step), 0, memoryview(data))
    except HoldfastError:
        return None
    match = _ATTEMPT.match(data)
    return match[1].decode() if match else None


def verified_attempt(store: Store, step: int) -> str | None:
    """The attempt that a step's manifest names, which is verified but not parsed: it may name very many
    tensors.  NotFound, Corrupt or FormatError as `read_manifest`."""
    key = manifest_key(step)
    match = _ATTEMPT.match(verified(store.get(key), key))
    return match[1].decode() if match else None


def read_manifest(store: Store, step: int) -> Manifest:
    """The manifest of a step.  NotFound with what there is; Corrupt or FormatError if unsound."""
    key = manifest_key(step)
    try:
        manifest = decode(store.get(key), key)
    except NotFound:
        have = [s.step for s in committed(store)]
        raise NotFound(
            f"no step {step} in {store.url}",
            step=step,
            key=key,
            hint=f"steps there: {describe(have)}",
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


def newest_of(saved: list[Saved], url: str) -> int:
    """The newest of the steps of a root.  NotRecoverable if there is none."""
    if not saved:
        raise NotRecoverable(
            f"no checkpoint in {url}", hint="check the path; `holdfast ls` lists steps"
        )
    return max(saved).step


def describe(steps: list[int], most: int = 10) -> str:
    """List steps for a message: the last `most` of them."""
    steps = sorted(steps)
    text = ", ".join(map(str, steps[-most:]))
    return ("..., " if len(steps) > most else "") + (text or "none")
