"""Stores hold checkpoints: `Store` is what holdfast asks of storage, the rest are answers to it.

    open_store("/scratch/run")            a directory
    open_store("file:///scratch/run")     the same
    open_store("memory://name")           this process's memory, shared by name

`holdfast.testing.StoreTests` tells whether another answer is a right one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote_to_bytes

from holdfast.arguments import path_of
from holdfast.errors import UsageError
from holdfast.near import near
from holdfast.store.contract import Entry, Reader, Store, Writer
from holdfast.store.local import LocalStore

if TYPE_CHECKING:
    from holdfast.store.memory import MemoryStore

T = TypeVar("T")

__all__ = [
    "Entry",
    "LocalStore",
    "MemoryStore",
    "Reader",
    "Store",
    "Writer",
    "open_store",
]

_OBJECT_STORAGE = ("s3", "gs", "az")
SCHEMES = ("file", "memory", *_OBJECT_STORAGE)
"""Schemes that a URL can begin with, before `://`."""


def split_prefix(text: str) -> tuple[str, str] | None:
    """Split `format:PATH`, which names a format of others, into its two parts; None for a path or URL.

    A path that exists is a path, with or without a colon.
    """
    prefix, colon, rest = text.partition(":")
    if not colon or "/" in prefix or rest.startswith("//") or os.path.exists(text):
        return None
    return prefix, rest


def __getattr__(name: str) -> Any:
    """The store in memory, which a run with a path does not need."""
    if name == "MemoryStore":
        from holdfast.store.memory import MemoryStore

        return MemoryStore
    raise AttributeError(f"module 'holdfast.store' has no attribute {name!r}")


def open_store(url: str | os.PathLike[str]) -> Store:
    """The store at a path or URL.  Touches nothing: the first write makes what is missing."""
    text = path_of(url, "open_store", "url")
    scheme, separator, rest = text.partition("://")
    if not separator or "/" in scheme:
        return LocalStore(text)
    if scheme == "file":
        return LocalStore(_file_path(text, rest))
    if scheme == "memory":
        from holdfast.store.memory import MemoryStore

        return MemoryStore(rest)
    raise _unknown_scheme(text, scheme)


def be_patient(store: Store, limit_s: float | None) -> None:
    """Let each operation take up to `limit_s` (None: no limit); a store in memory answers at once."""
    if isinstance(store, LocalStore):
        store.patience.limit_s = limit_s


def in_one(store: Store, call: Callable[[], T], what: str) -> T:
    """Do `call`, which makes several short operations of a store, as one of them."""
    if isinstance(store, LocalStore):
        return store.patience.run(call, what, store.root)
    return call()


def _file_path(url: str, rest: str) -> str:
    path = rest.removeprefix("localhost")
    if not path.startswith("/"):
        raise UsageError(
            f"cannot open '{url}': it names a host", hint=f"file:///{rest} has three /"
        )
    return os.fsdecode(unquote_to_bytes(path))


def _unknown_scheme(url: str, scheme: str) -> UsageError:
    works = "what works now is a path, file:// and memory://"
    if scheme in _OBJECT_STORAGE:
        later = "object storage comes with a later release"
        return UsageError(f"cannot open '{url}': {later}; {works}", hint="use a shared file system")
    return UsageError(
        f"cannot open '{url}': unknown scheme '{scheme}'; {works}", hint=near(scheme, SCHEMES)
    )
