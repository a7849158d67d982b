"""Checks of the arguments that users hand over, made in the call that takes them.

A checker takes the value, the name of the call and the name of the argument.  It returns the value in the
form that the library uses, or raises a UsageError that states the given and the expected value:

    >>> import numpy
    >>> step_of(numpy.int64(7), "save")
    7
    >>> step_of(7.0, "save")
    Traceback (most recent call last):
    holdfast.errors.UsageError: save(step=7.0): must be an integer from 0 to 999999999999999, not float

*Invariants.*  Numbers of any library are accepted (numpy, torch, `fractions`) and returned as Python's own
numbers, because steps go into file names and JSON.  A bool is not a number, although Python counts it as
one: `step=True` is a mistake.  Checks run before any collective call, so a mistake that all ranks make
raises on all of them, and no rank waits for another.
"""

from __future__ import annotations

import inspect
import math
import operator
import os
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from holdfast.base.errors import UsageError
from holdfast.base.suggest import did_you_mean

_T = TypeVar("_T")

MAX_STEP = 10**15 - 1
"""The format writes steps with 10 to 15 digits: enough to count tokens, and exact in a float, which some
JSON readers use for every number."""
MAX_LABEL_CHARS = 100
"""Most characters of a label, and of the name of a metric."""
_MAX_COUNT = 10**9
"""Upper bound for counts of steps, records and files; a larger number is a mistake."""
_MAX_S = 366 * 86400.0
"""A year.  The waits of the operating system overflow after some hundred years."""
_MAX_PATH_BYTES = 4096
"""Longest path on Linux, in bytes."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxlevel = 3


def unfit(
    call: str, name: str, value: Any, expected: str, *, typed: bool = True, hint: str | None = None
) -> UsageError:
    """Return the error for an argument; `typed` adds the type of the value to the message."""
    given = f", not {_kind(value)}" if typed else ""
    return UsageError(f"{call}({name}={shown(value)}): must be {expected}{given}", hint=hint)


def shown(value: Any) -> str:
    """Return any value as one short line of text."""
    try:
        return " ".join(_SHORT.repr(value).split())
    except Exception:  # the user's own __repr__ failed, or an integer has too many digits
        return f"<{_kind(value)}>"


def _kind(value: Any) -> str:
    kind = type(value)
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


# -- numbers --------------------------------------------------------------------------------------


def step_of(value: Any, call: str, name: str = "step") -> int:
    """Check the number of a step."""
    if type(value) is int and 0 <= value <= MAX_STEP:  # at every step of a training
        return value
    return count_of(value, call, name, least=0, most=MAX_STEP)


def named_step_of(value: Any, call: str, name: str = "step") -> int | str:
    """Check the number of a step, or a word that names one: `newest`, `best`, or a label."""
    expected = f"an integer from 0 to {MAX_STEP}, or a label such as 'best'"
    if isinstance(value, str):
        if names_step(value):
            return str(value)
        is_number = value.isascii() and value.isdecimal() and len(value) <= len(str(MAX_STEP))
        hint = f"{name}={int(value)}" if is_number else None
        raise unfit(call, name, value, expected, typed=False, hint=hint)
    number = _integer(value)
    if number is None or not 0 <= number <= MAX_STEP:
        raise unfit(call, name, value, expected, typed=number is None)
    return number


def names_step(text: str) -> bool:
    """True if a text can name a step as a label: it must not look like a number."""
    return is_label(text) and not text.lstrip("+-").replace(".", "", 1).isdigit()


def is_label(text: str) -> bool:
    """True if a text can be a label: one short line, not blank."""
    return text.strip() != "" and len(text) <= MAX_LABEL_CHARS and text.isprintable()


def count_of(
    value: Any,
    call: str,
    name: str,
    *,
    least: int = 1,
    most: int = _MAX_COUNT,
    hint: str | None = None,
) -> int:
    """Check an integer of any library against bounds."""
    expected = f"an integer from {least} to {most}"
    number = _integer(value)
    if number is None:
        raise unfit(call, name, value, expected, hint=hint)
    if not least <= number <= most:
        if least == 1:
            expected = "at most " + str(most) if number > most else "1 or more (a positive integer)"
        raise unfit(call, name, value, expected, typed=False, hint=hint)
    return number


def _integer(value: Any) -> int | None:
    """Convert an integer of any library to Python's; None for any other value."""
    if _is_bool(value) or getattr(value, "ndim", 0) != 0:
        return None
    try:
        return operator.index(value)
    except Exception:  # torch raises several classes, as for a tensor without values
        return None


def number_of(
    value: Any,
    call: str,
    name: str,
    expected: str,
    fits: Callable[[float], bool],
    *,
    hint: str | None = None,
) -> float:
    """Check a real number of any library: it must satisfy `fits`, which `expected` states in words.  NaN is
    refused."""
    number = _real(value)
    if number is None:
        raise unfit(call, name, value, expected, hint=hint)
    if math.isnan(number) or not fits(number):
        raise unfit(call, name, value, expected, typed=False, hint=hint)
    return number


def _real(value: Any) -> float | None:
    """Convert a number of any library to Python's float, or int; None for any other value."""
    if isinstance(value, (str, bytes, bytearray, complex)) or _is_bool(value):
        return None
    if type(value) in (int, float):
        return _bounded(value)
    if getattr(value, "ndim", 0) != 0 or "complex" in str(getattr(value, "dtype", "")):
        return None
    try:
        return float(value)
    except Exception:
        return None


def _bounded(value: float) -> float:
    """Return infinity for an integer beyond the range of floats, else the value."""
    try:
        float(value)
    except OverflowError:
        return math.inf
    return value


