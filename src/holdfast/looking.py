"""Looking at checkpoints without torch: `holdfast.open` and `holdfast.steps`."""

from __future__ import annotations

import os

from holdfast.checkpoint.names import committed
from holdfast.checkpoint.opened import Checkpoint
from holdfast.errors import NotRecoverable
from holdfast.interop.detect import detect, near_path, open_as, steps_as
from holdfast.patience import bounded
from holdfast.store import open_store


def open(
    url: str | os.PathLike[str], step: int | None = None, *, verify: bool = True
) -> Checkpoint:
    """Open step `step`, or the newest, of a root for reading.

    `verify=False` leaves digests unchecked.  NotFound or NotRecoverable if there is no such step.
    Foreign checkpoints are opened where they lie, found by what is there or named by a prefix (`dcp:PATH`,
    `deepspeed:PATH`, `megatron:PATH`, `huggingface:PATH`, `torch:PATH`).
    """
    return bounded(lambda: _open(url, step, verify), "open", os.fspath(url))


def _open(url: str | os.PathLike[str], step: int | None, verify: bool) -> Checkpoint:
    found = detect(url)
    if found is not None:
        return open_as(found, url, step)
    try:
        return Checkpoint.open(os.fspath(url), step, verify=verify)
    except NotRecoverable as error:
        error.hint = near_path(os.fspath(url)) or error.hint
        raise


def steps(url: str | os.PathLike[str]) -> list[int]:
    """All committed steps, ascending; empty if there are none."""
    return bounded(lambda: _steps(url), "look at", os.fspath(url))


def _steps(url: str | os.PathLike[str]) -> list[int]:
    found = detect(url)
    if found is not None:
        return steps_as(found, url)
    return sorted(s.step for s in committed(open_store(os.fspath(url))))
