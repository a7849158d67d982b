"""The random number generators of this process: python, numpy, torch on the CPU and on devices."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from holdfast.arguments import unfit
from holdfast.errors import UsageError

USUAL = "MT19937"
"""The bit generator that numpy's global functions draw from, unless a script has set another."""


class Rng:
    """All generators as one stateful object; a `Checkpointer` adds one under the key `rng`.

    Every rank's generators are its own.  On another number of ranks they stay as the script seeded
    them (`fresh`): copying rank 0's to all would make dropout masks and noise repeat.
    """

    on_resize = "fresh"
    restored: dict[str, Any] | None = None
    """The states that were put back last."""

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": _numpys(),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["cuda"] = torch.cuda.get_rng_state()
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict) or not {"python", "numpy", "torch"} <= state.keys():
            raise unfit("Rng.load_state_dict", "state", state, "what state_dict() of an Rng gave")
        self.restored = state
        random.setstate(state["python"])
        _set_numpys(state["numpy"])
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


def _numpys() -> list[Any] | dict[str, Any]:
    """The state of numpy's global generator: of the usual kind as a list, of another one as its dict."""
    state: dict[str, Any] = dict(np.random.get_state(legacy=False))
    kind = state["bit_generator"]
    if kind == USUAL:
        name, keys, *rest = np.random.get_state()
        return [name, np.asarray(keys), *rest]
    if not hasattr(np.random, kind):
        raise UsageError(
            f"rng: numpy.random draws from a {kind}, which is not numpy's, and cannot be saved",
            hint="give numpy.random.set_bit_generator() one of numpy's own",
        )
    return state


def _set_numpys(state: list[Any] | dict[str, Any]) -> None:
    """Set numpy's global generator, to one of the kind that was saved."""
    kind = state["bit_generator"] if isinstance(state, dict) else USUAL
    if np.random.get_state(legacy=False)["bit_generator"] != kind:
        np.random.set_bit_generator(getattr(np.random, kind)())  # type: ignore[attr-defined]
    np.random.set_state(state if isinstance(state, dict) else tuple(state))
