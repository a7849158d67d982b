"""The optimizer states of another rank, recomputed here from the gradients that both have.

Under ZeRO-1 with all-reduced gradients every rank has all weights and gradients, but only one rank has the
optimizer states of a parameter.  The rank that keeps a copy of that rank's image need not fetch them at
every snapshot: agents exchange them once, and from then on a twin of the optimizer makes the same steps.

At every snapshot the result is compared, chunk by chunk, with the digests of the rank that has the states.
If the host computes in another way than the device, or somebody wrote to the weights, the agents exchange
that snapshot, and the twin learns from it anew; after `MOST_DIFFERENCES` in a row it gives up.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from holdfast.base.errors import UsageError
from holdfast.core.format.manifest import FileEntry, TensorEntry, owner_of
from holdfast.live.saving.planning import SavePlan
from holdfast.live.state.named import Collected, LiveTensor
from holdfast.live.state.optimizer_wrappers import is_zero1
from holdfast.live.state.optimizers import check_exact
from holdfast.live.state.placed import place, torch_dtype
from holdfast.live.state.recognising import State
from holdfast.tiers.memory.replica import image_of, pieces_of
from holdfast.tiers.memory.twin import ParamPart, named_params
from holdfast.tiers.memory.twins import Twins

MOST_DIFFERENCES = 3
"""Number of snapshots in a row with another result than the other rank's, after which the twin
gives up."""


class RecomputedStates:
    """The optimizer states of another rank that this rank recomputes."""

    def __init__(self, state: State, optimizers: dict[str, Any]) -> None:
        """`optimizers`: those of the state whose states are recomputed, by key."""
        self.twins = Twins()
        self.tensors: dict[str, LiveTensor] = {}
        """The recomputed states by full name; another dict each time that they have been learned."""
        self._state = state
        self._optimizers = optimizers
        self._num_differences = 0

    def mark(self, number: int) -> None:
        """Mark the point in the training at which the snapshot of that number is taken; on the
        training thread."""
        self.twins.mark(number, self._copy_weights)

    def restart(self) -> None:
        """Drop the twins, as the state is going to be replaced."""
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
        prefixes = {_prefix(entry) for entry, _, _ in wanted.values()}
        if prefixes != {part.name for twin in self.twins.all for part in twin.parts}:
            self.twins.make(self._parts(prefixes))
            return

        def states() -> list[list[dict[str, torch.Tensor]]]:
            found: dict[str, dict[str, torch.Tensor]] = {}
            for entry, at, size in wanted.values():
                value = _read(image[at : at + size], torch_dtype(entry.dtype), entry.shape)
                found.setdefault(_prefix(entry), {})[entry.state] = value
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
        for key, optimizer, pairs in named_params(self._state, self._optimizers):
            named = [(f"{key}.{name}.", p) for name, p in pairs]
            parts = [ParamPart(prefix, p) for prefix, p in named if prefix in prefixes]
            if parts:
                found.append((optimizer, parts))
        return found

    def differed(self) -> None:
        """Note that the recomputed states were not the other rank's: learn anew, or give up."""
        self._num_differences += 1
        if self._num_differences < MOST_DIFFERENCES:
            self.twins.forget("it differed")
        else:
            times = f"{self._num_differences} times in a row"
            self.twins.end(f"it differed {times}: device and host compute differently")

    def agreed(self) -> None:
        """Note that the recomputed states were the other rank's."""
        self._num_differences = 0


def _prefix(entry: TensorEntry) -> str:
    """The beginning of the names of all states of a parameter."""
    return f"{owner_of(entry.name, entry.state)}."


def recomputed_states(state: State) -> RecomputedStates:
    """Return the recomputed states for the optimizers whose states each lie on one rank, while all
    ranks have the gradients.

    UsageError if there is no such optimizer.
    """
    check_exact(state, "redundancy='recompute'")
    found = {key: value for key, value in state.items() if is_zero1(value)}
    if not found:
        raise UsageError(
            "redundancy='recompute' needs torch's ZeroRedundancyOptimizer under DDP, which this state does "
            "not have: there all ranks have the gradients, but only one has the states of a parameter",
            hint="choose copy or parity",
        )
    return RecomputedStates(state, found)


def _read(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with memory of its own."""
    raw = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    return raw.view(dtype).reshape(shape)
