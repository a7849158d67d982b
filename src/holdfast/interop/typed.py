"""Checks of values from a pickle, made before these are hashed, compared or shown.

All three take exponential time for tuples of shared tuples, which a few bytes of a pickle can make.
"""

from __future__ import annotations

from typing import Any

from holdfast.errors import FormatError


def text(value: Any) -> str:
    """Return `value` if it is text, as names are.  FormatError for anything else."""
    if not isinstance(value, str):
        raise FormatError(f"malformed pickle: a {type(value).__name__} where a name should be")
    return value


def ints(values: Any) -> tuple[int, ...]:
    """Return a shape, or a place in one, as a tuple.  FormatError for anything but integers."""
    found = tuple(values)
    if not all(isinstance(n, int) for n in found):
        raise FormatError("malformed pickle: a shape or a place of something else than numbers")
    return found
