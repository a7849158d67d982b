"""Saves that block training until they are copied, because no optimizer waits for the copy.

A replayed CUDA graph calls no hooks of the optimizer's step in it, and its writes change no version
counter. The only sign is that training comes to its next step and no optimizer has called a hook since the
step before. A step that a loss scaler skips looks the same, which costs one blocking copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.base.errors import notice_text
from holdfast.base.sizes import size_text
from holdfast.base.text import listed
from holdfast.live.state.devices import devices_in
from holdfast.live.state.named import Collected

if TYPE_CHECKING:
    from holdfast.live.saving.operation import SaveOperation
    from holdfast.live.saving.saver import Saver

MOST_HELD = 3
"""Number of such saves in a row after which the user is warned."""


def is_bypassed(saver: Saver, live: Collected) -> bool:
    """True if the next optimizer step may not wait for the copy: it may be in a graph, which only devices
    have."""
    has_optimizer = any(kind == "optimizer" for kind, _ in live.kinds.values())
    return saver.gate.is_bypassed and has_optimizer and bool(devices_in(live))


def hold_bypassed(saver: Saver, op: SaveOperation) -> bool:
    """If `is_bypassed`, block the training thread until all is copied, and return True.  Warns once, after
    `MOST_HELD` such saves in a row."""
    bypassed, gate = is_bypassed(saver, op.live), saver.gate
    if bypassed:
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
    return bypassed


def tell_set_aside(saver: Saver) -> None:
    """Give the notice that much is copied before each save returns."""
    sizes: dict[str, int] = {}
    for (name, _), tensor in saver.aside.items():
        sizes[name] = sizes.get(name, 0) + tensor.nbytes
    names = sorted(sizes, key=sizes.__getitem__, reverse=True)
    told = notice_text(
        "set-aside",
        f"each save copies {size_text(sum(sizes.values()))} before its call returns ({listed(names)}), "
        "because no optimizer of the state steps these tensors: training waits for the copy, which takes "
        "as much memory; if a torch optimizer steps them, add it to the state",
    )
    if told is not None:
        saver.news.append(told)
