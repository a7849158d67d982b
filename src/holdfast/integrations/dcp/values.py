"""Plain values (not tensors): DCP stores them as pickles of torch.save, holdfast as JSON.

A pickle is read by torch's restricted unpickler, which makes plain data and calls nothing else.  A value
that JSON would not give back equal is refused by its name.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

import numpy as np
import torch

from holdfast import errors
from holdfast.extend import decode as decode_plain
from holdfast.extend import decode_torch, inline_tensor, referred, torch_dtype
from holdfast.extend import encode as encode_plain

_UNPICKLER, _ALLOWED = "torch._weights_only_unpickler", "_get_user_allowed_globals"
"""torch's restricted unpickler, and its function that returns the classes which the user has allowed."""
(_users_globals,) = errors.need("torch", _UNPICKLER, _ALLOWED)
_load, _open_zipfile_reader = errors.need(
    "torch", "torch.serialization", "_load", "_open_zipfile_reader"
)

_PLAIN_HINT = (
    "reduce it to numbers, strings, lists, dicts, arrays or tensors, as a state_dict() does: holdfast "
    "writes no pickles"
)


@cache
def _data_globals() -> dict[str, Any]:
    """Return the classes and functions that pickles of plain data may name besides torch's own list."""
    array = np.zeros(1).__reduce__()[0]
    scalar = np.float64(1).__reduce__()[0]
    dtypes = {type(np.dtype(code)) for code in "?bBhHiIlLqQefdFDUSmM"}
    kinds: list[Any] = [array, scalar, np.ndarray, np.dtype, deque, bytes, io.BytesIO, *dtypes]
    return {f"{kind.__module__}.{kind.__qualname__}": kind for kind in kinds}


@cache
def _unpickler() -> ModuleType:
    """Return a second copy of torch's restricted unpickler, which allows our classes besides the user's.

    torch's own module cannot be changed: the whole process uses it, also on other threads.
    """
    spec: Any = find_spec(_UNPICKLER)
    own = module_from_spec(spec)
    spec.loader.exec_module(own)
    vars(own)[_ALLOWED] = lambda: {**_data_globals(), **_users_globals()}
    return own


def encoded(data: io.BytesIO, name: str) -> Any:
    """Return the JSON tree of a value written by torch.save.  UsageError if it is not plain data."""
    data.seek(0)
    try:
        with _open_zipfile_reader(data) as archive:
            value = _load(archive, "cpu", _unpickler(), encoding="utf-8")
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise errors.UsageError(
            f"{name}: is no plain data ({why[:200]})", hint=_PLAIN_HINT
        ) from None
    return encode_extra(value, name)


def encode_extra(value: Any, name: str) -> Any:
    """Return the JSON tree of a value."""

    def on_other(leaf: Any, path: str) -> Any:
        if isinstance(leaf, torch.dtype):
            return {"$dtype": str(leaf).removeprefix("torch.")}
        if type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.is_quantized:
            return inline_tensor(leaf)
        kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
        raise errors.UsageError(f"{path}: a {kind} cannot be saved", hint=_PLAIN_HINT)

    return encode_plain(value, on_other, name, utf8=True)


class StandIn(torch.Tensor):  # torch gives no types
    """A stand-in for a tensor of the checkpoint: name, shape and dtype, without memory."""

    saved_name: str
    (__torch_function__,) = errors.need("torch", "torch._C", "_disabled_torch_function_impl")


def make_stand_in(name: str, dtype: str, shape: tuple[int, ...]) -> StandIn:
    """Return a stand-in for a tensor."""
    empty = torch.empty(shape, dtype=torch_dtype(dtype), device="meta")
    found: StandIn = empty.as_subclass(StandIn)
    found.saved_name = name
    return found


_WHOLE = frozenset(("$tuple", "$deque", "$set", "$frozenset"))
"""Tags of values that DCP does not look into: it knows dicts and lists."""


class WithTensors:
    """A value with tensors where DCP does not look for them: it is loaded as one value with its tensors."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree


def listed(tree: Any, tensors: dict[str, StandIn]) -> Any:
    """Return a value of extras as DCP lists it: its tensors are stand-ins, and a container into which DCP
    does not look becomes a `WithTensors` if it has tensors."""

    def marked(tree: Any) -> Any:
        if isinstance(tree, list):
            return [marked(one) for one in tree]
        if not isinstance(tree, dict):
            return tree
        if len(tree) == 1 and not _WHOLE.isdisjoint(tree):
            return {"$held": tree} if any(referred(tree)) else tree
        return {key: marked(one) for key, one in tree.items()}

    return decode_extra(marked(tree), tensors)


def held_in(value: Any) -> Iterator[str]:
    """Yield the names of the tensors inside a value."""
    if isinstance(value, WithTensors):
        yield from referred(value.tree)
    elif isinstance(value, StandIn):
        yield value.saved_name
    elif isinstance(value, (dict, list)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from held_in(one)


def fill_tensors(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return a value with the tensors that `held_in` names."""
    if isinstance(value, WithTensors):
        return decode_extra(value.tree, tensors)
    if isinstance(value, StandIn):
        return tensors[value.saved_name]
    if isinstance(value, list):
        return [fill_tensors(one, tensors) for one in value]
    if isinstance(value, dict) and any(held_in(value)):
        return {key: fill_tensors(one, tensors) for key, one in value.items()}
    return value


def decode_extra(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return a value of extras with its tensors from the checkpoint."""

    def on_other(tag: str, body: Any) -> Any:
        match tag:
            case "$at" if body in tensors:
                return tensors[body]
            case "$held":
                return WithTensors(body)
        return decode_torch(tag, body, on_other)

    return decode_plain(tree, on_other)


class Pickles:
    """Values as DCP's planners expect them.  Equal numbers and strings are pickled once: optimizers repeat
    them for every parameter."""

    def __init__(self) -> None:
        self._known: dict[tuple[type, str], bytes] = {}

    def pickled(self, value: Any) -> io.BytesIO:
        """Return a value as `torch.save` writes it."""
        if not isinstance(value, (bool, int, float, str, type(None))):
            return io.BytesIO(_saved(value))
        key = type(value), repr(value)
        if key not in self._known:
            self._known[key] = _saved(value)
        return io.BytesIO(self._known[key])


def _saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()
