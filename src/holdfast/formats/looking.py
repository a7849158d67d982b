"""Reading checkpoints without torch: `holdfast.open` and `holdfast.steps`."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from holdfast.base.arguments import flag_of, named_step_of, path_of, seconds_of, step_of
from holdfast.base.entry import public
from holdfast.base.errors import Deadline, NotFound, NotRecoverable, Unavailable, UsageError
from holdfast.base.storage_deadlines import bounded
from holdfast.core.checkpoint.lone import root_at
from holdfast.core.checkpoint.names import Known, Saved, committed, seen, steps_text
from holdfast.core.checkpoint.naming import read_named
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.unproved import tell_unreadable
from holdfast.core.store import LocalStore, open_store
from holdfast.formats.read.addresses import located
from holdfast.formats.read.detect import detect, near_path, open_as, split_format, steps_as


@public
def open(
    path: str | os.PathLike[str], *, step: int | str | None = None, verify: bool = True
) -> Checkpoint:
    """Open a step of a root for reading: the newest, `step`, or the one in `path`, as in `runs/gpt@1000`.
    Or the one step whose folder lies at `path` by itself (`steps/0000000025`, copied from a root).

    `step`: a number, a label, `"best"` (the step with that label, else the best by the `Keep(best=)` of the
    last run), or `"newest"`.  `verify=False` leaves digests unchecked.  NotFound or NotRecoverable if there
    is no such step.
    Foreign checkpoints are opened in place, recognised by their files or a prefix (`dcp:PATH`,
    `deepspeed:PATH`, `megatron:PATH`, `huggingface:PATH`, `torch_checkpointing:PATH`, `torch:PATH`).
    """
    url, named = (
        path_of(path, "open", "path"),
        None if step is None else named_step_of(step, "open"),
    )
    flag_of(verify, "open", "verify")
    return bounded(lambda: _open(url, named, verify), "open", url)


def _open(address: str, named: int | str | None, verify: bool) -> Checkpoint:
    url, step = located(address, named)
    found = detect(url)
    if found is not None:
        return open_as(found, url, step)
    try:
        return read_named(
            step,
            lambda: located(address, named)[1],
            lambda n: Checkpoint.open(url, n, verify=verify),
        )
    except NotRecoverable as error:
        error.hint = near_path(url) or error.hint
        raise


class Steps(list[int]):
    """The steps of a root, ascending.  After a run went back, the newest need not be the last."""

    newest: int | None = None
    """The last step of the newest run, of those whose manifest can be read: a restart takes it, unless its
    files are damaged.  Of another system's checkpoint: the one that it names as its last.  None if there is
    none."""


@public
def steps(path: str | os.PathLike[str]) -> Steps:
    """All committed steps, ascending, with the `newest`; empty if the root has none.

    HoldfastWarning if a manifest cannot be read; reads the beginning of each, and all of the newest.
    NotFound if there is no such folder; a bucket has no folders, only keys, so there it is empty.
    """
    url = path_of(path, "steps", "path")
    return bounded(lambda: _steps(url), "look at", url)


@public
def wait_newer(
    path: str | os.PathLike[str],
    than: int | None = None,
    *,
    timeout: float = 600.0,
    poll_s: float = 1.0,
) -> int:
    """Wait until a root has a step that is newer than step `than`; return the newest step.

    Newer is what was saved by a later run, or by the same one with a higher number; if step `than` is
    deleted, a step with a higher number.  None: any step.  The root need not exist yet.  Blocks; looks each
    `poll_s` seconds, by a listing; Deadline, a TimeoutError, after `timeout` seconds.
    """
    call = "wait_newer"
    url, than = path_of(path, call, "path"), None if than is None else step_of(than, call, "than")
    timeout = seconds_of(timeout, call, "timeout", or_zero=True)
    poll_s = seconds_of(poll_s, call, "poll_s")
    if split_format(url)[0]:
        raise UsageError(f"{url} names a foreign checkpoint", hint="give a root of holdfast's")
    store, known, until = open_store(url), Known(), time.monotonic() + timeout
    while True:
        try:
            saved, failed = bounded(lambda: seen(store, known).saved, "look at", url), None
        except Unavailable as error:
            saved, failed = [], error
        newest = _newer(saved, than)
        if newest is not None:
            return newest
        left_s = until - time.monotonic()
        if left_s <= 0:
            wanted = "no step" if than is None else f"no step newer than {than}"
            there = steps_text([s.step for s in saved])
            hint = f"steps there: {there}" if failed is None else str(failed)
            raise Deadline(f"{wanted} in {store.url} after {timeout:g} s", hint=hint)
        time.sleep(min(poll_s, left_s))


def _newer(saved: list[Saved], than: int | None) -> int | None:
    """Return the newest step, if it is newer than `than`."""
    proved = [one for one in saved if one.is_proved]
    if not proved:
        return None
    newest = max(proved)
    before = next((one for one in proved if one.step == than), None)
    is_newer = newest > before if before else than is None or newest.step > than
    return newest.step if is_newer else None


def _steps(url: str) -> Steps:
    foreign = detect(url)
    if foreign is not None:
        found = Steps(steps_as(foreign, url))
        found.newest = found[0] if len(found) == 1 else None
        if len(found) > 1:
            with suppress(NotFound):  # it names no last one
                found.newest = open_as(foreign, url).step
        return found
    store = root_at(url)
    saved = committed(store)
    if not saved and isinstance(store, LocalStore) and not os.path.isdir(store.root):
        raise NotFound(f"no root at {store.url}", hint=near_path(url))
    found = Steps(sorted(s.step for s in saved))
    found.newest = tell_unreadable(store, saved)
    return found
