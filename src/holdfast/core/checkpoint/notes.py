"""The notes of a root: labels and metrics given to steps after their commit.

    steps/notes.json    {"holdfast":1,"labels":{"best":100},"metrics":{"100":{"run":1,"values":...}},...}

A manifest never changes, so later facts on steps are in this one object per root.  It is replaced only if
it is still the object that was read (`Store.put(replacing=)`): of two writers one reads and writes again,
so neither loses the other's labels.  The listing of `steps/` shows whether it exists, without a request.

* *must*: a labelled step is not deleted, and no step is deleted while the notes cannot be read;
* *must*: metrics are stored with the run of the step: another run's step of that number has none of them;
* *must*: a label is not written before its step is committed: `live.saving.labels` keeps it until then.

A removed label stays as null, so that it is also removed from the home behind the root.

Earlier versions wrote a label before its step was committed, and kept the step before by a second label,
`{"best":200,"best (before 200)":100}`.  If a process died in between, both count as ordinary labels: the
second one keeps its step, and the first one is removed if another save of step 200 is committed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any

import msgspec

from holdfast.base.arguments import (
    MAX_LABEL_CHARS,
    MAX_STEP,
    is_label,
    number_of,
    shown,
    text_of,
    unfit,
)
from holdfast.base.errors import Corrupt, Exists, FormatError, NotFound, Unavailable
from holdfast.base.wire import decode_json
from holdfast.core.checkpoint.names import (
    NOTES_KEY,
    RootKeys,
    manifest_key,
    read_head,
    step_numbers,
    steps_text,
)
from holdfast.core.codec.digest import hexdigest, with_seal, without_seal
from holdfast.core.format.manifest import CONTROL
from holdfast.core.store import Store, get_small, put_over
from holdfast.core.store.contract import SMALL_FILE_BYTES, size_at

NEWEST = "newest"
"""The word for the newest step, which no label may be."""
_TRIES = 100
"""Attempts to replace the notes before a writer gives up."""
SECOND_LOOK_S = 1.0
_HINT = (
    f"nothing is deleted until then: put it back, or delete {NOTES_KEY}, and label the steps anew"
)

Metrics = dict[str, float | None]
"""Metrics by name; None for values that are not finite."""


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Metrics of a step of one run."""

    run: int
    values: Metrics


