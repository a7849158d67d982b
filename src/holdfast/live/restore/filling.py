"""Filling the plain containers of a state: the script's own list, array or dict gets the saved values.

    losses = []                                          the loop's own name of a list
    state = {"progress": {"losses": losses}}             the state's name of it

A restore that put another list into the dict would leave the loop with a list that no save holds.  So a
live container stays where it is, at any depth, and takes the saved values: by key in a dict, by position in
a list.  Where it cannot take them (a tuple was saved, or an array of another shape), it is replaced, with a
warning, because the script may hold it by a name of its own.

One container may be in a state twice.  It is filled once, and stays one, if both places were saved with the
same values.  If they were not, they were two containers when they were saved, for references move while a
training runs (`best = last`): the second place gets a container of its own, and that is told.  Where both
are values of the state itself, and are or have tensors or objects, the restore is refused.
"""

from __future__ import annotations

import io
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from holdfast.base.errors import need, warn_user
from holdfast.base.text import listed
from holdfast.live.restore.mismatches import Mismatch
from holdfast.live.restore.nested import below, item, items_of, map_items
from holdfast.live.state.named import LiveTensor
from holdfast.live.state.optimizers import tensors_in
from holdfast.live.state.recognising import is_loader, is_object, is_stateful

need("torch", torch.UntypedStorage, "_cdata")

MAX_PLACES = 10
"""Names that a warning shows."""
HELD = (list, dict, set, deque, bytearray, io.BytesIO, np.ndarray, Mapping)
"""Values that a script can hold by a name of its own, and that can be filled, but for a frozen mapping."""
INSIDE = (*HELD, tuple, torch.Tensor)
"""Values that are filled, or that may have such values inside."""

_restored: set[str] = set()
"""Keys whose values this process has restored."""
_restored_dicts: set[str] = set()
"""Keys of which this process has restored a dict into a dict."""
_told: set[tuple[str, str]] = set()
"""(notice, path) of notices given in this process."""


