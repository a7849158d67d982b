"""Saved extras as values.

A manifest's digest proves that its bytes are those that were written, not that they make sense: another
tool may have written them.  `check_extras` refuses such an extra by its name before anything live changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from holdfast.base.errors import FormatError
from holdfast.core.format import extras
from holdfast.live.restore.nested import LIVE, OBJECT, StateSlot
from holdfast.live.state.encoding import outline_tensor
from holdfast.live.state.placed import torch_dtype


def decode_value(tree: Any, tensor: Callable[[str], Any] | None = None) -> Any:
    """Undo `encode_extra`.  `tensor`: of a name, the tensor that lies elsewhere; None if none does."""

    def on_other(tag: str, body: Any) -> Any:
        if tag == "$tensor":
            return outline_tensor(body)
        if tag == "$at" and tensor is not None:
            return tensor(body)
        if tag == LIVE and isinstance(body, StateSlot):
            return body.live
        if tag == OBJECT:
            return extras.decode(body, on_other)
        if tag == "$dtype":
            return torch_dtype(body)
        if tag == "$quantized":
            from holdfast.live.state.quantised import quantised

            return quantised(extras.decode(body, on_other))
        raise FormatError(f"malformed extras: unknown tag {tag!r}")

    return extras.decode(tree, on_other)


# -- extras that can be read --------------------------------------------------------------------


def check_extras(saved: Mapping[str, Any], keys: Collection[str]) -> None:
    """FormatError, with its name, for an extra of one of these keys of the state that cannot be read."""
    for name, tree in saved.items():
        if name.partition(".")[0] in keys:
            try:
                extras.decode(tree, _other)
            except FormatError as error:
                raise FormatError(f"{name}: {error.message}", hint=error.hint) from error


def _other(tag: str, body: Any) -> Any:
    """A stand-in for what a restore makes of a tag that is not one of `format.extras`."""
    match tag:
        case "$tensor":
            return outline_tensor(body)
        case "$dtype":
            return torch_dtype(body)
        case "$at" if isinstance(body, str):
            return None
        case "$quantized":
            return extras.decode(body, _other)
        case "$optimizer":
            return [extras.decode(tree, _other) for tree in _in_optimizer(body)]
    if tag == OBJECT:
        return extras.decode(body, _other)
    raise FormatError(f"malformed extras: unknown tag {tag!r}")


def _in_optimizer(body: Any) -> list[Any]:
    """The trees in what is saved of an optimizer; an error of Python's, which `decode` translates, if it is
    of another form."""
    states = body.get("state") or {}
    hypers = [group["hyper"] for group in body["groups"]]
    params = [name for group in body["groups"] for name in group["params"]]
    dicts = [*hypers, states, *states.values(), body.get("plain") or {}, body.get("order") or {}]
    if not all(isinstance(one, dict) for one in dicts):
        raise TypeError("a dict is something else")
    if not all(isinstance(name, str) for name in params):
        raise TypeError("a parameter's name is no text")
    return [*hypers, *(tree for values in states.values() for tree in values.values())]
