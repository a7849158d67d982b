"""Objects with a state_dict() inside the user's lists and dicts: schedulers in a list, say.

A save has the result of `state_dict()` in the place of the object.  If a restore put that there, a dict
would replace the object.  So the saved state is loaded into the live object of the same place, which
stays.  An object without a saved state, or a saved state without an object, is a mismatch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from holdfast.base.errors import UsageError
from holdfast.core.format import extras
from holdfast.live.restore.mismatches import Mismatch, differs
from holdfast.live.state.loaded import loaded_states
from holdfast.live.state.own_errors import naming
from holdfast.live.state.recognising import State, is_loader, is_object, stages

LIVE, OBJECT = "$live", "$object"


@dataclass
class StateSlot:
    """A live object and the saved tree of its state."""

    path: str
    live: Any
    tree: Any


@dataclass
class Nested:
    """The objects inside a value of the state, with the saved trees of their places."""

    tree: Any = None
    """The saved tree with `{"$live": StateSlot}` in the place of each object's state."""
    slots: list[StateSlot] = field(default_factory=list)
    missing: list[Mismatch] = field(default_factory=list)
    """Live objects that the checkpoint lacks."""
    homeless: list[Mismatch] = field(default_factory=list)
    """Saved states whose objects the live value lacks."""
    tensors: set[str] = field(default_factory=set)
    """Names of the tensors that the states refer to."""

    def put(self, decode: Callable[[Any], Any]) -> None:
        """Put the states into the objects."""
        for slot in self.slots:
            load_object(slot.path, slot.live, slot.tree, decode)

    def has(self, name: str) -> bool:
        """True if the tensor `name` is in an object's state."""
        return name in self.tensors or any(name.startswith(f"{slot.path}.") for slot in self.slots)


def load_object(path: str, value: Any, tree: Any, decode: Callable[[Any], Any]) -> None:
    """Load an object's saved tree by its `load_state_dict`.  Objects in the tree are loaded before."""
    with naming(path, value, "load_state_dict"):
        tree = with_live(path, value.state_dict, tree, decode)
        loaded_states.note(value, tree, decode)
        if type(value).__name__ == "OptimizerParamScheduler":
            value.num_steps = 0  # Megatron's adds the steps that it loads to those that it has
        value.load_state_dict(decode(tree))


def with_live(path: str, ask: Callable[[], Any], tree: Any, decode: Callable[[Any], Any]) -> Any:
    """Load the objects in the live state `ask()`, and return its saved tree with the objects in it.

    Where there is no object, or `ask()` fails, the saved state stays in the tree.
    """
    for live in _asked(ask) if _has_objects(tree) else ():
        inside = nested(path, live, tree)
        inside.put(decode)
        return inside.tree
    return tree


def _asked(ask: Callable[[], Any]) -> list[Any]:
    """The live state in a list; empty if it cannot be asked for before its first load."""
    with suppress(Exception):
        return [ask()]
    return []


