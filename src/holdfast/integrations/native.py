"""Checkpoints that a trainer has saved itself beside the root, as before it was moved to holdfast."""

from __future__ import annotations

from holdfast.errors import warn_user


def tell_newer(step: int, folder: str | None, number: int, how: str) -> None:
    """Tell of a trainer's own checkpoint `folder` that is newer than the step that is restored.  `how`: to
    go on from it."""
    if folder is not None and number > step:
        warn_user(
            f"step {step} is restored, and {folder}, which the trainer has saved itself, is newer: {how} "
            "goes on from it",
            notice="newer-native",
        )
