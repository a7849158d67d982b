"""Stores hold checkpoints: `Store` is what holdfast asks of storage, the rest are answers to it.

    open_store("/scratch/run")            a directory
    open_store("file:///scratch/run")     the same
    open_store("memory://name")           this process's memory, shared by name
    open_store("s3://bucket/run")         a bucket (gs:// and az:// too): extra torch-holdfast[object]

`holdfast.testing.StoreTests` tells whether another answer is a right one.  `register` gives it a scheme, or
a package that has it does so by an entry point, which processes in the background find as well:

    [project.entry-points."holdfast.stores"]
    swift = "my_package:SwiftStore"       # called with the URL
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote_to_bytes

from holdfast.base.arguments import function_of, path_of, unfit
from holdfast.base.errors import UsageError
from holdfast.base.patience import Patience
from holdfast.base.suggest import did_you_mean
from holdfast.base.threads import in_threads
from holdfast.core.store.contract import Bounded, Bulk, Entry, Reader, Store, Writer
from holdfast.core.store.local import LocalStore

if TYPE_CHECKING:
    from holdfast.core.store.memory import MemoryStore

_T = TypeVar("_T")

__all__ = [
    "Bulk",
    "Entry",
    "LocalStore",
    "MemoryStore",
    "Reader",
    "Store",
    "Writer",
    "open_store",
    "register",
]

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")

_BUCKETS = ("s3", "gs", "az")
SCHEMES = ("file", "memory", *_BUCKETS)
"""Schemes of our own that a URL can begin with, before `://`."""
_REQUESTS = 16
"""Small requests that are made at a time, where each takes a way over a network."""
_ENTRY_POINTS = "holdfast.stores"
"""Group of entry points by which packages bring schemes of theirs."""
_registered: dict[str, Callable[[str], Store]] = {}


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
        from holdfast.core.store.memory import MemoryStore

        return MemoryStore
    raise AttributeError(f"module 'holdfast.store' has no attribute {name!r}")


def register(scheme: str, factory: Callable[[str], Store]) -> None:
    """Let URLs that begin with `scheme://` be opened by `factory(url)`, in this process.

    Agents and writers of records are other processes, which open a store again by its `url`: for those a
    package needs an entry point of the group `holdfast.stores`.  UsageError for a scheme of our own.
    """
    if not isinstance(scheme, str) or _SCHEME.fullmatch(scheme) is None:
        raise unfit("register", "scheme", scheme, "a text such as 'swift', without ://")
    if scheme in SCHEMES:
        raise UsageError(f"register: {scheme}:// is a scheme of holdfast's own")
    _registered[scheme] = function_of(factory, "register", "factory", "that takes a URL", 1)


def open_store(url: str | os.PathLike[str]) -> Store:
    """The store at a path or URL.  Touches nothing: the first write makes what is missing."""
    text = path_of(url, "open_store", "url")
    scheme, separator, rest = text.partition("://")
    if not separator or "/" in scheme:
        if text.startswith(tuple(f"{bucket}:/" for bucket in _BUCKETS)) and not os.path.exists(
            text
        ):
            raise UsageError(
                f"{text[:2]}:/ with one slash begins no URL, and no path that is there"
            )
        return LocalStore(text)
    if scheme == "file":
        return LocalStore(_file_path(text, rest))
    if scheme == "memory":
        from holdfast.core.store.memory import MemoryStore

        return MemoryStore(rest)
    if scheme in _BUCKETS:
        from holdfast.core.store.objects import ObjectStore

        return ObjectStore(text)
    return _factory(scheme)(text)


def _factory(scheme: str) -> Callable[[str], Store]:
    """What opens URLs of a scheme that is not ours.  UsageError if nothing does."""
    found = _registered.get(scheme)
    if found is None:
        from importlib.metadata import entry_points

        brought = {point.name: point for point in entry_points(group=_ENTRY_POINTS)}
        if scheme not in brought:
            known = (*SCHEMES, *_registered, *brought)
            shown = (
                f"unknown scheme {scheme!r}" if _SCHEME.fullmatch(scheme) else "it has no scheme"
            )
            raise UsageError(
                f"cannot open a URL: {shown}; there are a path, "
                f"{', '.join(f'{one}://' for one in known)}",
                hint=did_you_mean(scheme, known),
            )
        found = _registered[scheme] = brought[scheme].load()
    return found


def be_patient(store: Store, limit_s: float | None) -> None:
    """Let each operation take up to `limit_s` (None: no limit); a store in memory answers at once."""
    patience = getattr(store, "patience", None)
    if isinstance(patience, Patience):
        patience.limit_s = limit_s


def in_one(store: Store, call: Callable[[], _T], what: str) -> _T:
    """Do `call`, which makes several short operations of a store, as one of them."""
    if isinstance(store, LocalStore):
        return store.patience.run(call, what, store.root)
    return call()


def at_a_time(store: Store) -> int:
    """Number of threads for small requests."""
    return 1 if isinstance(store, LocalStore) else _REQUESTS


def delete_many(store: Store, keys: Sequence[str]) -> None:
    """Remove objects, in any order: by few requests if the store can (`Bulk`)."""
    if keys and isinstance(store, Bulk):
        store.delete_many(keys)
    elif keys:
        in_threads(store.delete, [*keys], at_a_time(store))


def get_small(store: Store, key: str) -> bytes:
    """The whole of a small object, such as a claim.  Corrupt at once if it is a large one, if the store can
    tell (`Bounded`)."""
    return store.get_small(key) if isinstance(store, Bounded) else store.get(key)


def keys_below(store: Store, prefixes: Collection[str]) -> dict[str, int]:
    """All keys that begin with one of `prefixes`, sorted, with the lengths of the objects, or with -1 where
    the store might have to ask for each of these.  It is one listing if the store can (`Bulk`)."""
    if len(prefixes) > 1 and isinstance(store, Bulk):
        return dict(store.entries_many([*prefixes]))
    return dict.fromkeys(sorted({key for prefix in prefixes for key in store.list(prefix)}), -1)


def _file_path(url: str, rest: str) -> str:
    path = rest.removeprefix("localhost")
    if not path.startswith("/"):
        raise UsageError(f"cannot open '{url}': it names a host", hint="file:///PATH has three /")
    return os.fsdecode(unquote_to_bytes(path))