def object_tensors(
    path: str, ask: Callable[[], Any], tree: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the live state `ask()` and of the objects in it; nothing if `ask()` fails, as
    some states do before their first load."""
    for live in _asked(ask):
        yield from _tensors(live, path)
        for slot in nested(path, live, tree).slots if _has_objects(tree) else ():
            yield from object_tensors(slot.path, slot.live.state_dict, slot.tree)


def _tensors(live: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(live, torch.Tensor):
        yield path, live
    for part, one in items_of(live, path):
        yield from _tensors(one, part)


def with_tensors(path: str, tree: Any, put: Callable[[str, Any], Any]) -> Any:
    """Return a saved tree with `put(name, tree)` in the place of each inline tensor."""
    if isinstance(tree, dict) and tree.keys() == {"$tensor"}:
        return put(path, tree)
    if isinstance(tree, dict) and tree.keys() == {OBJECT}:
        return {OBJECT: with_tensors(path, tree[OBJECT], put)}
    return map_items(tree, path, lambda part, one: with_tensors(part, one, put))


def homeless_in(path: str, ask: Callable[[], Any], tree: Any) -> list[Mismatch]:
    """Saved states of objects for which `with_live` would find no live object."""
    found: list[Mismatch] = []
    for live in _asked(ask) if _has_objects(tree) else ():
        inside = nested(path, live, tree)
        deeper = (homeless_in(s.path, s.live.state_dict, s.tree) for s in inside.slots)
        found += [*inside.homeless, *chain.from_iterable(deeper)]
    return found


def _has_objects(tree: Any) -> bool:
    """True if a saved tree has the state of an object in it."""
    if isinstance(tree, dict):
        return tree.keys() == {OBJECT} or any(map(_has_objects, tree.values()))
    return isinstance(tree, list) and any(map(_has_objects, tree))


def nested(key: str, live: Any, tree: Any) -> Nested:
    """Find the objects of a live value in the saved tree of its key."""
    found = Nested()
    found.tree = _walk(live, tree, key, found)
    return found


def not_its_state(key: str, live: Any, tree: Any) -> list[Mismatch]:
    """A mismatch if the saved tree is no dict, and the live object has a dict as its state.

    Nothing marks the states of such objects, and a state may be a number or a list.  So the object is
    asked, but only then: its state_dict() may draw, or fail before its first load.
    """
    if _may_be_a_state(tree):
        return []
    with suppress(Exception):
        if isinstance(live.state_dict(), Mapping):
            return [_no_state(key, live)]
    return []


def _no_state(path: str, live: Any) -> Mismatch:
    return differs(path, f"no state of an object was saved, and here is a {type(live).__name__}")


def _walk(live: Any, tree: Any, path: str, into: Nested) -> Any:
    is_saved = isinstance(tree, dict) and tree.keys() == {OBJECT}
    if is_object(live):
        if not is_saved and not _may_be_a_state(tree):
            into.missing.append(_no_state(path, live))
            return tree
        slot = StateSlot(path, live, tree[OBJECT] if is_saved else tree)
        into.slots.append(slot)
        into.tensors |= set(extras.referred(slot.tree))
        return {LIVE: slot}
    if is_saved:
        why = f"the state of an object was saved, and here is a {type(live).__name__}"
        into.homeless.append(differs(path, why))
        return tree
    inside = dict(items_of(live, path))
    seen: set[str] = set()

    def child(part: str, one: Any) -> Any:
        seen.add(part)
        return _walk(inside.get(part), one, part, into)

    new = map_items(tree, path, child)
    for part, one in inside.items():
        if part not in seen:
            into.missing += [
                Mismatch("missing", where, f", a {type(other).__name__}")
                for where, other in objects(one, part)
            ]
    return new


def _may_be_a_state(tree: Any) -> bool:
    """True if a saved value without the mark may be an object's state: a dict, from others' checkpoints."""
    tags = [name for name in tree if name[:1] == "$"] if isinstance(tree, dict) else [""]
    return tags in ([], ["$dict"], ["$ordered"])


def map_items(tree: Any, path: str, child: Callable[[str, Any], Any]) -> Any:
    """A saved list or dict with `child` of each value in it; other trees as they are."""

    def items(values: Any) -> list[Any]:
        return [child(item(path, i), one) for i, one in enumerate(values)]

    match tree:
        case list():
            return items(tree)
        case {"$tuple": values}:
            return {"$tuple": items(values)}
        case {"$deque": [most, values]}:
            return {"$deque": [most, items(values)]}
        case {"$dict": pairs} | {"$ordered": pairs}:
            (tag,) = tree
            return {tag: [[k, child(below(path, extras.decode(k)), v)] for k, v in pairs]}
        case dict() if not any(name[:1] == "$" for name in tree):
            return {name: child(below(path, name), one) for name, one in tree.items()}
    return tree


def items_of(live: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of the items of a live list or dict."""
    if isinstance(live, Mapping):
        yield from ((below(path, _as_saved(name)), one) for name, one in live.items())
    elif isinstance(live, (list, tuple, deque)):
        yield from ((item(path, number), one) for number, one in enumerate(live))


def objects(live: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, object) of a value that is an object, or of the objects in its lists and dicts."""
    if is_object(live):
        yield path, live
    for part, one in items_of(live, path):
        yield from objects(one, part)


def loaders_in(state: State) -> tuple[str, ...]:
    """Return the paths of the data loaders of a state."""
    plain = ((k, v) for k, v in state.items() if stages(v) is None)
    return tuple(path for k, v in plain for path, one in objects(v, k) if is_loader(one))


def below(path: str, name: Any) -> str:
    return f"{path}.{name}"


def _as_saved(name: Any) -> Any:
    """A key as a load returns it: a text that is a member of an enum is saved as its text alone."""
    if type(name) is str:
        return name
    with suppress(UsageError):  # of a key that cannot be saved: no checkpoint has it
        return extras.decode(extras.encode(name))
    return name


def item(path: str, number: int) -> str:
    """Path of a list's item as in names of tensors: `s.[0].x` in list `s`, `s.a[0].x` in the list `s.a`."""
    return f"{path}[{number}]" if "." in path else f"{path}.[{number}]"
