"""Messages between processes: how they are decoded, and the one form of errors.

Ranks tell each other what failed, an agent refuses a request, a writer of records gives up.  At the other
end the same error is raised: its class, its hint, the rank, the step and all else that it carries.

```
rank 3   OutOfSpace("disk is full", hint="free some") ── encode_error ──► bytes
rank 0   bytes ── decode_error(rank=3) ──► OutOfSpace("disk is full", rank=3, hint="free some")
```

A message that has an error as one field of several holds a `WireError`; `encode_error` and `decode_error`
are for messages that are nothing else.  An error that is not of holdfast's tree (a `KeyError` of somebody's
`state_dict`) arrives as AgentError whose message begins with the name of its class.  A private subclass
arrives as the class of the tree that it is of.
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
from holdfast.base.errors import AgentError, HoldfastError, RankErrors, rebuilt

T = TypeVar("T")
Data = bytes | bytearray | memoryview

KINDS: dict[str, type[HoldfastError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, HoldfastError)
}
"""The classes of the tree, by name."""


class WireError(
    msgspec.Struct, frozen=True, rename={"kind": "error", "message": "text"}, kw_only=True
):
    """An error as other processes are told of it.  Its fields are the attributes of the errors.

    An agent answers with this map; "error", "text" and "hint" are what processes and agents of before the
    other fields look for, and send.
    """

    kind: str
    """Name of the error's class."""
    message: str
    hint: str | None = None
    step: int | None = None
    key: str | None = None
    rank: int | None = None
    phase: str = ""
    """What failed, if it was not the rank's own part: `commit`."""

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
        kind = next(k.__name__ for k in type(error).__mro__ if KINDS.get(k.__name__) is k)
        known = {n: _plain(v) for n, v in vars(error).items() if n in cls.__struct_fields__}
        if isinstance(error, RankErrors):
            known["causes"] = {rank: cls.of(one) for rank, one in error.causes.items()}
        return cls(kind=kind, phase=phase, **known)

    def error(self, *, rank: int | None = None, step: int | None = None) -> HoldfastError:
        """Return the error itself.  `rank`, `step`: where it happened, if the error does not say so."""
        where = {
            "hint": self.hint or None,
            "step": step if self.step is None else self.step,
            "key": self.key,
            "rank": rank if self.rank is None else self.rank,
        }
        if self.kind not in KINDS:
            said = f"{self.kind}: {self.message}" if self.message else self.kind
            return AgentError(said, **where)  # type: ignore[arg-type]
        own = {name: value for name in OWN if (value := getattr(self, name)) is not UNSET}
        if self.causes is not UNSET:
            own["causes"] = {r: one.error() for r, one in self.causes.items()}
        fields = {"message": self.message, **where, **own}
        return rebuilt(KINDS[self.kind], (self.message,), fields)

    @property
    def text(self) -> str:
        """The error as one of several: what failed, its class, its message with place and hint."""
        said = f"{self.kind}: {self.error() if self.kind in KINDS else self.message}"
        return f"{self.phase}: {said}" if self.phase else said


def _plain(value: Any) -> Any:
    """Return a value that can be encoded: an int for a number of numpy's, \\udc80 for what is no UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return operator.index(value) if isinstance(value, SupportsIndex) else value


OWN = ("start", "stop", "expected", "found", "problems", "reasons", "errors", "causes")
"""Attributes that only errors of some classes have."""


def encode_error(error: BaseException) -> bytes:
    """Return the bytes by which another process learns of an error; they are never empty."""
    return msgspec.msgpack.encode(WireError.of(error))


def decode_error(
    data: bytes | memoryview, *, rank: int | None = None, step: int | None = None
) -> HoldfastError:
    """Return the error that another process has encoded.  `rank`, `step`: as of `WireError.error`."""
    return wire_error(data).error(rank=rank, step=step)


def wire_error(data: bytes | memoryview) -> WireError:
    """Return the form of an error that another process has encoded."""
    return decode_msgpack(data, WireError)


def rank_errors(what: str, failed: dict[int, WireError], step: int | None = None) -> RankErrors:
    """Return the error that every rank raises when `what` failed on the ranks in `failed`."""
    texts = {rank: one.text for rank, one in failed.items()}
    causes = {rank: one.error(rank=rank, step=step) for rank, one in failed.items()}
    return RankErrors(what, texts, causes, step=step)


_working_out = threading.RLock()
os.register_at_fork(
    before=_working_out.acquire,
    after_in_parent=_working_out.release,
    after_in_child=_working_out.release,
)


@cache
def _decoder(make: Any, kind: Any) -> Any:
    """Return a decoder of a kind.  One thread at a time makes one: see `decode_msgpack`."""
    with _working_out:
        return make(kind)


def _decoded(make: Any, data: Data, kind: Any) -> Any:
    try:
        return _decoder(make, kind).decode(data)
    except (RecursionError, UnicodeDecodeError) as error:  # nested too deep; no UTF-8
        raise msgspec.DecodeError(str(error)) from None


@overload
def decode_msgpack(data: Data, kind: type[T]) -> T: ...
@overload
def decode_msgpack(data: Data, kind: Any) -> Any: ...
def decode_msgpack(data: Data, kind: Any) -> Any:
    """Return the value of this kind that is encoded as msgpack.

    msgspec works out the fields of a class at its first use, and puts them down before all are known: a
    second thread that decodes the same class in this moment crashes the process, without an error.  So
    all that holdfast decodes into a class goes through `decode_msgpack` and `decode_json`.

    Whatever is wrong with the bytes is a msgspec.DecodeError.
    """
    return _decoded(msgspec.msgpack.Decoder, data, kind)


@overload
def decode_json(data: Data, kind: type[T]) -> T: ...
@overload
def decode_json(data: Data, kind: Any) -> Any: ...
def decode_json(data: Data, kind: Any) -> Any:
    """Return the value of this kind that is encoded as JSON."""
    return _decoded(msgspec.json.Decoder, data, kind)
