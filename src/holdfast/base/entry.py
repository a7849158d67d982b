"""Where users enter the library: tracebacks of their mistakes end at their own line.

    Traceback (most recent call last):
      File "train.py", line 12, in <module>
        ckpt.restore("bset")
    holdfast.errors.NotFound: no step of file:///runs/gpt has the label 'bset'

What a call refuses is told by its message; frames within the library would only push it off the screen.
Other errors keep all their frames, and so do these with `HOLDFAST_TRACEBACK=full`, and where a function of
the user's, such as a `state_dict()`, led to them.  A misspelt argument is answered by the one that was
meant.
"""

from __future__ import annotations

import functools
import inspect
import os
import traceback
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from holdfast.base.errors import NotFound, NotRecoverable, UsageError, is_users
from holdfast.base.suggest import did_you_mean

P = ParamSpec("P")
T = TypeVar("T")

MISTAKES = (UsageError, NotFound, NotRecoverable)
"""What is wrong with a call, and not with the library or with storage."""


def public(call: Callable[P, T]) -> Callable[P, T]:
    """Have a function or method drop the frames below it from the traceback of a user's mistake."""

    @functools.wraps(call)
    def entered(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except MISTAKES as error:
            if os.environ.get("HOLDFAST_TRACEBACK") != "full" and _is_all_ours(error):
                error.__traceback__ = None
            raise  # which adds no frame
        except TypeError as error:
            if _is_of_the_call(error):
                error.args = (f"{error}{_suggestion(call, kwargs, str(error))}",)
            raise

    return entered


def options(kind: type[T]) -> type[T]:
    """Have a class of options suggest the one that was meant, if one is misspelt, as `public` does."""
    setattr(kind, "__init__", public(kind.__init__))  # noqa: B010
    return kind


def _is_of_the_call(error: TypeError) -> bool:
    """True if a call was refused by Python itself: no frame below that of the caller."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is None


def _suggestion(call: Callable[..., object], given: Iterable[str], said: str) -> str:
    """Return `; did you mean 'keep'?` for a misspelt argument, which newer versions of Python do
    themselves; else nothing."""
    known = list(inspect.signature(call).parameters)
    misspelt = [name for name in given if name not in known]
    found = did_you_mean(misspelt[0], known) if misspelt and "id you mean" not in said else None
    return f"; {found}" if found else ""


def _is_all_ours(error: BaseException) -> bool:
    """True unless a function of the user's, which the library has called, led to the error."""
    frames = traceback.walk_tb(error.__traceback__)
    return not any(is_users(frame) for frame, _ in frames)
