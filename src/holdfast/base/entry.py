"""Where users enter the library: tracebacks of their mistakes end at their own line.

    Traceback (most recent call last):
      File "train.py", line 12, in <module>
        ckpt.restore("bset")
    holdfast.errors.NotFound: no step of file:///runs/gpt has the label 'bset'

What a call refuses is told by its message; frames within the library would only push it off the screen.
Other errors keep all their frames, and so do these with `HOLDFAST_TRACEBACK=full`, and where a function of
the user's, such as a `state_dict()`, led to them.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from holdfast.base.errors import NotFound, NotRecoverable, UsageError, is_users

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

    return entered


def _is_all_ours(error: BaseException) -> bool:
    """True unless a function of the user's, which the library has called, led to the error."""
    frames = traceback.walk_tb(error.__traceback__)
    return not any(is_users(frame) for frame, _ in frames)
