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
│   └── SegmentLost                  memory that an agent held is no more
├── NotRecoverable                   why each candidate step could not be used
└── RankErrors                       errors by rank: their texts, and the errors themselves
```

A message says what failed, where, what was expected and found, and what to do next (`hint`).  Names in it
may come from anywhere, so its text has no character that a terminal acts on (`printable`); what may be a
secret in a URL is left out (`redacted`).
Between the processes of holdfast they travel with all that they carry (`holdfast.base.wire`); they survive
pickling, too.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any


class HoldfastWarning(UserWarning):
    """A save failed, or a damaged step was passed over; training goes on."""


NOTICES: dict[str, str] = {
    "another-optimizer": "an optimizer that is not in the state steps parameters of a model that is",
    "buffers-of-ranks": "buffers that differ between ranks, of which the first rank's are saved",
    "dead-groups": "a restore has cut a wrapper's param_groups off from the optimizer inside",
    "exchanged": "a module that was restored, and has a fresh one in its place at the next save",
    "frozen-number": "a plain number of the state that neither this run nor the one before changes",
    "generation-buffer": "a step is saved amid batches that were generated with earlier weights",
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
    "other-run": "a step of another run that one of this run replaces",
    "parts-replaced": "an optimizer has parameters that the model has not any more",
    "positions": "parameters of an optimizer that nothing names",
    "replaced": "a container of the state that a restore had to replace",
    "same-class": "objects of one class that go by their number",
    "set-aside": "much is copied before each save returns",
    "settings-put-back": "settings of an optimizer that another object wrote while it was loaded",
    "tensors-outside": "tensors in attributes that no state_dict() has",
    "two-values": "one object of the state, saved with two values",
    "unsaved-note": "a label or metrics of a step that no save was due of",
    "untaken-key": "a key of the restored step that the state lacks, or that comes after the restore",
    "untied": "tensors of a module that were one when they were saved, and are two",
}
"""Notices of a training, each told once: in a few words what was seen, by the name that silences it.
Each has a row in docs/reference/notices.md."""
_silenced: set[str] = set()


def silence(*notices: str) -> None:
    """Tell nothing of these notices in this process any more; their names stand at the end of what is told,
    in brackets: `holdfast.silence("gradients")`.

    UsageError for a name that there is not.  Failures cannot be silenced.
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
    """The text of a notice, with its name behind it; None if the user has silenced it."""
    assert notice in NOTICES, notice
    return None if notice in _silenced else f"{message} [{notice}]"


def warn_user(message: str, hint: str | None = None, *, notice: str | None = None) -> None:
    """Give a HoldfastWarning at the line of the user's script that called holdfast.  `notice`: its name, if
    it is one that can be silenced.

    That is the first line, going back through the calls, which is neither in holdfast nor in torch or the
    standard library, whose hooks call holdfast, too.  A helper thread has no such line: that of the thread
    which waits for it (`waiting`) is taken.  Frames of a thread that runs are not looked at, which can hang
    Python 3.11.0 to 3.11.4 and crash a free-threaded one.
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
    """The text, with its characters that are no visible ones written as `\\x1b`, but for those in `keep`.

    A terminal acts on some (its title, the clipboard, what was written before), and others turn the order
    of letters round.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


_SECRET = "key|secret|token|pass|pwd|auth|sas|sig|cred"
SECRET = re.compile(_SECRET, re.IGNORECASE)
"""Parts of names by which the options of a URL look like secrets."""
_IN_URL = re.compile(
    rf"(://|:/{{1,3}}(?=[^/\s'\"@]*:))[^/\s'\"]*@"  # also of a slash too few or too many
    rf"|([?&][^=&\s]*(?:{_SECRET})[^=&\s]*=)[^&\s'\"]+",
    re.IGNORECASE,
)


def redacted(text: str) -> str:
    """The text, with `...` for who is named before the host of a URL, and for options that look like
    secrets."""
    return _IN_URL.sub(lambda m: f"{m[1]}...@" if m[1] else f"{m[2]}...", text)


class _Waiting(threading.local):
    frames: Sequence[FrameType] = ()
    """The frame, if there is one, in which another thread waits for what this one does for it."""


waiting = _Waiting()

_HOLDFAST = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PYTHON = os.path.dirname(os.__file__) + os.sep
_PACKAGES = (os.path.join(_PYTHON, "site-packages"), os.path.join(_PYTHON, "dist-packages"))


def _caller(frame: FrameType | None) -> FrameType | None:
    """The first frame of a user's code, going back from `frame`; None if there is none."""
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    return frame


def _is_users(frame: FrameType) -> bool:
    path, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
    if path.startswith((_HOLDFAST, "<frozen")) or module.split(".")[0] == "torch":
        return False
    return not path.startswith(_PYTHON) or path.startswith(_PACKAGES)


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
        """True if the message states it: a key by itself, a number after its name, as in `rank 3`."""
        stated = re.escape(value) if name == "file" else rf"\b{name} {value}\b"
        return re.search(stated, self.message) is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuilt, (type(self), self.args, self.__dict__)


def rebuilt(
    kind: type[HoldfastError], args: tuple[Any, ...], fields: dict[str, Any]
) -> HoldfastError:
    """Return the error that had these arguments and attributes in another process."""
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
    """Storage said no.  `retryable`: the same call may succeed later."""

    retryable = False


class NotFound(StoreError):
    """No object of that key."""


class Exists(StoreError):
    """put-if-absent found an object of that key."""


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
    """Memory that an agent held is no more, or holds something else now."""


class NotRecoverable(HoldfastError):
    """No step could be restored; `reasons` maps each candidate step to why."""

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
"""What is wrong with a step, and not with the call: an older step may do."""

for _kind in [kind for kind in vars().values() if isinstance(kind, type)]:
    if issubclass(_kind, (HoldfastError, HoldfastWarning)):
        _kind.__module__ = "holdfast.errors"  # as tracebacks show it, and users import it
