"""Steps of a root, as DCP names checkpoints."""

from __future__ import annotations

import os
import re

from holdfast.base.arguments import MAX_STEP, shown
from holdfast.base.errors import UsageError

_STEP = re.compile(r"(?:(?:global_?)?step[-_]?|iter[-_]?|checkpoint[-_]|ckpt[-_])?(\d{1,18})")
"""Only words for a step: of `model-10` and `optim-10` one would take the other's place."""

CheckpointId = str | int | os.PathLike[str] | None


def step_of_id(checkpoint_id: CheckpointId, root: str) -> int | None:
    """The step that a `checkpoint_id` means: `"10"`, `10`, `"step-10"`, or `"<root>/10"`; None for none.

    UsageError for anything else, which would go to another place than it says.
    """
    if checkpoint_id is None:
        return None
    folder, _, name = os.fspath(str(checkpoint_id)).rstrip("/").rpartition("/")
    match = None if isinstance(checkpoint_id, bool) else _STEP.fullmatch(name)
    elsewhere = bool(folder) and folder.rstrip("/") != root.rstrip("/")
    if match is None or int(match[1]) > MAX_STEP or elsewhere:
        raise UsageError(
            f"checkpoint_id={shown(checkpoint_id)} names no step of {root}",
            hint='checkpoint_id is the number of the step: "10"',
        )
    return int(match[1])
