"""Lists the top of a store, and makes a store of which one file is meant.

Formats are found by the names of files, and a path may name a file itself (`weights/model.safetensors`).
Then the store is its directory, and `top` shows that file alone.
"""

from __future__ import annotations

import os

from holdfast.store import LocalStore, Reader, Store, open_store
from holdfast.store.contract import HIDDEN
from holdfast.store.oserrors import translated
from holdfast.store.views import ViewStore

SUFFIXES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".bin",
    ".ckpt",
)
"""Ends of the names of files that can be checkpoints by themselves."""


class OneFile(ViewStore):
    """A store of whose objects `name` is meant; the others can be read (an index names them)."""

    shows = "one file"

    def __init__(self, store: Store, name: str) -> None:
        self.inner = store
        self.name = name
        self.url = f"{store.url}/{name}"

    def read(self, key: str, offset: int, into: memoryview) -> None:
        """See `Store.read`."""
        self.inner.read(key, offset, into)

    def open(self, key: str) -> Reader:
        """See `Store.open`."""
        return self.inner.open(key)

    def size(self, key: str) -> int:
        """See `Store.size`."""
        return self.inner.size(key)

    def get(self, key: str) -> bytes:
        """See `Store.get`."""
        return self.inner.get(key)

    def list(self, prefix: str = "") -> list[str]:
        """The file's name."""
        return [self.name] if self.name.startswith(prefix) else []


def open_place(path: str) -> Store:
    """The store at a path or URL; `OneFile` if a file lies there."""
    store = open_store(path)
    if isinstance(store, LocalStore):
        folder, name = os.path.split(store.root)
        return OneFile(LocalStore(folder), name) if os.path.isfile(store.root) else store
    above, slash, name = path.rpartition("/")
    if name.endswith(SUFFIXES) and slash and not above.endswith("/"):
        folder_store = open_store(above)
        if name in folder_store.list(name):
            return OneFile(folder_store, name)
    return store


def top(store: Store) -> list[str]:
    """The objects of a store that lie in no folder, sorted."""
    if not isinstance(store, LocalStore):
        return [key for key in store.list() if "/" not in key]
    if not os.path.isdir(store.root):
        return []
    with translated("list", "", store.root), os.scandir(store.root) as scan:
        return sorted(e.name for e in scan if e.is_file() and not e.name.startswith(HIDDEN))
