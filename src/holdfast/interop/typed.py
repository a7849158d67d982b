"""What a pickle may have put in a place is checked before it is hashed, compared or shown.

All three take exponential time for tuples of shared tuples, which a few bytes of a pickle can make.
"""

from __future__ import annotations

from typing import Any

from holdfast.errors import FormatError


def text(value: Any) -> str:
    """A name.  FormatError for anything else."""
    if not isinstance(value, str):
        raise FormatError(f"malformed pickle: a {type(value).__name__} where a name should be")
    return value


def ints(values: Any) -> tuple[int, ...]:
    """A shape, or a place in one.  FormatError for anything but numbers."""
    found = tuple(values)
    if not all(isinstance(n, int) for n in found):
        raise FormatError("malformed pickle: a shape or a place of something else than numbers")
    return found