class Notes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The notes of a root."""

    holdfast: int = 1
    labels: dict[str, int | None] = {}
    metrics: dict[Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)], Measured] = {}

    @property
    def live_labels(self) -> dict[str, int]:
        """The step of each label."""
        return {label: step for label, step in self.labels.items() if step is not None}

    @property
    def pinned(self) -> dict[int, list[str]]:
        """The labels of each labelled step."""
        found: dict[int, list[str]] = {}
        for label, step in sorted(self.live_labels.items()):
            found.setdefault(step, []).append(label)
        return found

    def values(self, run: int, step: int) -> Metrics:
        """The metrics noted for a step of a run."""
        noted = self.metrics.get(step)
        return noted.values if noted is not None and noted.run == run else {}


# -- reading and writing --------------------------------------------------------------------------


def read_notes(store: Store) -> Notes:
    """Read the notes of a root; empty if it has none.  Corrupt or FormatError if they are damaged."""
    data = _present(store)
    return Notes() if data is None else decode_notes(data)


def notes_among(keys: RootKeys) -> Notes:
    """Read the notes of a root, if its listed keys include them."""
    is_there = NOTES_KEY in keys.keys or keys.known.has_notes
    return read_notes(keys.store) if is_there else Notes()


def encode_notes(notes: Notes) -> bytes:
    return with_seal(msgspec.json.encode(notes))


def decode_notes(data: bytes) -> Notes:
    """Parse notes.  Corrupt or FormatError."""
    body, expected = without_seal(data)
    if len(data) > SMALL_FILE_BYTES or hexdigest(body) != expected:
        raise Corrupt("the notes of steps are damaged", key=NOTES_KEY, hint=_HINT)
    try:
        notes = decode_json(b"".join((body, b"}")), Notes)
    except msgspec.DecodeError as error:
        raise FormatError(f"the notes of steps: {error}", key=NOTES_KEY, hint=_HINT) from None
    names = [*notes.labels, *(name for one in notes.metrics.values() for name in one.values)]
    for name in filter(CONTROL.search, names):
        said = f"the notes of steps: the name {name!r:.200} has a control character"
        raise FormatError(said, key=NOTES_KEY, hint=_HINT)
    if notes.holdfast != 1:
        raise FormatError(f"notes of version {notes.holdfast}", key=NOTES_KEY, hint=_HINT)
    return notes


def _present(store: Store) -> bytes | None:
    try:
        return get_small(store, NOTES_KEY)
    except NotFound:
        return None


def change(store: Store, edit: Callable[[Notes], Notes]) -> None:
    """Replace the notes by `edit(notes)`.  Blocks; calls `edit` again if another process has replaced the
    notes meanwhile."""
    for _ in range(_TRIES):
        seen = _present(store)
        old = Notes() if seen is None else decode_notes(seen)
        new = edit(old)
        if new == old:
            return
        try:
            put_over(store, NOTES_KEY, encode_notes(new), seen)
            return
        except (Exists, NotFound):
            continue
    raise Unavailable(f"other processes wrote {NOTES_KEY} {_TRIES} times in a row", key=NOTES_KEY)


# -- labels ---------------------------------------------------------------------------------------


def label_of(value: Any, call: str) -> str:
    """Return a label.  UsageError unless it is a short text of one line, and not `newest`."""
    label = _short_text(value, call, "label", "a label such as 'best'")
    if label == NEWEST:
        said = "a label such as 'best'; this word always names the newest step"
        raise unfit(call, "label", label, said, typed=False)
    return label


def _short_text(value: Any, call: str, name: str, what: str) -> str:
    text = text_of(value, call, name, what)
    if not is_label(text):
        what = f"{what}: one line of at most {MAX_LABEL_CHARS} characters"
        raise unfit(call, name, value, what, typed=False)
    return text


def pin(store: Store, step: int, label: str, *, second_look_s: float = 0.0) -> None:
    """Move `label` to a committed step.  NotFound if there is no such step.

    Call only while this process deletes no steps.  Other processes may be deleting the step, so this checks
    again after `second_look_s`.
    """
    _check_committed(store, step)
    change(store, lambda n: with_labels(n, {label: step}))
    if second_look_s:
        time.sleep(second_look_s)
    try:
        _check_committed(store, step)
    except NotFound:
        change(store, lambda n: with_labels(n, {label: None}) if n.labels.get(label) == step else n)
        raise


def unpin(store: Store, label: str) -> bool:
    """Remove a label; False if there is none of that name."""
    if label not in read_notes(store).live_labels:
        return False
    change(store, lambda n: with_labels(n, {label: None}))
    return True


def name_committed(
    store: Store, step: int, given: Collection[str], stale: Collection[str] | None
) -> list[str]:
    """Move the labels `given` to a step that was just committed.  Remove the `stale` labels, which
    belonged to another state of that number (None: all its other labels).  Return the removed labels."""
    taken: list[str] = []

    def edit(notes: Notes) -> Notes:
        others = set(notes.pinned.get(step, ())).difference(given)
        taken[:] = sorted(others if stale is None else others.intersection(stale))
        return with_labels(notes, {**dict.fromkeys(given, step), **dict.fromkeys(taken, None)})

    change(store, edit)
    return taken


def with_labels(notes: Notes, labels: Mapping[str, int | None]) -> Notes:
    """Return the notes with changed labels; None removes a label."""
    return msgspec.structs.replace(notes, labels={**notes.labels, **labels})


def _check_committed(store: Store, step: int) -> None:
    """NotFound, with the steps that exist, unless a step is committed."""
    key = manifest_key(step)
    if size_at(store, key) is None:
        hint = f"steps there: {steps_text(step_numbers(store))}"
        raise NotFound(f"no step {step} in {store.url}", step=step, key=key, hint=hint)


# -- metrics --------------------------------------------------------------------------------------


def metrics_of(given: Any, call: str, name: str = "metrics") -> Metrics:
    """Check metrics and return them as stored: numbers by name.  A value that is not finite becomes None
    and is never the best."""
    what = "a dict of numbers by name, such as {'loss': 0.3}"
    if not isinstance(given, Mapping):
        raise unfit(call, name, given, what)
    if not given:
        raise unfit(call, name, given, f"{what}, and not empty", typed=False)
    found: Metrics = {}
    for key, value in given.items():
        named = _short_text(key, call, name, "names of metrics as text")
        found[named] = _number(value, call, f"{name}[{shown(named)}]")
    return found


def _number(value: Any, call: str, name: str) -> float | None:
    if _is_nan(value):
        return None
    number = float(number_of(value, call, name, "a number", lambda _: True))
    return number if math.isfinite(number) else None


def _is_nan(value: Any) -> bool:
    try:
        return getattr(value, "ndim", 0) == 0 and math.isnan(value)
    except Exception:
        return False


def measure(store: Store, step: int, values: Metrics, *, coming: Mapping[int, int]) -> None:
    """Add metrics to a step.  NotFound if there is no such step and it is not `coming` (runs by step).
    Drops metrics of steps that are gone."""
    there = set(RootKeys(store).manifests) | set(coming)
    run = coming.get(step)
    if run is None:
        _check_committed(store, step)
        saved = read_head(store, step, manifest_key(step))
        run = -1 if saved is None else saved.run

    def edit(notes: Notes) -> Notes:
        kept = {s: m for s, m in notes.metrics.items() if s in there}
        kept[step] = Measured(run, {**notes.values(run, step), **values})
        return msgspec.structs.replace(notes, metrics=kept)

    change(store, edit)


# -- other roots ----------------------------------------------------------------------------------


def carry(
    source: Notes, target: Store, steps: Collection[int], *, replace: bool
) -> tuple[list[str], list[str]]:
    """Copy the notes of `steps` to another root, which has these steps now.  Return the labels of these
    steps there, and the labels that name another step there, which keep it unless `replace`.

    With `replace`, for another home of the same run, removed labels are removed there as well.
    """
    wanted = {label: step for label, step in source.labels.items() if step in steps}
    gone = {label for label, step in source.labels.items() if step is None} if replace else set()
    measured = {step: m for step, m in source.metrics.items() if step in steps}
    left: list[str] = []

    def edit(notes: Notes) -> Notes:
        held = {k for k, s in notes.labels.items() if s is not None}
        left[:] = [k for k, s in wanted.items() if k in held and notes.labels[k] != s]
        set_here = {k: s for k, s in wanted.items() if replace or k not in left}
        labels = {**notes.labels, **set_here, **dict.fromkeys(gone & held, None)}
        return msgspec.structs.replace(notes, labels=labels, metrics={**notes.metrics, **measured})

    if wanted or gone or measured:
        change(target, edit)
    return sorted(set(wanted) - set(left) if not replace else wanted), sorted(left)
