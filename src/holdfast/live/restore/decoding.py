"""Saved extras as values."""

from __future__ import annotations

from collections.abc import Callable
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
