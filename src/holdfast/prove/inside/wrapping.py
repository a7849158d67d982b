"""Wraps functions of other packages; needs none of them, as they come before torch does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Check = Callable[[object], None]
"""Raises PermissionError for a path that a run may not write to."""


def wrap(
    owner: Any,
    name: str,
    first: Callable[..., None] | None = None,
    then: Callable[..., None] | None = None,
) -> None:
    """Have a function called before, or after, another one, with the same arguments."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if first is not None:
            first(*args, **kwargs)
        out = inner(*args, **kwargs)
        if then is not None:
            then(*args, **kwargs)
        return out

    setattr(owner, name, wrapper)


def second(name: str, check: Check) -> Callable[..., None]:
    """Check the path that is the second argument of a call, or the one of that name."""

    def checked(*args: Any, **kwargs: Any) -> None:
        check(kwargs[name] if name in kwargs else args[1] if len(args) > 1 else None)

    return checked
