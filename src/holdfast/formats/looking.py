"""Reading checkpoints without torch: `holdfast.open` and `holdfast.steps`."""

from __future__ import annotations

import os

from holdfast.base.arguments import flag_of, path_of, step_of
from holdfast.base.errors import NotRecoverable
from holdfast.base.storage_deadlines import bounded
from holdfast.core.checkpoint.names import committed
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.unproved import tell_unreadable
from holdfast.core.store import open_store
from holdfast.formats.read.detect import detect, near_path, open_as, steps_as


def open(
    path: str | os.PathLike[str], *, step: int | None = None, verify: bool = True
) -> Checkpoint:
    """Open step `step`, or the newest, of a root for reading.

    `verify=False` leaves digests unchecked.  NotFound or NotRecoverable if there is no such step.
    Foreign checkpoints are opened in place, recognised by their files or a prefix (`dcp:PATH`,
    `deepspeed:PATH`, `megatron:PATH`, `huggingface:PATH`, `torch_checkpointing:PATH`, `torch:PATH`).
    """
    url, step = path_of(path, "open", "path"), None if step is None else step_of(step, "open")
    flag_of(verify, "open", "verify")
    return bounded(lambda: _open(url, step, verify), "open", url)


def _open(url: str, step: int | None, verify: bool) -> Checkpoint:
    found = detect(url)
    if found is not None:
        return open_as(found, url, step)
    try:
        return Checkpoint.open(url, step, verify=verify)
    except NotRecoverable as error:
        error.hint = near_path(url) or error.hint
        raise


def steps(path: str | os.PathLike[str]) -> list[int]:
    """All committed steps, ascending; empty if there are none.

    HoldfastWarning if a manifest cannot be read; reads the beginning of each, and all of the newest.
    """
    url = path_of(path, "steps", "path")
    return bounded(lambda: _steps(url), "look at", url)


def _steps(url: str) -> list[int]:
    found = detect(url)
    if found is not None:
        return steps_as(found, url)
    store = open_store(url)
    saved = committed(store)
    tell_unreadable(store, saved)
    return sorted(s.step for s in saved)
