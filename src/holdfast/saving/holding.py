"""Saves that hold up the training until they are copied, for the window would not be kept.

Two things write to weights with nothing that waits for the copy before:

* *A step in a graph of a device*, as CUDA has them.  A replay calls no hooks, nor does a tensor count its
  writes.  All that can be seen is that the training comes to its next step and no optimizer has called a
  hook since the step before.  A step that a loss scaler skips looks alike, which costs one copy.
* *A forward pass*, as of an embedding with `max_norm`.  It is seen when the first save fails for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.state.live import Live
from holdfast.state.snapshot import first_device

if TYPE_CHECKING:
    from holdfast.saving.operation import SaveOperation
    from holdfast.saving.saver import Saver

MOST_HELD = 3
"""Saves in a row that hold up the training because no hooks are called, before the user is told."""


def is_bypassed(saver: Saver, live: Live) -> bool:
    """True if the next step of an optimizer may be made without waiting for a copy: in a graph, which
    only devices have."""
    has_optimizer = any(kind == "optimizer" for kind, _ in live.kinds.values())
    return saver.gate.is_bypassed and has_optimizer and first_device(live) is not None


def hold(saver: Saver, op: SaveOperation) -> None:
    """Wait on the training thread until all is copied, where that is needed.  Tells the user once, of many
    saves in a row."""
    bypassed, gate = is_bypassed(saver, op.live), saver.gate
    if bypassed or saver.was_written:
        op.window.wait()
    if bypassed and gate.num_held is not None:
        gate.num_held += 1
        if gate.num_held == MOST_HELD:
            gate.num_held = None
            saver.news.append(
                f"each of the last {MOST_HELD} saves held up training until all was copied: no optimizer "
                "called its hooks in the step before, so the next step would not have waited. Steps in a "
                "CUDA graph are the usual reason; this is told once"
            )
