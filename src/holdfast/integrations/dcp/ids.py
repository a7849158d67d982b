"""Steps of a root, as DCP names checkpoints."""

from __future__ import annotations

import os
import re

from holdfast import errors

_STEP = re.compile(r"(?:(?:global_?)?step[-_]?|iter[-_]?|checkpoint[-_]|ckpt[-_])?(0{0,3}\d{1,15})")
"""Only words for a step are accepted: `model-10` and `optim-10` would overwrite each other."""

CheckpointId = str | int | os.PathLike[str] | None


def step_of_id(checkpoint_id: CheckpointId, root: str) -> int | None:
    """Return the step of a `checkpoint_id`: `"10"`, `10`, `"step-10"`, or `"<root>/10"`; None for None.

    UsageError for anything else: the step would be saved in another place than the id says.
    """
    if checkpoint_id is None:
        return None
    folder, _, name = os.fspath(str(checkpoint_id)).rstrip("/").rpartition("/")
    match = None if isinstance(checkpoint_id, bool) else _STEP.fullmatch(name)
    elsewhere = bool(folder) and folder.rstrip("/") != root.rstrip("/")
    if match is None or elsewhere:
        raise errors.UsageError(
            f"checkpoint_id={checkpoint_id!r:.60} names no step of {root}",
            hint='checkpoint_id is the number of the step: "10"',
        )
    return int(match[1])