class Filling:
    """The filling of one restore: the containers that have their values already, and the warnings due."""

    def __init__(self, step: int, tensors: Iterable[LiveTensor]) -> None:
        self.step = step
        self._claims = Claims()
        self._apart: set[str] = set()
        """Places that get a container of their own."""
        self._filled: dict[int, Any] = {}
        self._tensors = tensors
        self._memories: set[int] = set()
        """Storages of tensors that have their values, once a tensor without a name is met."""
        self._removed: dict[str, str] = {}
        self._replaced: dict[str, str] = {}
        self._twice: dict[str, str] = {}

    def put(self, key: str, live: Any, tree: Any, found: Any) -> Any:
        """Fill the live value of a key with the saved one (`found`, decoded from `tree`); return the value
        for its place, which is the live value itself wherever that can be."""
        for path, other, value in self._claims.differing(key, live, tree):
            if not is_object(value):
                self._apart.add(path)
            if key not in _restored:  # later ones go back to where these were two
                has = "it has those of" if is_object(value) else "another one is now in"
                self._twice[path] = (
                    f"{other} and {path} are one {type(value).__name__} ({has} {path})"
                )
        if isinstance(live, dict) and isinstance(found, dict) and not self.has(live):
            names = [repr(name) for name in live if name not in found]
            if names and key not in _restored_dicts:  # later ones go back to before it added them
                self._removed[key] = (
                    f"{key}: step {self.step} has nothing of {listed(names, MAX_PLACES)}"
                )
            _restored_dicts.add(key)
        _restored.add(key)
        return self._put(key, live, found)

    def has(self, live: Any) -> bool:
        """True if a container has its values already, from another key."""
        return id(live) in self._filled

    def tell(self, rank: int) -> None:
        """Warn of replaced containers and those that were split, once per place, and from rank 0 of removed
        entries."""
        for text in self._removed.values() if rank == 0 else ():
            warn_user(
                f"{text}, which is taken from the dict",
                hint="set what a new version of a script has added after the restore, or ask by get()",
            )
        replaced = _untold("replaced", self._replaced)
        if replaced:
            warn_user(
                f"{listed(replaced, MAX_PLACES)}: another object now than before the restore of step "
                f"{self.step}, for what was there could not take what was saved; take it from "
                "the state if the script holds it by a name of its own",
                notice="replaced",
            )
        twice = _untold("two-values", self._twice)
        if twice:
            warn_user(
                f"{listed(twice, MAX_PLACES)}: here it is one object, and step {self.step} has two values "
                "for it; build the state as it was when it was saved",
                notice="two-values",
            )

    def _put(self, path: str, live: Any, found: Any) -> Any:
        if live is found or path in self._apart:
            return found
        if id(live) in self._filled:
            return live
        if isinstance(live, tuple) and isinstance(found, tuple):
            items = tuple(self._items(path, live, found))
            return live if _are_same(live, items) else items
        if isinstance(live, torch.Tensor):
            return self._tensor(live, found)
        if not is_held(live):
            return found
        with suppress(Exception):  # of a class of the script's own
            if self._fill(path, live, found):
                self._filled[id(live)] = live
                return live
        if not isinstance(live, np.ndarray) or live.size:  # nobody writes to one without elements
            self._replaced[path] = f"{path} ({_words(found)} in place of {_words(live)})"
        return found

    def _fill(self, path: str, live: Any, found: Any) -> bool:
        """Fill a container; False if it cannot take these values."""
        match live:
            case list() if isinstance(found, list):
                live[:] = self._items(path, live, found)
            case deque() if isinstance(found, deque) and _fits(live, found):
                items = self._items(path, live, found)
                live.clear()
                live.extend(items)
            case MutableMapping() if isinstance(found, dict) and _can_take(path, live, found):
                values = self._values(path, live, found)
                live.clear()
                live.update(values)
                return len(live) == len(found)  # the maps below a ChainMap's first may have more
            case Mapping():
                return bool(dict(live) == found)
            case set() if isinstance(found, set):
                live.clear()
                live.update(found)
            case bytearray() if isinstance(found, bytes):
                live[:] = found
            case np.ndarray() if isinstance(found, np.ndarray) and _is_alike(live, found):
                np.copyto(live, found)
            case io.BytesIO() if isinstance(found, io.BytesIO):
                return _fill_file(live, found)
            case _:
                return False
        return True

    def _items(self, path: str, live: Any, found: Any) -> list[Any]:
        here = list(live)
        return [
            self._put(item(path, i), here[i], one)
            if i < len(here) and isinstance(here[i], INSIDE)
            else one
            for i, one in enumerate(found)
        ]

    def _values(self, path: str, live: Any, found: dict[Any, Any]) -> dict[Any, Any]:
        return {
            name: self._put(below(path, name), live[name], one)
            if name in live and isinstance(live[name], INSIDE)
            else one
            for name, one in found.items()
        }

    def _tensor(self, live: torch.Tensor, found: Any) -> Any:
        """Fill a tensor that has no name of its own, in a deque, if no other tensor lies in its memory."""
        if {type(live), type(found)} != {torch.Tensor} or live.is_inference():
            return found
        if (live.shape, live.dtype) != (found.shape, found.dtype) or live.is_meta:
            return found
        self._memories = self._memories or {_memory(t.placed.local) for t in self._tensors}
        if _memory(live) in self._memories:
            return found
        self._memories.add(_memory(live))
        with torch.no_grad():
            live.copy_(found)
        return live


def keep_missing(live: dict[Any, Any], found: dict[Any, Any]) -> None:
    """Add to the saved dict the live tensors that it lacks, which were told as left as they are."""
    for key, value in live.items():
        if key not in found:
            found.update({key: value} if any(True for _ in tensors_in(value)) else {})
        elif isinstance(value, dict) and isinstance(found[key], dict):
            keep_missing(value, found[key])


