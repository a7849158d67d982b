"""Errors of a user's own object, raised with the key of the object in the state.

    with naming("loader", loader, "state_dict"):
        saved = loader.state_dict()           # KeyError: 'at'

    HoldfastError: loader: state_dict() of MyLoader raised KeyError: 'at'

A state has many objects, most of them of other libraries; a bare KeyError tells neither which object failed
nor that it failed at a checkpoint.  The object's own error is the cause, with its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.base.errors import HoldfastError


@contextmanager
def naming(key: str, value: Any, call: str) -> Iterator[None]:
    """HoldfastError with the key for what `call` of the object raises; holdfast's own errors pass."""
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        raise HoldfastError(
            f"{key}: {call}() of {type(value).__qualname__} raised {type(error).__name__}: {error}",
            hint="the error is the object's own; its traceback is above",
        ) from error
