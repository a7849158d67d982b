"""The meaning of `PATH@NUMBER` where a folder has that very name: the step, or the folder.

`runs/gpt@1000` is step 1000 of `runs/gpt`.  But `@` may be in the name of a folder as well (`gpt@2`, a
copy, an experiment of that day), and what lies there decides.  Where both could be meant, neither is taken.

    verify run@5        step 5 of run, or the folder run@5: whichever there is
    verify run/@5       step 5 of run
    verify run@5/       the folder run@5
"""

from __future__ import annotations

import os
import warnings

from holdfast.errors import HoldfastError, UsageError


def is_folder(text: str, url: str, step: int) -> bool:
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
