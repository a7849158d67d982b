"""The meaning of a target: a root, a step of it, or the checkpoint of another system.

`runs/gpt@1000` is step 1000 of `runs/gpt`.  But `@` may be in the name of a folder as well (`gpt@2`, a
copy, an experiment of that day), and what lies there decides.  Where both could be meant, neither is taken.

    verify run@5        step 5 of run, or the folder run@5: whichever there is
    verify run/@5       step 5 of run
    verify run@5/       the folder run@5
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

from holdfast.arguments import shown, step_of
from holdfast.errors import HoldfastError, UsageError

if TYPE_CHECKING:
    from holdfast.checkpoint.opened import Checkpoint
    from holdfast.store import Store

MAX_DIGITS = 40
"""Most digits of a step that is typed; ten are enough."""


def split_target(text: str) -> tuple[str, int | None]:
    """`runs/gpt@1000` -> ("runs/gpt", 1000); no step: None.  UsageError if it can mean two things."""
    url, at, step = text.rpartition("@")
    if not at or not url:
        return text, None
    if step.isascii() and step.isdigit() and len(step) <= MAX_DIGITS:
        number = step_of(int(step), "", "step")
        return (text, None) if _is_folder(text, url, number) else (url, number)
    if os.path.isdir(url) and not os.path.lexists(text):
        raise UsageError(
            f"{text[:200]}: {shown(step)} is no step",
            hint=f"URL@STEP, such as {url[:200]}@1000; `holdfast ls` lists steps",
        )
    return text, None


def opened(target: str) -> Checkpoint:
    """The step that a target names, ours or foreign."""
    from holdfast.looking import open

    url, step = split_target(target)
    return open(url, step=step)


def own_root(url: str, why: str, hint: str | None = None) -> Store:
    """A root of our own; UsageError for a foreign checkpoint, which says `why` it will not do."""
    from holdfast.interop.detect import detect
    from holdfast.store import open_store

    foreign = detect(url)
    if foreign is not None:
        raise UsageError(f"{url} is a {foreign} checkpoint, which {why}", hint=hint)
    return open_store(url)


def _is_folder(text: str, url: str, step: int) -> bool:
    """True if `text`, which is `url@step`, names a folder (or a file) and no step.  UsageError if both are
    there."""
    if not _is_there(text):
        return False
    a_step = _is_there(url) and step in _steps(url)
    a_folder = bool(_steps(text))
    if a_step and a_folder:
        raise UsageError(
            f"{text!r} can mean two things: step {step} of {url!r}, and the checkpoint {text!r}",
            hint=f"write {f'{url}/@{step}'!r} for the step, {f'{text}/'!r} for the other",
        )
    return not a_step


def _is_there(url: str) -> bool:
    """True if anything lies at a path, or in a store of that name."""
    from holdfast.interop.detect import split
    from holdfast.interop.folder import OneFile, open_place
    from holdfast.store import LocalStore

    try:
        store = open_place(split(url)[1])
    except HoldfastError:
        return False
    if isinstance(store, OneFile):
        return True
    return os.path.lexists(store.root) if isinstance(store, LocalStore) else bool(store.list())


def _steps(url: str) -> list[int]:
    """The steps of whatever lies there; none if it is no checkpoint."""
    from holdfast.looking import steps

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the verb itself tells of what it finds
        try:
            return steps(url)
        except HoldfastError:
            return []
