"""The states that a restore gave to objects, until the script goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from holdfast.core.format import extras


class LoadedStates:
    """The states that objects were given by a restore, until the script goes on.

    Asked before that, many objects return another state: a loader begins a pass, draws for it, and has the
    order of its sampler's epoch, or the state of its beginning.  So the saves of a restore itself take
    these states, but for states with large or sharded tensors, for which the object is asked.
    """

    def __init__(self) -> None:
        self._states: dict[int, tuple[Any, Callable[[], Any]]] | None = None
        self._is_asked = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A block in which the states given to objects are noted."""
        self._states = {}
        try:
            yield
        finally:
            self._states, self._is_asked = None, False

    def ask(self) -> None:
        """Return the noted states from now on."""
        self._is_asked = True

    def note(self, value: Any, tree: Any, decode: Callable[[Any], Any]) -> None:
        """Note `decode(tree)`, made anew each time, as the state of an object.  A tree that refers to
        tensors is not noted: records follow the object's own tensors."""
        if self._states is not None and not any(True for _ in extras.referred(tree)):
            self._states[id(value)] = value, partial(decode, tree)

    def of(self, value: Any) -> Any:
        """Return the noted state of an object, else its state_dict()."""
        noted = self._states.get(id(value)) if self._states is not None and self._is_asked else None
        return value.state_dict() if noted is None else noted[1]()


loaded_states = LoadedStates()
"""The states of this process, in whose training thread one restore is made at a time."""
