"""Saves that hold up the training until they are copied, for no optimizer waits for the copy.

A step in a graph of a device, as CUDA has them, calls no hooks when it is replayed, nor does a tensor count
its writes.  All that can be seen is that the training comes to its next step and no optimizer has called a
hook since the step before.  A step that a loss scaler skips looks alike, which costs one copy.
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
"""Saves in a row that hold up the training because no hooks are called, before the user is told."""


def is_bypassed(saver: Saver, live: Collected) -> bool:
    """True if the next step of an optimizer may be made without waiting for a copy: in a graph, which
    only devices have."""
    has_optimizer = any(kind == "optimizer" for kind, _ in live.kinds.values())
    return saver.gate.is_bypassed and has_optimizer and bool(devices_in(live))


def hold_bypassed(saver: Saver, op: SaveOperation) -> bool:
    """Wait on the training thread until all is copied, where that is needed; True if so.  Tells the user
    once, of many saves in a row."""
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
    """Tell the user that much is copied before each save returns."""
    sizes: dict[str, int] = {}
    for (name, _), tensor in saver.aside.items():
        sizes[name] = sizes.get(name, 0) + tensor.nbytes
    names = sorted(sizes, key=sizes.__getitem__, reverse=True)
    told = notice_text(
        "set-aside",
        f"each save copies {size_text(sum(sizes.values()))} before its call returns ({listed(names)}), "
        "since no optimizer of the state moves that: training waits for the copy, and has the memory of "
        "it; if a torch optimizer moves it, add the optimizer to the state",
    )
    if told is not None:
        saver.news.append(told)
