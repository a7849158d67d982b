"""Messages between processes: how they are decoded, and the single form of errors in them.

Ranks report failures to each other, an agent refuses a request, a writer of records gives up.  The receiver
raises the same error: the same class, hint, rank, step and other attributes.

```
rank 3   OutOfSpace("disk is full", hint="free some") ── encode_error ──► bytes
rank 0   bytes ── decode_error(rank=3) ──► OutOfSpace("disk is full", rank=3, hint="free some")
```

A message with an error among other fields holds a `WireError`; `encode_error` and `decode_error` are for
messages that consist of an error alone.  An error outside holdfast's tree (a `KeyError` of a user's
`state_dict`) arrives as an AgentError whose message begins with the name of its class.  A private subclass
arrives as its nearest public base class.
"""

from __future__ import annotations

import operator
import os
import threading
from functools import cache
from typing import Any, SupportsIndex, TypeVar, overload

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.base import errors
from holdfast.base.errors import AgentError, HoldfastError, RankErrors, rebuild_error

_T = TypeVar("_T")
_Data = bytes | bytearray | memoryview

ERROR_KINDS: dict[str, type[HoldfastError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, HoldfastError)
}
"""The classes of the tree, by name."""


class WireError(
    msgspec.Struct, frozen=True, rename={"kind": "error", "message": "text"}, kw_only=True
):
    """An error in a message to another process.  Its fields are the attributes of the errors.

    An agent answers with this map.  Older processes and agents know only "error", "text" and "hint".
    """

    kind: str
    """Name of the error's class."""
    message: str
    hint: str | None = None
    step: int | None = None
    key: str | None = None
    rank: int | None = None
    phase: str = ""
    """The phase that failed, if it was not the rank's own part: `commit`."""

    start: int | UnsetType | None = UNSET
    stop: int | UnsetType | None = UNSET
    expected: str | UnsetType | None = UNSET
    found: str | UnsetType | None = UNSET
    problems: tuple[str, ...] | UnsetType = UNSET
    reasons: dict[int, str] | UnsetType = UNSET
    errors: dict[int, str] | UnsetType = UNSET
    causes: dict[int, WireError] | UnsetType = UNSET

    @classmethod
    def of(cls, error: BaseException, phase: str = "") -> WireError:
        """Return the form of an error."""
        if not isinstance(error, HoldfastError):
            return cls(kind=type(error).__name__, message=_plain(str(error)), phase=phase)
        kind = next(k.__name__ for k in type(error).__mro__ if ERROR_KINDS.get(k.__name__) is k)
        known = {n: _plain(v) for n, v in vars(error).items() if n in cls.__struct_fields__}
        if isinstance(error, RankErrors):
            known["causes"] = {rank: cls.of(one) for rank, one in error.causes.items()}
        return cls(kind=kind, phase=phase, **known)

    def error(self, *, rank: int | None = None, step: int | None = None) -> HoldfastError:
        """Return the error itself.  `rank`, `step`: its place, if the error does not state them."""
        where = {
            "hint": self.hint or None,
            "step": step if self.step is None else self.step,
            "key": self.key,
            "rank": rank if self.rank is None else self.rank,
        }
        if self.kind not in ERROR_KINDS:
            said = f"{self.kind}: {self.message}" if self.message else self.kind
            return AgentError(said, **where)  # type: ignore[arg-type]
        own = {name: value for name in _OWN if (value := getattr(self, name)) is not UNSET}
        if self.causes is not UNSET:
            own["causes"] = {r: one.error() for r, one in self.causes.items()}
        fields = {"message": self.message, **where, **own}
        return rebuild_error(ERROR_KINDS[self.kind], (self.message,), fields)

    @property
    def text(self) -> str:
        """Phase, class and message of the error, with place and hint, for a list of errors."""
        said = f"{self.kind}: {self.error() if self.kind in ERROR_KINDS else self.message}"
        return f"{self.phase}: {said}" if self.phase else said


def _plain(value: Any) -> Any:
    """Return a value that msgspec can encode: an int for a numpy integer, escapes for lone surrogates."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return operator.index(value) if isinstance(value, SupportsIndex) else value


_OWN = ("start", "stop", "expected", "found", "problems", "reasons", "errors", "causes")
"""Attributes that only errors of some classes have."""


def encode_error(error: BaseException) -> bytes:
    """Encode an error for another process; the bytes are never empty."""
    return msgspec.msgpack.encode(WireError.of(error))


def decode_error(
    data: bytes | memoryview, *, rank: int | None = None, step: int | None = None
) -> HoldfastError:
    """Decode an error of another process.  `rank`, `step`: see `WireError.error`."""
    return wire_error(data).error(rank=rank, step=step)


def wire_error(data: bytes | memoryview) -> WireError:
    """Decode the `WireError` of another process."""
    return decode_msgpack(data, WireError)


def rank_errors(what: str, failed: dict[int, WireError], step: int | None = None) -> RankErrors:
    """Return the error that every rank raises when `what` failed on the ranks in `failed`."""
    texts = {rank: error.text for rank, error in failed.items()}
    causes = {rank: error.error(rank=rank, step=step) for rank, error in failed.items()}
    return RankErrors(what, texts, causes, step=step)


_working_out = threading.RLock()
os.register_at_fork(
    before=_working_out.acquire,
    after_in_parent=_working_out.release,
    after_in_child=_working_out.release,
)


@cache
def _decoder(make: Any, kind: Any) -> Any:
    """Return the decoder of a class; one thread at a time makes it (see `decode_msgpack`)."""
    with _working_out:
        return make(kind)


def _decoded(make: Any, data: _Data, kind: Any) -> Any:
    try:
        return _decoder(make, kind).decode(data)
    except (RecursionError, UnicodeDecodeError) as error:  # nested too deep; no UTF-8
        raise msgspec.DecodeError(str(error)) from None


@overload
def decode_msgpack(data: _Data, kind: type[_T]) -> _T: ...
@overload
def decode_msgpack(data: _Data, kind: Any) -> Any: ...
def decode_msgpack(data: _Data, kind: Any) -> Any:
    """Decode msgpack into a value of class `kind`.

    msgspec computes the fields of a class at its first use and stores them before they are complete.  A
    second thread that decodes the same class at that moment crashes the process.  So holdfast decodes into
    classes only by `decode_msgpack` and `decode_json`.

    Any fault of the bytes is a msgspec.DecodeError.
    """
    return _decoded(msgspec.msgpack.Decoder, data, kind)


@overload
def decode_json(data: _Data, kind: type[_T]) -> _T: ...
@overload
def decode_json(data: _Data, kind: Any) -> Any: ...
def decode_json(data: _Data, kind: Any) -> Any:
    """Decode JSON into a value of class `kind`."""
    return _decoded(msgspec.json.Decoder, data, kind)
