"""The states that a restore gave to objects, until the script goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from holdfast.core.format import extras


class LoadedStates:
    """The states that objects were given by a restore, until the script goes on.

    Asked before that, many tell another one: a loader begins a pass, with what it draws for it and with the
    order of its sampler's epoch, or tells of its beginning.  What a restore itself saves comes from here,
    but for states with large or sharded tensors: these are the objects' own.
    """

    def __init__(self) -> None:
        self._states: dict[int, tuple[Any, Callable[[], Any]]] | None = None
        self._is_asked = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what objects are given."""
        self._states = {}
        try:
            yield
        finally:
            self._states, self._is_asked = None, False

    def ask(self) -> None:
        """Take what was noted for the states of these objects from now on."""
        self._is_asked = True

    def note(self, value: Any, tree: Any, decode: Callable[[Any], Any]) -> None:
        """Note that an object is given what `decode(tree)` makes, anew each time.  Where the tree refers to
        tensors, nothing is noted: records follow the object's own."""
        if self._states is not None and not any(True for _ in extras.referred(tree)):
            self._states[id(value)] = value, partial(decode, tree)

    def of(self, value: Any) -> Any:
        """Return the state of an object: what was noted, or what it says itself."""
        noted = self._states.get(id(value)) if self._states is not None and self._is_asked else None
        return value.state_dict() if noted is None else noted[1]()


loaded_states = LoadedStates()
"""The states of this process, in whose training thread one restore is made at a time."""
