"""The exception tree.  Every error that leaves holdfast is one of these.

```
HoldfastError
├── UsageError (also ValueError)     the call cannot be meant as written
│   ├── RuleError                    a rule for mapping state is missing or contradicts
│   ├── LayoutError                  a tensor's cut over the ranks cannot be described
│   └── StateMismatch                checkpoint and live state differ: all names, not the first
├── FormatError                      bytes that are not a holdfast checkpoint
│   ├── Corrupt                      bytes that were one: file, range, expected, found
│   └── UnsupportedVersion
├── StoreError                       .retryable
│   ├── NotFound  Exists  Unavailable  OutOfSpace
├── AgentError                       a peer did not do its part
│   ├── Deadline (also TimeoutError) ... in time: names who did not answer
│   ├── AgentUnreachable             the agent of a node does not answer
│   └── SegmentLost                  memory that an agent held is gone
├── NotRecoverable                   why each candidate step could not be used
└── RankErrors                       errors by rank: their texts, and the errors themselves
```

A message states the failure, the place, the expected and the found value, and the next action (`hint`).
Names in it may come from untrusted files, so control characters are escaped (`printable`) and possible
secrets in URLs are left out (`redacted`).  Errors keep all their attributes between the processes of
holdfast (`holdfast.base.wire`) and when pickled.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import warnings
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import Any


class HoldfastWarning(UserWarning):
    """A save failed, or a damaged step was passed over; training goes on."""


NOTICES: dict[str, str] = {
    "another-optimizer": "an optimizer that is not in the state steps parameters of a model that is",
    "buffers-of-ranks": "buffers differ between ranks, and those of the first rank are saved",
    "dead-groups": "a restore has cut a wrapper's param_groups off from the optimizer inside",
    "exchanged": "a restored module was replaced by a fresh one before the next save",
    "frozen-number": "a plain number of the state that neither this run nor the previous run changes",
    "generation-buffer": "a step is saved between batches that were generated with earlier weights",
    "generators-outside": "random number generators in attributes, whose states no state_dict() has",
    "gradients": "a step is saved while gradients are accumulated, and they are used later",
    "held-long": "training was held for more than a second by a save",
    "hooked-parameters": "hooks at gradients of parameters that no optimizer of the state has",
    "load-writes": "an object writes to weights or optimizer states while it is loaded",
    "merged-adapters": "a step is saved while adapters are merged into the weights",
    "never-changes": "nothing of the state changes",
    "never-steps": "an optimizer of the state makes no steps, and another one does",
    "newer-native": "a checkpoint of the trainer's own that is newer than the step that is restored",
    "numbers-outside": "numbers that no state_dict() has count up between saves",
    "one-rank-alone": "state that some ranks have and others lack",
    "order": "the order of a data loader's epoch that no step can hold",
    "other-data": "a place in the data that was counted over other data, or in other batches",
    "other-run": "a step of this run replaces a step of another run",
    "parts-replaced": "an optimizer has parameters that the model no longer has",
    "positions": "parameters of an optimizer that have no name",
    "replaced": "a container of the state that a restore had to replace",
    "same-class": "objects of the same class that are named by their number",
    "set-aside": "much is copied before each save returns",
    "settings-put-back": "settings of an optimizer that another object wrote while it was loaded",
    "tensors-outside": "tensors in attributes that no state_dict() has",
    "two-values": "one object of the state is saved with two values",
    "unsaved-note": "a label or metrics for a step at which no save was due",
    "untaken-key": "a key of the restored step that the state lacks, or that comes after the restore",
    "untied": "tensors of a module that were tied when they were saved, and are separate now",
}
"""Notices about a training, by the name that silences them; each is given once.
Each has a row in docs/reference/notices.md."""
_silenced: set[str] = set()


def silence(*notices: str) -> None:
    """Silence notices in this process by name: `holdfast.silence("gradients")`.  A notice ends with its
    name in brackets.

    UsageError for an unknown name.  Failures cannot be silenced.
    """
    for name in notices:
        if not isinstance(name, str) or name not in NOTICES:
            shown = repr(name) if isinstance(name, str) else f"of type {type(name).__name__}"
            raise UsageError(
                f"silence(notices): there is no notice {shown}",
                hint=f"there are: {', '.join(sorted(NOTICES))}",
            )
        _silenced.add(name)


def notice_text(notice: str, message: str) -> str | None:
    """Return the text of a notice, with its name at the end; None if the user has silenced it."""
    assert notice in NOTICES, notice
    return None if notice in _silenced else f"{message} [{notice}]"


def warn_user(message: str, hint: str | None = None, *, notice: str | None = None) -> None:
    """Give a HoldfastWarning at the line of the user's script that called holdfast.  `notice`: the name by
    which users can silence it.

    That line is in the innermost frame outside holdfast, torch and the standard library (hooks of the
    latter two call holdfast).  A helper thread has no such frame, so the frames of the thread that waits
    for it are used (`waiting`).  Frames of a running thread are never read: that can hang Python 3.11.0 to
    3.11.4 and crash a free-threaded Python.
    """
    told = message if notice is None else notice_text(notice, message)
    if told is None:
        return
    text = printable(redacted(told if hint is None else f"{told}\n  hint: {hint}"), "\n")
    frame = _caller(sys._getframe()) or _caller(next(iter(waiting.frames), None))
    if frame is None:
        warnings.warn(text, HoldfastWarning, stacklevel=2)
        return
    names = frame.f_globals
    warnings.warn_explicit(
        text, HoldfastWarning, frame.f_code.co_filename, frame.f_lineno,
        names.get("__name__"), names.setdefault("__warningregistry__", {}),
    )  # fmt: skip


def printable(text: str, keep: str = "") -> str:
    """Escape the invisible characters of a text, as `\\x1b`, except those in `keep`.

    A terminal obeys some of them (they set its title or the clipboard, or overwrite earlier lines), and
    others reverse the order of letters.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


