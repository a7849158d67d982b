"""The optimizer states of another rank, redone here from the gradients that both have.

Under ZeRO-1 with all-reduced gradients every rank has all weights and gradients, but one rank alone the
optimizer states of a parameter.  The rank that keeps a copy of its image need not fetch them at every
snapshot: it has them from an exchange once, and from then on a twin of the optimizer makes the same steps.

Nobody takes the result on trust: what is kept is compared with the digests of the rank whose states they
are, chunk by chunk.  Where the host's arithmetic is not the device's, or somebody wrote to the weights,
the agents exchange that snapshot, and the twin learns from it anew; after `MOST_STRIKES` it gives up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from holdfast.base.errors import UsageError
from holdfast.core.format.manifest import FileEntry, TensorEntry
from holdfast.live.saving.planning import SavePlan
from holdfast.live.state.named import Collected, LiveTensor
from holdfast.live.state.optimizers import named_groups, param_names
from holdfast.live.state.placed import place, torch_dtype
from holdfast.live.state.recognising import State
from holdfast.live.state.wrapped import is_zero1
from holdfast.tiers.memory.replica import image_of, pieces_of
from holdfast.tiers.memory.twin import ParamPart
from holdfast.tiers.memory.twins import Twins

MOST_STRIKES = 3
"""Number of snapshots in a row with another result than the other rank's at which the twin gives
up."""


class RecomputedStates:
    """The optimizer states of another rank that this rank redoes."""

    def __init__(self, optimizers: dict[str, Any], names: Callable[[Any], dict[int, str]]) -> None:
        """`optimizers` by key; `names` of an optimizer's parameters, by id."""
        self.twins = Twins()
        self.tensors: dict[str, LiveTensor] = {}
        """The redone states by full name; another dict each time that they have been learned."""
        self._optimizers = optimizers
        self._names = names
        self._strikes = 0

    def mark(self, number: int) -> None:
        """Mark the point in the training at which the snapshot of that number is taken; on the
        training thread."""
        self.twins.mark(number, self._copy_weights)

    def restart(self) -> None:
        """Drop the twins: the state will be another."""
        self.twins.restart()

    def _copy_weights(self) -> None:
        for twin in self.twins.all:
            twin.copy_weights()

    def learn(
        self, number: int, plan: SavePlan, file: FileEntry, live: Collected, image: memoryview
    ) -> None:
        """Learn the states from the image of the other rank, as it was at that mark; make the twins
        anew if they are of other parameters."""
        wanted: dict[str, tuple[TensorEntry, int, int]] = {}
        layout = image_of(plan, file)
        for entry, box, at, size in pieces_of(plan, layout, file.rank) if layout else ():
            if entry.name not in live.tensors:
                if box.shape != entry.shape:
                    self.twins.end(f"{entry.name} lies on several ranks")
                    return
                wanted[entry.name] = (entry, at, size)
        prefixes = {name[: -len(entry.state)] for name, (entry, _, _) in wanted.items()}
        if prefixes != {part.name for twin in self.twins.all for part in twin.parts}:
            self.twins.make(self._parts(prefixes))
            return

        def states() -> list[list[dict[str, torch.Tensor]]]:
            found: dict[str, dict[str, torch.Tensor]] = {}
            for name, (entry, at, size) in wanted.items():
                value = _read(image[at : at + size], torch_dtype(entry.dtype), entry.shape)
                found.setdefault(name[: -len(entry.state)], {})[entry.state] = value
            return [[found[part.name] for part in twin.parts] for twin in self.twins.all]

        if self.twins.learn(number, states):
            self.tensors = {
                part.name + state: LiveTensor(
                    part.name + state, state, place(value, part.name + state), True, value
                )
                for twin in self.twins.all
                for part, found in zip(twin.parts, twin.states())
                for state, value in found.items()
            }

    def _parts(self, prefixes: set[str]) -> list[tuple[Any, list[ParamPart]]]:
        """Return (optimizer, parts): each optimizer's parameters whose states' names begin with one
        of `prefixes`."""
        found = []
        for key, optimizer in self._optimizers.items():
            groups = [(g, g["params"]) for g in optimizer.param_groups]
            pairs = named_groups(groups, self._names(groups))
            named = [(f"{key}.{name}.", p) for some in pairs for name, p in some]
            parts = [ParamPart(prefix, p) for prefix, p in named if prefix in prefixes]
            if parts:
                found.append((optimizer, parts))
        return found

    def differed(self) -> None:
        """Note that what was redone was not what the other rank had: learn anew, or give up."""
        self._strikes += 1
        if self._strikes < MOST_STRIKES:
            self.twins.forget("it differed")
        else:
            self.twins.end(f"it differed {self._strikes} times in a row: another arithmetic")

    def agreed(self) -> None:
        """Note that what was redone was what the other rank had."""
        self._strikes = 0


def shadow_of(state: State) -> RecomputedStates:
    """Return the shadow for the optimizers whose states each lie on one rank, while all have the
    gradients.

    UsageError if there is none.
    """
    found = {key: value for key, value in state.items() if is_zero1(value)}
    if not found:
        raise UsageError(
            "redundancy='recompute' redoes optimizer states that one rank alone has from gradients that "
            "all ranks have: torch's ZeroRedundancyOptimizer under DDP, which this state does not have",
            hint="choose copy or parity",
        )
    return RecomputedStates(found, lambda groups: param_names(state, groups))


def _read(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with memory of its own."""
    raw = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    return raw.view(dtype).reshape(shape)
