"""The folder of one step by itself, as it is sent to others, read as a root that has this step alone.

    runs/gpt/steps/0000000025/                  sent as            only/
        manifest.json                                                  manifest.json
        0003-000001/r00000.safetensors                                 0003-000001/r00000.safetensors

    as_root(open_store("only")).list()          steps/0000000025/manifest.json, ...

Keys are those of the root, so readers of a root read it, and what a root has besides is missing.
"""

from __future__ import annotations

import os
import re

from holdfast.base.errors import HoldfastError
from holdfast.core.checkpoint.names import STEP, step_prefix
from holdfast.core.format.manifest import MANIFEST_HEAD_BYTES, decode_head
from holdfast.core.store import LocalStore, Reader, Store, open_store, read_range
from holdfast.core.store.contract import Entry, check_prefix, not_found, reads_of
from holdfast.core.store.views import ViewStore

_MANIFEST = "manifest.json"


class LoneStep(ViewStore):
    """The root of one step, whose folder is the store `inner`."""

    shows = "the folder of a single step"

    def __init__(self, inner: Store, step: int) -> None:
        self.inner = inner
        self.prefix = step_prefix(step)
        self.url = inner.url
        self.read_bytes, self.read_threads = reads_of(inner)

    def open(self, key: str) -> Reader:
        """See `Store.open`."""
        return self.inner.open(self._inside(key))

    def size(self, key: str) -> int:
        """See `Store.size`."""
        return self.inner.size(self._inside(key))

    def entries(self, prefix: str = "") -> list[Entry]:
        """See `Store.entries`."""
        check_prefix(prefix)
        found = (Entry(self.prefix + key, num_bytes) for key, num_bytes in self.inner.entries())
        return [entry for entry in found if entry.key.startswith(prefix)]

    def list(self, prefix: str = "") -> list[str]:
        """See `Store.list`."""
        check_prefix(prefix)
        return [k for k in (self.prefix + key for key in self.inner.list()) if k.startswith(prefix)]

    def _inside(self, key: str) -> str:
        if not key.startswith(self.prefix):
            raise not_found(key, self.url)
        return key.removeprefix(self.prefix)


def as_root(store: Store) -> Store:
    """Return the store of a root; if it is the folder of a step by itself, a root of that step.

    Any local folder is looked at, and in a bucket one that is named as a step's, since a look is a request.
    """
    if isinstance(store, LocalStore):
        may_be = os.path.isfile(os.path.join(store.root, _MANIFEST))
        may_be = may_be and not os.path.isdir(os.path.join(store.root, "steps"))
    else:
        place = store.url.partition("?")[0].rstrip("/")
        may_be = re.fullmatch(STEP, place.rpartition("/")[2]) is not None
    if not may_be:
        return store
    try:
        head = read_range(store, _MANIFEST, 0, MANIFEST_HEAD_BYTES)
        _, step, _ = decode_head(bytes(head), _MANIFEST)
        return LoneStep(store, step)
    except HoldfastError:
        return store  # it is no manifest of ours


def root_at(url: str | os.PathLike[str]) -> Store:
    """Return the store of the root, or of the single step's folder, at a path or URL, for reading."""
    return as_root(open_store(url))