class Claims:
    """Live containers and objects with their saved trees, to find those that are in a state twice."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[str, Any, Any]] = {}
        """Path, value and saved tree of each, by id; the value is kept so that its id stays its own."""

    @property
    def arrays(self) -> list[tuple[str, np.ndarray[Any, Any], Any]]:
        """(path, array, saved tree) of the arrays."""
        return [one for one in self._first.values() if isinstance(one[1], np.ndarray)]

    def differing(self, key: str, live: Any, tree: Any) -> Iterator[tuple[str, str, Any]]:
        """Yield (path, first path, value) for values whose two places were saved with different values."""
        for path, value, saved in _places(live, tree, key):
            other, _, before = self._first.setdefault(id(value), (path, value, saved))
            if other != path and not _agree(before, other, saved, path):
                yield path, other, value

    def problems(self, key: str, live: Any, tree: Any) -> list[Mismatch]:
        """Mismatches of values of the state that are one object, and were saved with different values."""
        if is_loader(live):  # which may draw each time that it is asked
            return []
        return [
            Mismatch("one object", f"{other} and {path}", type(value).__name__)
            for path, other, value in self.differing(key, live, tree)
            if "." not in path + other and not _is_bare(value)
        ]


def is_held(value: Any) -> bool:
    """True for a mutable container that holdfast saves as such."""
    return isinstance(value, HELD) and not is_stateful(value)


def _is_bare(value: Any) -> bool:
    """True for a container without tensors and objects, of which a second one can be made."""
    if is_object(value) or isinstance(value, (torch.Tensor, torch.nn.Module)):
        return False
    return not isinstance(value, INSIDE) or all(_is_bare(one) for _, one in items_of(value, ""))


def _places(live: Any, tree: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, value, saved tree) of the containers and objects that live value and tree have."""
    if is_object(live) or is_held(live):
        yield path, live, tree
    if is_object(live):
        return
    inside = {part: one for part, one in items_of(live, path) if _has_places(one)}
    found: dict[str, Any] = {}
    if inside:
        map_items(tree, path, found.__setitem__)
    for part, one in inside.items():
        if part in found:
            yield from _places(one, found[part], part)


def _has_places(value: Any) -> bool:
    return isinstance(value, (*HELD, tuple)) or is_object(value)


def _agree(one: Any, path: str, other: Any, other_path: str) -> bool:
    """True if two saved trees are equal, but for the names of tensors that they refer to."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() == other.keys() == {"$at"}:
            # below a key an item is `log.[1]`, and deeper `more.log[1]`
            names = str(one["$at"]).removeprefix(path), str(other["$at"]).removeprefix(other_path)
            return names[0].lstrip(".") == names[1].lstrip(".")
        return one.keys() == other.keys() and all(
            _agree(value, path, other[name], other_path) for name, value in one.items()
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(
            _agree(a, path, b, other_path) for a, b in zip(one, other)
        )
    return type(one) is type(other) and bool(one == other)


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _are_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other))


def _fits(live: deque[Any], found: deque[Any]) -> bool:
    return live.maxlen is None or len(found) <= live.maxlen


def _can_take(path: str, live: Any, found: dict[Any, Any]) -> bool:
    """False for a plain dict inside a value where a Counter was saved: a script counts on its zeros."""
    return (
        not isinstance(found, Counter)
        or isinstance(live, (Counter, defaultdict))
        or "." not in path
    )


def _is_alike(live: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> bool:
    if isinstance(live, np.ma.MaskedArray) or not live.flags.writeable:
        return False
    return live.shape == found.shape and np.can_cast(found.dtype, live.dtype, "equiv")


def _fill_file(live: io.BytesIO, found: io.BytesIO) -> bool:
    if live.closed or type(live) is not io.BytesIO:
        return False
    try:
        live.seek(0)
        live.truncate()
    except BufferError:  # of a view of its bytes
        return False
    live.write(found.getvalue())
    live.seek(found.tell())
    return True


def _words(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {list(value.shape)}"
    if isinstance(value, deque):
        return f"a deque of {len(value)}, at most {value.maxlen}"
    return "None" if value is None else f"a {type(value).__name__}"


def _untold(notice: str, texts: dict[str, str]) -> list[str]:
    """The texts of places that this process has not told of; they count as told now."""
    new = [text for path, text in texts.items() if (notice, path) not in _told]
    _told.update((notice, path) for path in texts)
    return new
