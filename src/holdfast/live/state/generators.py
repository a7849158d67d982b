"""Random number generators in attributes, whose states no step has; and states of generators in general.

    class Noisy(nn.Module):
        def __init__(self):
            self.noise = torch.Generator().manual_seed(1)        a restart draws from the seed again

A generator that draws between two saves is told of, unless the checkpoint has its state elsewhere: in the
object's own `state_dict()`, in another object of the state, or in a plain value.  A generator that is
seeded or made anew, as for each step, is not told of.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.base.errors import need
from holdfast.live.state.customised import named_entries
from holdfast.live.state.recognising import State, is_loader, is_optimizer, is_stateful, stages

GENERATOR_TYPES = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""Types of generators whose states can be read and set."""
MAX_GENERATORS = 16
"""Most generators that are watched: reading a state takes 10 to 130 microseconds at each save."""
MOST_VALUES = 1024
"""Most values of a container that are compared: the state of Python's generator has 625."""
MOST_BYTES = 1 << 14
"""Size of the largest array that is compared: the state of torch's generator has 5056 bytes."""
DISTINCTIVE = 1024
"""Least number that tells a generator's state from other values; smaller numbers are everywhere."""


def generator_state(generator: Any) -> Any:
    """Return the state of a generator, for `set_generator_state`."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def set_generator_state(generator: Any, state: Any) -> None:
    """Set the state of a generator."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


class OwnGenerators:
    """Generators in attributes of a state's modules and objects, and their states at the last save."""

    def __init__(self, owners: Iterable[tuple[str, Any]]) -> None:
        """`owners`: (name, object) pairs that may have generators."""
        found = [
            (where, owner, name, value)
            for where, owner in owners
            for name, value in list(owner.__dict__.items())
            if type(value) in GENERATOR_TYPES and not _is_default(value)
        ]
        self._kept = found[:MAX_GENERATORS]
        self._states: list[Any] = []

    def drawn(self, state: State) -> list[str]:
        """Names of generators that have drawn since the last save and whose states nothing saves."""
        now = [
            (id(owner.__dict__.get(name)), _seed_of(one), _mark_of(one))
            for _, owner, name, one in self._kept
        ]
        before, self._states = self._states, now
        moved = [
            kept
            for kept, (who, seed, mark), was in zip(self._kept, now, before)
            if was[:2] == (who, seed) == (id(kept[3]), seed) and was[2] != mark
        ]
        if not moved:
            return []
        self._kept, self._states = [one for one in self._kept if one not in moved], []  # told once
        saved = set(_saved_in(state))
        return [
            f"{where}.{name}"
            for where, owner, name, one in moved
            if not _large(generator_state(one)) <= (saved | set(_leaves(_saved_of(owner))))
        ]


def _is_default(generator: Any) -> bool:
    """True for the generators of this process, which `Rng` has."""
    of_python, of_numpy = need("Python", random, "_inst"), need("numpy", np.random.mtrand, "_rand")
    known = (torch.default_generator, *of_python, *of_numpy, *torch.cuda.default_generators)
    return any(generator is one for one in known)


def _seed_of(generator: Any) -> int | None:
    return generator.initial_seed() if isinstance(generator, torch.Generator) else None


def _mark_of(generator: Any) -> Any:
    """Return a value that differs when a generator has drawn."""
    state = generator_state(generator)
    return state if isinstance(generator, random.Random) else list(_leaves(state))


def _large(state: Any) -> set[Any]:
    """The leaves of a generator's state that tell it from other saved values."""
    return {one for one in _leaves(state) if isinstance(one, bytes) or one > DISTINCTIVE}


def _saved_in(state: State) -> Iterator[Any]:
    """The leaves of the plain values and objects of a state."""
    for value in state.values():
        if stages(value) is None and not is_optimizer(value) and not is_loader(value):
            yield from _leaves(value.state_dict() if is_stateful(value) else value)


def _saved_of(owner: Any) -> Any:
    """The saved state of an owner."""
    if isinstance(owner, nn.Module):
        return named_entries(owner)
    if isinstance(owner, Optimizer):
        return [{**group, "params": ()} for group in owner.param_groups], list(owner.state.values())
    return owner.state_dict()


def _leaves(tree: Any) -> Iterator[Any]:
    """The whole numbers of a nested value, and the bytes of its arrays and small tensors."""
    if isinstance(tree, Mapping):
        for one in islice(list(tree.values()), MOST_VALUES):
            yield from _leaves(one)
    elif isinstance(tree, (list, tuple, deque)):
        for one in islice(tree, MOST_VALUES):
            yield from _leaves(one)
    elif isinstance(tree, torch.Tensor):
        if type(tree) is torch.Tensor and tree.device.type == "cpu" and tree.dtype is torch.uint8:
            yield from _leaves(tree.numpy())
    elif isinstance(tree, np.ndarray):
        if tree.nbytes <= MOST_BYTES:
            yield tree.tobytes()
    elif isinstance(tree, bytes):
        yield tree
    elif isinstance(tree, (int, np.integer)):
        yield int(tree)
