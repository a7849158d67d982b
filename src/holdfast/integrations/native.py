"""Checkpoints beside a trainer's steps: saved by the trainer itself before it moved to holdfast, or by
another trainer in the same root."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from holdfast import errors
from holdfast.extend import saved_in


def run_of(root: str, step: int) -> int | None:
    """Return the run that saved a step of a root; None if that is unknown or the root cannot be read."""
    with suppress(errors.HoldfastError):
        saved = saved_in(root, step)
        return saved.run if saved is not None and saved.is_proved else None
    return None


def kept_by(trainer: str, extras: Mapping[str, Any], name: str, step: int) -> dict[str, Any]:
    """Return the extra `name`, which a trainer saves in each of its steps.  UsageError for other steps."""
    own = extras.get(name)
    if isinstance(own, dict):
        return own
    raise errors.UsageError(
        f"step {step} was not saved by {trainer}: there is no {name!r} in it",
        hint="give each training a root of its own; holdfast.load(root, {...}) takes weights from any step",
    )


def tell_newer(step: int, folder: str | None, number: int, how: str) -> None:
    """Give a notice if a trainer's own checkpoint, `folder` of step `number`, is newer than the restored
    step.  `how`: the call that goes on from the folder."""
    if folder is not None and number > step:
        errors.warn_user(
            f"step {step} is restored, but {folder}, which the trainer itself has saved, is newer: {how} "
            "goes on from that",
            notice="newer-native",
        )
