"""Addresses of steps: `URL@STEP`, as in the shell so in Python.

`runs/gpt@1000` is step 1000 of `runs/gpt`, `runs/gpt@best` the step with that label
(`core.checkpoint.naming`).  But the name of a folder may contain `@` too (`gpt@2`): the meaning that exists
is taken, and if both exist, the address is refused.

    open("run@5")        step 5 of run, or the folder run@5: whichever exists
    open("run/@5")       step 5 of run
    open("run@5/")       the folder run@5
"""

from __future__ import annotations

import os
import warnings

from holdfast.base.arguments import names_step, shown, step_of
from holdfast.base.errors import HoldfastError, UsageError
from holdfast.core.checkpoint.lone import root_at
from holdfast.core.checkpoint.names import step_numbers
from holdfast.core.checkpoint.naming import step_named
from holdfast.core.checkpoint.notes import NEWEST
from holdfast.core.store import LocalStore
from holdfast.formats.read.detect import detect, split_format, steps_as
from holdfast.formats.read.folder import OneFile, open_place

_MAX_DIGITS = 40
"""Largest number of digits of a step that is typed; 15 are enough."""


def located(address: str, step: int | str | None = None) -> tuple[str, int | None]:
    """The path or URL in an address, and the number of the step that it or `step` names; None: the newest.

    UsageError if an address can mean two things, or both name a step.  NotFound for a label that does not
    exist, with the labels that do.
    """
    url, named = split_address(address)
    if named is not None and step is not None:
        raise UsageError(
            f"{address[:200]}: the path names step {shown(named)}, and step={shown(step)} is given",
            hint=f"give one of them; for a folder of that name, write {f'{address[:200]}/'!r}",
        )
    return url, _number(url, named if step is None else step)


def _number(url: str, step: int | str | None) -> int | None:
    if not isinstance(step, str):
        return step
    if step == NEWEST:
        return None
    foreign = detect(url)
    if foreign is not None:
        raise UsageError(
            f"{url} is a {foreign} checkpoint, whose steps have no labels: {shown(step)} names none",
            hint="give the number of a step, or 'newest'",
        )
    return step_named(root_at(url), step)


def split_address(address: str) -> tuple[str, int | str | None]:
    """`runs/gpt@1000` -> ("runs/gpt", 1000), `runs/gpt@best` -> ("runs/gpt", "best"); None if no step is
    named.  UsageError if it can mean two things."""
    found = parts_of(address)
    if found is None:
        return address, None
    url, step = found
    if "?" in address and "://" in address:
        return found
    if isinstance(step, int):
        return (address, None) if _is_folder(address, url, step) else found
    if not _is_there(url) or _is_folder(address, url, step):
        return address, None
    if not names_step(step):
        raise UsageError(
            f"{address[:200]}: {shown(step)} is not the number of a step, and no label",
            hint=f"URL@STEP, such as {url[:200]}@1000; `holdfast ls` lists steps",
        )
    return found


def parts_of(address: str) -> tuple[str, int | str] | None:
    """The URL and the step of an address as it is written, whatever exists; None if it can name no step.

    Of a URL with options the step stands before or after these, `s3://bucket/run@5?region=x`.
    """
    if "://" in address and "?" in address:
        place, _, query = address.partition("?")
        for part, other in ((place, f"?{query}"), (query, "")):
            rest, at, word = part.rpartition("@")
            if at and (
                _is_number(word) or (part is place and names_step(word) and "/" not in word)
            ):
                return f"{rest}{other}" if other else f"{place}?{rest}", _step(word)
        return None
    url, at, word = address.rpartition("@")
    if not at or not url or "/" in word:
        return None
    return url, _step(word)


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= _MAX_DIGITS


def _step(word: str) -> int | str:
    return step_of(int(word), "", "step") if _is_number(word) else word


def _is_folder(address: str, url: str, step: int | str) -> bool:
    """Tell whether `address`, which is `url@step`, names a folder or a file instead of a step.  UsageError
    if both exist."""
    if not _is_there(address):
        return False
    a_step = _is_there(url) and _has(url, step)
    a_folder = bool(_steps(address))
    if a_step and a_folder:
        raise UsageError(
            f"{address!r} can mean two things: step {step} of {url!r}, and the checkpoint {address!r}",
            hint=f"write {f'{url}/@{step}'!r} for the step, {f'{address}/'!r} for the other",
        )
    return not a_step


def _is_there(url: str) -> bool:
    """Tell whether anything exists at a path, or in a store of that name."""
    try:
        store = open_place(split_format(url)[1])
    except HoldfastError:
        return False
    if isinstance(store, OneFile):
        return True
    return os.path.lexists(store.root) if isinstance(store, LocalStore) else bool(store.list())


def _has(url: str, step: int | str) -> bool:
    if isinstance(step, int):
        return step in _steps(url)
    try:
        _number(url, step)
    except HoldfastError:
        return False
    return True


def _steps(url: str) -> list[int]:
    """Return the steps at a path; none if there is no checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # who asks warns
        try:
            foreign = detect(url)
            return step_numbers(root_at(url)) if foreign is None else steps_as(foreign, url)
        except HoldfastError:
            return []
