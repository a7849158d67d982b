"""Extras that can be read: looked at before a restore changes anything.

A manifest's digest says that its bytes are those that were written, not that what they say makes sense: a
tool of somebody else's may have written them.  What does not is a FormatError with the key that it is of,
and the live state is still as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from holdfast.base.errors import FormatError
from holdfast.core.format import extras
from holdfast.live.restore.nested import OBJECT
from holdfast.live.state.encoding import outline_tensor
from holdfast.live.state.placed import torch_dtype


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
