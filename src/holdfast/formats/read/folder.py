"""Stores for finding formats: a store with one chosen file, and a folder that is listed once.

Formats are found by the names of files, and a path may name a file itself (`weights/model.safetensors`).
Then the store is its directory, and `top` shows that file alone.

In a bucket each question is a request.  So `ListedFolder` lists once, and answers questions about names and
lengths from the listing.
"""

from __future__ import annotations

import os

from holdfast.core.format.manifest import FileEntry
from holdfast.core.store import LocalStore, Reader, Store, get_small, open_store
from holdfast.core.store.contract import Entry, check_prefix, is_key, not_found, reads_of, size_at
from holdfast.core.store.oserrors import translated
from holdfast.core.store.views import ViewStore

_SUFFIXES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".bin",
    ".ckpt",
)
"""Suffixes of files that can be checkpoints by themselves."""


MARK = "holdfast-conversion.json"
"""Name of the object beside the files of an unfinished conversion."""


class OneFile(ViewStore):
    """A store with the chosen object `name`; other objects can be read, as an index may name them."""

    shows = "one file"

    def __init__(self, store: Store, name: str) -> None:
        self.inner = store
        self.name = name
        self.url = joined(store.url, name)
        self.read_bytes, self.read_threads = reads_of(store)

    def open(self, key: str) -> Reader:
        """See `Store.open`."""
        return self.inner.open(key)

    def size(self, key: str) -> int:
        """See `Store.size`."""
        return self.inner.size(key)

    def get(self, key: str) -> bytes:
        """See `Store.get`."""
        return self.inner.get(key)

    def get_small(self, key: str) -> bytes:
        """See `get_small`."""
        return get_small(self.inner, key)

    def list(self, prefix: str = "") -> list[str]:
        """The file's name."""
        return [self.name] if self.name.startswith(prefix) else []


class ListedFolder(ViewStore):
    """A store whose objects are listed once, at the first question."""

    shows = "a listed folder"

    def __init__(self, store: Store) -> None:
        self.inner = store
        self.url = store.url
        self.read_bytes, self.read_threads = reads_of(store)
        self._sizes: dict[str, int] | None = None

    def sizes(self) -> dict[str, int]:
        """The lengths of all objects, by key."""
        if self._sizes is None:
            self._sizes = {key: num_bytes for key, num_bytes in self.inner.entries()}
        return self._sizes

    def open(self, key: str) -> Reader:
        """See `Store.open`."""
        self.size(key)
        return self.inner.open(key)

    def get(self, key: str) -> bytes:
        """See `Store.get`."""
        self.size(key)
        return self.inner.get(key)

    def size(self, key: str) -> int:
        """See `Store.size`."""
        size = self.sizes().get(key)
        if size is None:
            raise not_found(key, self.url)
        return size

    def entries(self, prefix: str = "") -> list[Entry]:
        """See `Store.entries`."""
        check_prefix(prefix)
        return sorted(Entry(k, n) for k, n in self.sizes().items() if k.startswith(prefix))

    def list(self, prefix: str = "") -> list[str]:
        """See `Store.list`."""
        return [entry.key for entry in self.entries(prefix)]


def open_place(path: str) -> Store:
    """The store at a path or URL; `OneFile` if a file lies there."""
    store = open_store(path)
    if isinstance(store, LocalStore):
        folder, name = os.path.split(store.root)
        return OneFile(LocalStore(folder), name) if os.path.isfile(store.root) else store
    url, mark, query = path.partition("?")
    above, slash, name = url.rpartition("/")
    if name.endswith(_SUFFIXES) and slash and not above.endswith("/"):
        folder_store = open_store(above + mark + query)
        if size_at(folder_store, name) is not None:
            return OneFile(folder_store, name)
    return ListedFolder(store)


def joined(url: str, name: str) -> str:
    """The URL of an object of a store; a bucket's options stay at the end."""
    if url.startswith("file://"):
        return f"{url}/{name}"
    place, mark, query = url.partition("?")
    return f"{place}/{name}{mark}{query}"


def last_name(url: str) -> str:
    """The last name of a store's URL."""
    place = url if url.startswith("file://") else url.partition("?")[0]
    return place.rstrip("/").rpartition("/")[2]


def top(store: Store) -> list[str]:
    """The objects of a store that lie in no folder, sorted."""
    if not isinstance(store, LocalStore):
        return [key for key in store.list() if "/" not in key]
    if not os.path.isdir(store.root):
        return []
    with translated("list", "", store.root), os.scandir(store.root) as scan:
        return sorted(e.name for e in scan if e.is_file() and is_key(e.name))


def file_key(section: FileEntry) -> str:
    """The real file of a part of a foreign checkpoint."""
    return section.path.rpartition(":")[0]
