"""Values on one short line, for tables and messages."""

from __future__ import annotations

import io
from typing import Any

import numpy as np


def format_value(value: Any, width: int = 60) -> str:
    """Format a value on one line of about `width` characters."""
    if isinstance(value, np.ndarray):
        if value.size == 1:
            return f"{value.dtype} {value.reshape(-1)[0]}"
        return f"{value.dtype} array {list(value.shape)}"
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, io.BytesIO):
        return f"BytesIO of {len(value.getvalue())} bytes, at {value.tell()}"
    if isinstance(value, dict):
        text = (
            "{"
            + ", ".join(f"{k}: {format_value(v, width)}" for k, v in list(value.items())[:20])
            + "}"
        )
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(format_value(v, width) for v in value[:20])
        text += f", ... {len(value):,} in all]" if len(value) > 20 else "]"
    else:
        text = repr(value)
    return cut_short(text, width)


def full_value(value: Any) -> str:
    """Format a value on one line with nothing left out."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.tolist()}"
    if isinstance(value, io.BytesIO):
        return f"BytesIO at {value.tell()} of {value.getvalue()!r}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {full_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(full_value, value)) + "]"
    return repr(value)


def cut_short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
