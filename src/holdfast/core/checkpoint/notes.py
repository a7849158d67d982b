"""The notes on a root's steps, made after they were committed: labels that keep steps, and metrics.

    steps/notes.json    {"holdfast":1,"labels":{"best":100},"metrics":{"100":{"run":1,"values":...}},...}

A manifest is never changed, so what is learned of a step later lies here, in one object for the root.  It
is replaced only while it is the one that was read (`Store.put(replacing=)`): of two writers one reads anew
and writes once more, so neither loses the other's labels.  It lies below `steps/` for the listing of steps
to show it: where nothing is noted, it costs no request.

* *must*: a step that a label names is not deleted, and nothing is deleted while the notes cannot be read;
* *must*: metrics are noted with the run of the step: another run's step of that number has not got them.

* *must*: a label is not written before its step is committed: `live.saving.labels` keeps it until then.

A label that was taken away stays as null, so that it goes in the home behind the root, too.

Earlier versions wrote a label before its step was committed, and kept the step before by a second label,
`{"best":200,"best (before 200)":100}`.  Where a process died and left them so, both are as any other label:
the second one keeps its step, and the first one goes if another save of step 200 is committed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any

import msgspec

from holdfast.base.arguments import MAX_STEP, number_of, shown, text_of, unfit
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
from holdfast.core.codec.digest import hexdigest
from holdfast.core.format.manifest import CONTROL
from holdfast.core.format.sealing import with_seal, without_seal
from holdfast.core.store import Store, get_small
from holdfast.core.store.contract import SMALL_FILE_BYTES

_MOST_CHARS = 100
"""Most characters of a label, and of the name of a metric."""
_TRIES = 100
"""Attempts to replace the notes before a writer gives up, each lost to another writer."""
SECOND_LOOK_S = 1.0
_HINT = (
    f"nothing is deleted until then: put it back, or delete {NOTES_KEY}, and label the steps anew"
)

Metrics = dict[str, float | None]
"""Metrics by name; None is not a number."""


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Metrics that were noted of a step of one run."""

    run: int
    values: Metrics


class Notes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The notes of a root."""

    holdfast: int = 1
    labels: dict[str, int | None] = {}
    metrics: dict[Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)], Measured] = {}

    @property
    def live_labels(self) -> dict[str, int]:
        """The steps that labels name."""
        return {label: step for label, step in self.labels.items() if step is not None}

    @property
    def pinned(self) -> dict[int, list[str]]:
        """The labels of each step that has any."""
        found: dict[int, list[str]] = {}
        for label, step in sorted(self.live_labels.items()):
            found.setdefault(step, []).append(label)
        return found

    def values(self, run: int, step: int) -> Metrics:
        """The metrics that were noted of that run's step."""
        noted = self.metrics.get(step)
        return noted.values if noted is not None and noted.run == run else {}


# -- reading and writing --------------------------------------------------------------------------


def read_notes(store: Store) -> Notes:
    """Read the notes of a root; empty if it has none.  Corrupt or FormatError if they are damaged."""
    data = _present(store)
    return Notes() if data is None else decode_notes(data)


def notes_among(keys: RootKeys) -> Notes:
    """The notes of a root whose keys were listed."""
    is_there = NOTES_KEY in keys.keys or keys.known.has_notes
    return read_notes(keys.store) if is_there else Notes()


def encode_notes(notes: Notes) -> bytes:
    return with_seal(msgspec.json.encode(notes))


def decode_notes(data: bytes) -> Notes:
    """Parse notes.  Corrupt or FormatError if they are not what was written."""
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
    """Write the notes as `edit` makes them of those that are there.  Blocks; it may be called again, of
    notes that another process has written meanwhile."""
    for _ in range(_TRIES):
        seen = _present(store)
        old = Notes() if seen is None else decode_notes(seen)
        new = edit(old)
        if new == old:
            return
        try:
            if seen is None:
                store.put(NOTES_KEY, encode_notes(new), if_absent=True)
            else:
                store.put(NOTES_KEY, encode_notes(new), replacing=seen)
            return
        except (Exists, NotFound):
            continue
    raise Unavailable(f"other processes wrote {NOTES_KEY} {_TRIES} times in a row", key=NOTES_KEY)


# -- labels ---------------------------------------------------------------------------------------


def label_of(value: Any, call: str) -> str:
    """A label: a short text in one line."""
    return _short_text(value, call, "label", "a label such as 'best'")


def _short_text(value: Any, call: str, name: str, what: str) -> str:
    text = text_of(value, call, name, what)
    if len(text) > _MOST_CHARS or not text.isprintable() or not text.strip():
        raise unfit(
            call, name, value, f"{what}: one line of at most {_MOST_CHARS} characters", typed=False
        )
    return text


def pin(store: Store, step: int, label: str, *, second_look_s: float = 0.0) -> None:
    """Let `label` name a committed step, and no other one.  NotFound if there is no such step.

    Called while nobody deletes steps in this process.  `second_look_s`: of other processes nobody knows
    what they are deleting, so look once more after that time.
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
    """Take a label away; False if there was none of that name."""
    if label not in read_notes(store).live_labels:
        return False
    change(store, lambda n: with_labels(n, {label: None}))
    return True


def name_committed(
    store: Store, step: int, given: Collection[str], stale: Collection[str] | None
) -> list[str]:
    """Let the labels `given` name a step that has just been committed.  Take the `stale` ones away, which
    named another state of its number; None: all others that name it.  Return those taken away."""
    taken: list[str] = []

    def edit(notes: Notes) -> Notes:
        others = set(notes.pinned.get(step, ())).difference(given)
        taken[:] = sorted(others if stale is None else others.intersection(stale))
        return with_labels(notes, {**dict.fromkeys(given, step), **dict.fromkeys(taken, None)})

    change(store, edit)
    return taken


def with_labels(notes: Notes, labels: Mapping[str, int | None]) -> Notes:
    """The notes with some labels changed."""
    return msgspec.structs.replace(notes, labels={**notes.labels, **labels})


def _check_committed(store: Store, step: int) -> None:
    """NotFound, with the steps that there are, unless a step is committed."""
    key = manifest_key(step)
    try:
        store.size(key)
    except NotFound:
        hint = f"steps there: {steps_text(step_numbers(store))}"
        raise NotFound(f"no step {step} in {store.url}", step=step, key=key, hint=hint) from None


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
    """Note metrics of a step, beside those that it has.  NotFound if there is no such step, and it is not
    `coming`, which gives the run by step.  What is noted of steps that are gone is dropped."""
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
    """Note in another root what was noted of `steps`, which are there now.  Return the labels that name
    one of them there, and those that name another step there, which they still do unless `replace`.

    With `replace` labels that were taken away go there as well: it is the same run's other home.
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
