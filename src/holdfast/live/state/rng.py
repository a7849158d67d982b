"""The random number generators of this process: python, numpy, torch on the CPU and on devices."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from holdfast.base.arguments import unfit
from holdfast.base.errors import UsageError, warn_user

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
    devices: list[torch.device] | None = None
    """The devices whose generators it has.  None, or an empty list (a state that is offloaded to the host,
    and computed with on a device): the current one of CUDA, if that is used."""

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": _numpys(),
            "torch": torch.get_rng_state(),
        }
        for kind, devices in self._by_kind().items():
            states = [torch.get_device_module(kind).get_rng_state(device) for device in devices]
            found[kind] = states[0] if len(states) == 1 else states
        return found

    def _by_kind(self) -> dict[str, list[torch.device]]:
        devices = self.devices or _current(is_used=torch.cuda.is_initialized())
        found: dict[str, list[torch.device]] = {}
        for device in devices:
            found.setdefault(device.type, []).append(device)
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not is_of_rng(state):
            raise unfit("Rng.load_state_dict", "state", state, "what state_dict() of an Rng gave")
        self.restored = state
        random.setstate(state["python"])
        _set_numpys(state["numpy"])
        torch.set_rng_state(state["torch"])
        known = self._by_kind()
        if "cuda" in state and not known:  # the model may go there later
            known = {"cuda": _current(is_used=torch.cuda.is_available())}
        for kind, devices in known.items():
            states = state.get(kind)
            if states is None or not devices:
                continue  # saved where there was no such device, or restored where there is none
            states = states if isinstance(states, list) else [states]
            if len(states) != len(devices):
                warn_user(
                    f"rng: the generators of {len(states)} {kind} devices were saved, the state is on "
                    f"{len(devices)}: random numbers of the others are fresh"
                )
            for device, its in zip(devices, states):
                torch.get_device_module(kind).set_rng_state(its, device)


def is_of_rng(state: Any) -> bool:
    """True for what `state_dict()` of an Rng gave, or for its extra."""
    return isinstance(state, dict) and {"python", "numpy", "torch"} <= state.keys()


def _current(*, is_used: bool) -> list[torch.device]:
    """The current device of CUDA, if that is used."""
    return [torch.device("cuda", torch.cuda.current_device())] if is_used else []


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
