"""Objects that write to weights or optimizer states while they are loaded.

    class Helper:
        def load_state_dict(self, saved): self.model.reset_parameters()

All tensors are read before objects are loaded, so the writes of such an object stay.  A few elements of
each tensor on the host are compared, and the number of parameters that an optimizer has states of.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from holdfast.base.errors import warn_user
from holdfast.base.text import listed
from holdfast.live.state.arrays import raw_array
from holdfast.live.state.named import Prepared
from holdfast.live.state.recognising import State
from holdfast.live.state.writes import corner

_told: set[str] = set()


class WrittenByLoads:
    """Compares the state before and after the load of each object."""

    def __init__(self, live: Prepared, state: State, step: int) -> None:
        self._step = step
        self._views = {
            name: corner(raw_array(part.local))
            for name, t in live.tensors.items()
            for part in t.parts
            if part.local.is_cpu and part.local.numel()
        }
        self._optimizers = {k: v for k, v in state.items() if isinstance(v, Optimizer)}
        self._before = self._seen()

    def _seen(self) -> dict[str, Any]:
        seen: dict[str, Any] = {name: view.tobytes() for name, view in self._views.items()}
        return seen | {f"{k}.state": len(one.state) for k, one in self._optimizers.items()}

    def accept(self, key: str) -> None:
        """Take states that a restore has just put into the optimizer of this key as they are."""
        if (one := self._optimizers.get(key)) is not None:
            self._before[f"{key}.state"] = len(one.state)

    def look(self, by: str) -> None:
        """HoldfastWarning for tensors that the object of the key `by` wrote to while it was loaded."""
        before, self._before = self._before, self._seen()
        names = [name for name, now in self._before.items() if before[name] != now]
        others = [name for name in names if not name.startswith(f"{by}.")]
        if others and by not in _told:
            _told.add(by)
            warn_user(
                f"{by} wrote to {listed(others)} while it was loaded: they are not as step {self._step} "
                "has them; let its load_state_dict() change nothing else, or give it to a call of "
                "holdfast.load of its own, before the others",
                notice="load-writes",
            )
