"""Stores hold checkpoints: `Store` is the interface to storage, the other classes implement it.

    open_store("/scratch/run")            a directory
    open_store("file:///scratch/run")     the same
    open_store("memory://name")           this process's memory, shared by name
    open_store("s3://bucket/run")         a bucket (gs:// and az:// too): extra torch-holdfast[object]

`holdfast.testing.StoreTests` checks a store of your own.  `register` gives it a URL scheme in this
process; an entry point of its package does so in every process, agents and record writers included:

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
from holdfast.base.storage_deadlines import Patience
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
"""URL schemes of the built-in stores."""
_REQUESTS = 16
"""Threads for small requests over a network."""
_ENTRY_POINTS = "holdfast.stores"
"""Entry point group in which packages register URL schemes."""
_registered: dict[str, Callable[[str], Store]] = {}


def split_prefix(text: str) -> tuple[str, str] | None:
    """Split `format:PATH`, a foreign checkpoint, into its two parts; None for a URL or an existing path."""
    prefix, colon, rest = text.partition(":")
    if not colon or "/" in prefix or rest.startswith("//") or os.path.exists(text):
        return None
    return prefix, rest


def __getattr__(name: str) -> Any:
    """Import `MemoryStore` at its first use: a run with a path does not need it."""
    if name == "MemoryStore":
        from holdfast.core.store.memory import MemoryStore

        return MemoryStore
    raise AttributeError(f"module 'holdfast.store' has no attribute {name!r}")


def register(scheme: str, factory: Callable[[str], Store]) -> None:
    """Have `open_store` call `factory(url)` for URLs that begin with `scheme://`, in this process.

    Agents and record writers are other processes, which open the store by its `url`: for them the package
    needs an entry point of the group `holdfast.stores`.  UsageError for a built-in scheme.
    """
    if not isinstance(scheme, str) or _SCHEME.fullmatch(scheme) is None:
        raise unfit("register", "scheme", scheme, "a text such as 'swift', without ://")
    if scheme in SCHEMES:
        raise UsageError(f"register: {scheme}:// is a scheme of holdfast's own")
    _registered[scheme] = function_of(factory, "register", "factory", "that takes a URL", 1)


def open_store(url: str | os.PathLike[str]) -> Store:
    """Return the store at a path or URL.  Does no I/O: the first write makes missing folders."""
    text = path_of(url, "open_store", "url")
    scheme, separator, rest = text.partition("://")
    if not separator or "/" in scheme:
        if text.startswith(tuple(f"{bucket}:/" for bucket in _BUCKETS)) and not os.path.exists(
            text
        ):
            raise UsageError(
                f"{text[:2]}:/ with one slash: a URL begins with {text[:2]}://, and no such path exists"
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
    """Return the factory of a registered scheme.  UsageError if there is none."""
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
                f"cannot open a URL: {shown}; give a path or one of "
                f"{', '.join(f'{one}://' for one in known)}",
                hint=did_you_mean(scheme, known),
            )
        found = _registered[scheme] = brought[scheme].load()
    return found


def be_patient(store: Store, limit_s: float | None) -> None:
    """Set the time limit of each operation (None: no limit), if the store has one."""
    patience = getattr(store, "patience", None)
    if isinstance(patience, Patience):
        patience.limit_s = limit_s


def as_one_operation(store: Store, call: Callable[[], _T], what: str) -> _T:
    """Run `call`, which does several short operations, under the time limit of one."""
    if isinstance(store, LocalStore):
        return store.patience.run(call, what, store.root)
    return call()


def num_threads_for(store: Store) -> int:
    """Number of threads that should send small requests to a store."""
    return 1 if isinstance(store, LocalStore) else _REQUESTS


def delete_many(store: Store, keys: Sequence[str]) -> None:
    """Delete objects, in any order; in bulk requests if the store has them (`Bulk`)."""
    if keys and isinstance(store, Bulk):
        store.delete_many(keys)
    elif keys:
        in_threads(store.delete, [*keys], num_threads_for(store))


def get_small(store: Store, key: str) -> bytes:
    """Return all bytes of a small object, such as a claim.  A `Bounded` store raises Corrupt for a larger
    one, and does not read it."""
    return store.get_small(key) if isinstance(store, Bounded) else store.get(key)


def read_range(store: Store, key: str, start: int, num_bytes: int) -> bytearray:
    """Return some bytes of an object, as `Store.read`."""
    data = bytearray(num_bytes)
    store.read(key, start, memoryview(data))
    return data


def put_over(store: Store, key: str, data: bytes, seen: bytes | None) -> None:
    """Put an object if the key still has the bytes `seen` (None: nothing).  Exists or NotFound if not."""
    if seen is None:
        store.put(key, data, if_absent=True)
    else:
        store.put(key, data, replacing=seen)


def keys_below(store: Store, prefixes: Collection[str]) -> dict[str, int]:
    """Return the length of each object whose key begins with one of `prefixes`, by key, sorted.

    One listing if the store is `Bulk`; else lengths are -1, as they could cost one request each.
    """
    if len(prefixes) > 1 and isinstance(store, Bulk):
        return dict(store.entries_many([*prefixes]))
    return dict.fromkeys(sorted({key for prefix in prefixes for key in store.list(prefix)}), -1)


def _file_path(url: str, rest: str) -> str:
    path = rest.removeprefix("localhost")
    if not path.startswith("/"):
        raise UsageError(f"cannot open '{url}': it names a host", hint="file:///PATH has three /")
    return os.fsdecode(unquote_to_bytes(path))