_SECRET = "key|secret|token|pass|pwd|auth|sas|sig|cred"
SECRET = re.compile(_SECRET, re.IGNORECASE)
"""Matches names of URL options that look like secrets."""
_IN_URL = re.compile(
    rf"(://|:/{{1,3}}(?=[^/\s'\"@]*:))[^/\s'\"]*@"  # also with a slash too few or too many
    rf"|([?&][^=&\s]*(?:{_SECRET})[^=&\s]*=)[^&\s'\"]+",
    re.IGNORECASE,
)


def redacted(text: str) -> str:
    """Replace the user part of URLs, and options that look like secrets, by `...`."""
    return _IN_URL.sub(lambda m: f"{m[1]}...@" if m[1] else f"{m[2]}...", text)


class _Waiting(threading.local):
    frames: Sequence[FrameType] = ()
    """The frame, if any, in which another thread waits for the work of this thread."""


waiting = _Waiting()

_HOLDFAST = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PYTHON = os.path.dirname(os.__file__) + os.sep
_PACKAGES = (os.path.join(_PYTHON, "site-packages"), os.path.join(_PYTHON, "dist-packages"))


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of a user's code, from `frame` outwards; None if there is none."""
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    return frame


def is_users(frame: FrameType) -> bool:
    path, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
    is_ours = (
        path.startswith(_HOLDFAST) or module.split(".")[0] == "holdfast"
    )  # and what is generated
    if is_ours or path.startswith("<frozen") or module.split(".")[0] == "torch":
        return False
    return not path.startswith(_PYTHON) or path.startswith(_PACKAGES)


def need(package: str, owner: Any, *names: str) -> list[Any]:
    """Return attributes of another package that it may not have in every version, or refuse its version.

    For private names, which `docs/private_places.py` lists with reasons.  The code that relies on them asks
    for them where it begins: an AttributeError would come in the middle of a training.  `owner`: an object,
    a class, a module or the name of one.  `package`: the distribution that it is of, or "Python".  What a
    class only declares for its objects is returned as None.

    UsageError names the package, its version and all that is missing.
    """
    from importlib import import_module

    try:
        holder = import_module(owner) if isinstance(owner, str) else owner
    except ImportError:
        holder = None
    declared = getattr(holder, "__annotations__", ()) if isinstance(holder, type) else ()
    missing = [name for name in names if not hasattr(holder, name) and name not in declared]
    if missing:
        named = owner if isinstance(owner, (str, type, ModuleType)) else type(owner)
        where = named if isinstance(named, str) else named.__name__
        raise UsageError(
            f"{package} {_version(package)} has no {where}.{', '.join(missing)}, which holdfast relies on",
            hint=f"install a version of {package} that is among those tested (reference/versions.md in the "
            "documentation), or a newer holdfast",
        )
    return [getattr(holder, name, None) for name in names]


def _version(package: str) -> str:
    """The version of an installed package, or of Python."""
    from importlib import metadata
    from platform import python_version

    try:
        return python_version() if package == "Python" else metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(of unknown version)"