def seconds_of(value: Any, call: str, name: str, *, or_zero: bool = False) -> float:
    """Check a time in seconds; `or_zero` allows 0."""
    hint = None
    if hasattr(value, "total_seconds"):
        hint = f"{name}={shown(value)}.total_seconds()"
    least = "0" if or_zero else "above 0"
    expected = f"a number of seconds, {least} to {_MAX_S:.0f} (a year)"
    return number_of(
        value, call, name, expected, lambda s: (s > 0 or (or_zero and s == 0)) and s <= _MAX_S,
        hint=hint,
    )  # fmt: skip


def timeout_of(value: Any, call: str, name: str = "timeout") -> float | None:
    """Check the seconds to wait; None means that the user set no limit."""
    return None if value is None else seconds_of(value, call, name, or_zero=True)


def share_of(value: Any, call: str, name: str, *, hint: str | None = None) -> float:
    """Check a fraction of a whole: above 0 and at most 1."""
    return number_of(
        value, call, name, "a number above 0 and at most 1", lambda x: 0 < x <= 1, hint=hint
    )


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def flag_of(value: Any, call: str, name: str) -> bool:
    """Check a bool.  Texts are refused, because Python would take `"false"` as true."""
    if isinstance(value, bool):
        return value
    if _is_bool(value) and getattr(value, "ndim", 0) == 0:
        return bool(value)
    raise unfit(call, name, value, "True or False")


# -- words ----------------------------------------------------------------------------------------


def text_of(value: Any, call: str, name: str, what: str = "a text") -> str:
    """Check a text; it must not be empty."""
    if not isinstance(value, str):
        raise unfit(call, name, value, what)
    if not value:
        raise unfit(call, name, value, f"{what}, and not empty", typed=False)
    return value


def choice_of(value: Any, choices: Sequence[str], call: str, name: str) -> str:
    """Check that a word is in `choices`."""
    expected = " or ".join(choices) if len(choices) < 3 else f"one of {', '.join(choices)}"
    if not isinstance(value, str):
        raise unfit(call, name, value, expected)
    if value not in choices:
        raise unfit(call, name, value, expected, typed=False, hint=did_you_mean(value, choices))
    return value


def path_of(value: Any, call: str, name: str) -> str:
    """Check a path or URL; return it as text.  Does not look at storage."""
    what = "a path or a URL, as text or os.PathLike"
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(text, str):
        is_bytes = isinstance(text, bytes)
        hint = "os.fsdecode(path) makes a text of bytes" if is_bytes else None
        raise unfit(call, name, value, what, hint=hint)
    if not text:
        hint = "'.' is this directory"
        raise unfit(call, name, value, f"{what}, and not empty", typed=False, hint=hint)
    if fault := _fault_in_path(text):
        raise unfit(call, name, value, f"{what}; this one {fault}", typed=False)
    return text


def _fault_in_path(text: str) -> str | None:
    if "\0" in text:
        return "has a NUL character"
    try:
        data = os.fsencode(text)
    except UnicodeEncodeError:
        return "has half of a surrogate pair"
    if len(data) > _MAX_PATH_BYTES:
        return f"has {len(data)} bytes, more than {_MAX_PATH_BYTES}"
    return None


def patterns_of(value: Any, call: str, name: str) -> tuple[str, ...]:
    """Check a pattern or a list of patterns; return them as a tuple."""
    what = "a pattern of names such as 'model.*', or a list of them"
    if isinstance(value, str):
        return (text_of(value, call, name, what),)
    if not isinstance(value, Iterable) or isinstance(value, (bytes, bytearray, dict)):
        raise unfit(call, name, value, what)
    patterns = tuple(value)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            fault = f"{what}; {shown(pattern)} is not a pattern"
            raise unfit(call, name, value, fault, typed=False)
    if not patterns:
        hint = f"leave {name} out to have everything"
        raise unfit(call, name, value, f"{what}, and not empty", typed=False, hint=hint)
    return patterns


def rules_of(
    value: Any, rules: Sequence[str], keys: Iterable[str] | None, call: str, name: str
) -> dict[str, str]:
    """Check rules by key of the state, or by a name below a key (`optim.common`).  None means no rules.
    `keys` is None if the keys of the state are not known yet."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        expected = f"a dict from keys of the state to one of {', '.join(rules)}"
        raise unfit(call, name, value, expected)
    known = [str(key).split(".", 1)[0] for key in value] if keys is None else [*keys]
    for key, rule in value.items():
        if not isinstance(key, str) or key.split(".", 1)[0] not in known:
            hint = did_you_mean(key, known) if isinstance(key, str) else None
            what = f"{call}({name}={{{shown(key)}: ...}}): the state has no such key"
            raise UsageError(what, hint=hint or f"its keys are {', '.join(map(repr, known))}")
        choice_of(rule, rules, call, f"{name}[{key!r}]")
    return dict(value)


# -- objects --------------------------------------------------------------------------------------


def instance_of(value: Any, kind: type[_T], call: str, name: str, what: str) -> _T:
    """Check that an object is of class `kind`; `what` names the class as users write it."""
    if not isinstance(value, kind):
        raise unfit(call, name, value, what)
    return value


def function_of(value: Any, call: str, name: str, what: str, takes: int) -> Any:
    """Check a callable that takes `takes` arguments; `what` describes them."""
    if not callable(value):
        raise unfit(call, name, value, f"a function {what}")
    if not _takes(value, takes):
        raise UsageError(f"{call}({name}={shown(value)}): must be a function {what}")
    return value


def _takes(function: Any, number: int) -> bool:
    """True if a function takes `number` arguments, or if its signature is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # many functions written in C have no signature
        return True
    try:
        signature.bind(*[None] * number)
    except TypeError:
        return False
    return True
