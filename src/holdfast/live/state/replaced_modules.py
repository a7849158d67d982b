"""Restored modules that the script has replaced by fresh modules since.

    ckpt.restore()
    average = ckpt.state["average"] = AveragedModel(model)      begins anew, and the next save has it

A wrapper has the parameters of the module inside, so it is not fresh.  Plain values and containers are as
the script wants them: it has just set them.
"""

from __future__ import annotations

import weakref

from holdfast.base.notices import Notices
from holdfast.live.state.recognising import State, stages


class Taken:
    """The modules that were restored, by their parameters."""

    def __init__(self, state: State) -> None:
        self._params = {
            key: {id(p): weakref.ref(p) for module in modules for p in module.parameters()}
            for key, value in state.items()
            if (modules := stages(value)) is not None
        }

    def tell_exchanged(self, state: State, step: int, notices: Notices) -> None:
        """Tell of each module that was restored from `step` and then replaced by a fresh one."""
        for key, before in self._params.items():
            own = [p for module in stages(state.get(key)) or () for p in module.parameters()]
            if own and before and not any(id(p) in before and before[id(p)]() is p for p in own):
                notices.once(
                    "exchanged",
                    f"{key!r} was restored from step {step}, and the state has a fresh module in its "
                    "place, which the next saves have: put it into the state before restore()",
                    about=key,
                )
