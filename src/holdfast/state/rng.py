"""The random number generators of this process: python, numpy, torch on the CPU and on devices."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from holdfast.arguments import unfit


class Rng:
    """All generators as one stateful object; a `Checkpointer` adds one under the key `rng`.

    Every rank's generators are its own.  On another number of ranks they stay as the script seeded
    them (`fresh`): copying rank 0's to all would make dropout masks and noise repeat.
    """

    on_resize = "fresh"
    restored: dict[str, Any] | None = None
    """The states that were put back last."""

    def state_dict(self) -> dict[str, Any]:
        kind, keys, *rest = np.random.get_state()
        found: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": [kind, np.asarray(keys), *rest],
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
        np.random.set_state(tuple(state["numpy"]))
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
