"""Errors between ranks: one rank's become another's."""

from __future__ import annotations

import msgspec

from holdfast.errors import (
    AgentError,
    Corrupt,
    FormatError,
    HoldfastError,
    NotFound,
    NotRecoverable,
    Unavailable,
    UnsupportedVersion,
    UsageError,
)

_KEPT = {
    kind.__name__: kind
    for kind in (
        UsageError, NotFound, NotRecoverable, Unavailable, Corrupt, FormatError, UnsupportedVersion,
    )
}  # fmt: skip
"""Errors that every rank raises as rank 0 does."""


def told(error: Exception) -> bytes:
    """Encode an error of rank 0 for the others."""
    kind = next((k.__name__ for k in type(error).__mro__ if k.__name__ in _KEPT), "")
    if isinstance(error, HoldfastError):
        card = (kind, error.message, error.step, error.key, error.hint)
    else:
        card = ("", f"{type(error).__name__}: {error}", None, None, None)
    return msgspec.msgpack.encode(card)


def learnt(data: bytes) -> HoldfastError:
    kind, message, step, key, hint = msgspec.msgpack.decode(data)
    if kind not in _KEPT:
        return AgentError(f"rank 0: {message}", step=step, key=key, hint=hint)
    return _KEPT[kind](message, step=step, key=key, hint=hint)