class HoldfastError(Exception):
    """Base of all errors; carries the step, store key, rank and a hint where they are known."""

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        key: str | None = None,
        rank: int | None = None,
        hint: str | None = None,
    ) -> None:
        self.message = redacted(message)
        super().__init__(self.message)
        self.step = step
        self.key = key
        self.rank = rank
        self.hint = hint and redacted(hint)

    def __str__(self) -> str:
        where = [
            f"{name} {value}"
            for name, value in (("step", self.step), ("file", self.key), ("rank", self.rank))
            if value is not None and not self._says(name, str(value))
        ]
        text = self.message + (f" ({', '.join(where)})" if where else "")
        return printable(text + (f"\n  hint: {self.hint}" if self.hint else ""), "\n")

    def _says(self, name: str, value: str) -> bool:
        """True if the message has the value: a key by itself, or a number after its name (`rank 3`)."""
        stated = re.escape(value) if name == "file" else rf"\b{name} {value}\b"
        return re.search(stated, self.message) is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_error, (type(self), self.args, self.__dict__)


def rebuild_error(
    kind: type[HoldfastError], args: tuple[Any, ...], fields: dict[str, Any]
) -> HoldfastError:
    """Return an error of class `kind` with these arguments and attributes, without calling `__init__`."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class UsageError(HoldfastError, ValueError):
    """The call cannot be meant as written."""


class RuleError(UsageError):
    """A value cannot be mapped to the new world size by the rules given."""


class LayoutError(UsageError):
    """A tensor's cut over the ranks cannot be described or does not cover the tensor."""


class StateMismatch(UsageError):
    """The checkpoint and the live state differ; `problems` lists every difference."""

    def __init__(self, message: str, problems: tuple[str, ...] = (), **where: Any) -> None:
        super().__init__(message, **where)
        self.problems = problems


class FormatError(HoldfastError):
    """The bytes are not a holdfast checkpoint, or break its rules."""


class Corrupt(FormatError):
    """Bytes differ from what was written: `key`, byte range `start..stop`, `expected`, `found`."""

    def __init__(
        self,
        message: str,
        *,
        start: int | None = None,
        stop: int | None = None,
        expected: str | None = None,
        found: str | None = None,
        **where: Any,
    ) -> None:
        super().__init__(message, **where)
        self.start = start
        self.stop = stop
        self.expected = expected
        self.found = found


class UnsupportedVersion(FormatError):
    """A newer holdfast wrote this."""


class StoreError(HoldfastError):
    """Storage refused or failed.  `retryable`: the same call may succeed later."""

    retryable = False


class NotFound(StoreError):
    """There is no object under this key."""


class Exists(StoreError):
    """put-if-absent found an object under this key."""


class Unavailable(StoreError):
    """Storage failed in a way that may pass (I/O error, timeout)."""

    retryable = True


class OutOfSpace(StoreError):
    """The store is full or over quota."""


class AgentError(HoldfastError):
    """Another process of the job did not do its part."""


class Deadline(AgentError, TimeoutError):
    """A wait ran out; the message names who did not answer."""


class AgentUnreachable(AgentError):
    """The agent of a node does not answer."""


class SegmentLost(AgentError):
    """Memory that an agent held is gone, or was reused."""


class NotRecoverable(HoldfastError):
    """No step could be restored; `reasons` gives the reason for each candidate step."""

    def __init__(self, message: str, reasons: dict[int, str] | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.reasons = reasons or {}


class RankErrors(HoldfastError):
    """Errors by rank, the same on every rank: `errors` has their texts, `causes` the errors themselves."""

    def __init__(
        self,
        what: str,
        errors: dict[int, str],
        causes: dict[int, HoldfastError] | None = None,
        **where: Any,
    ) -> None:
        lines = [f"  rank {rank}: {text}" for rank, text in sorted(errors.items())]
        super().__init__("\n".join([f"{what} failed on {len(errors)} rank(s)", *lines]), **where)
        self.errors = errors
        self.causes = causes or {}


PASSED_OVER = (Corrupt, FormatError, NotFound)
"""Errors that blame the step and not the call: a restore then tries an older step."""

for _kind in [kind for kind in vars().values() if isinstance(kind, type)]:
    if issubclass(_kind, (HoldfastError, HoldfastWarning)):
        _kind.__module__ = "holdfast.errors"  # as tracebacks show it, and users import it
