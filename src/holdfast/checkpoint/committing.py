"""Committing: the one write that makes a step exist.

Invariants (docs/format.md states them for other implementations):

* *must*: every byte that a manifest names is durable before the manifest is written;
* *must*: a file that a manifest names is never written again;
* *must*: a run whose claim is not the newest commits nothing.
"""

from __future__ import annotations

from holdfast.checkpoint.claiming import Claim, check_claim
from holdfast.checkpoint.names import manifest_key, step_prefix
from holdfast.errors import NotFound, StoreError
from holdfast.format.manifest import FileEntry, Manifest, encode
from holdfast.store import Store
from holdfast.threads import in_threads

CHECK_THREADS = 8


def commit(store: Store, manifest: Manifest, mine: Claim | None = None) -> None:
    """Make a step exist.  Everything that the manifest names must be durable already.

    StoreError if a file cannot be seen from here or has another length: then nothing is committed.
    """
    if mine is not None:
        check_claim(store, mine)
    check_files(store, manifest)
    store.put(manifest_key(manifest.step), encode(manifest))


def check_files(store: Store, manifest: Manifest) -> None:
    """StoreError unless every file of a manifest is there, with its length."""
    prefix = step_prefix(manifest.step)

    def check(file: FileEntry) -> None:
        try:
            size = store.size(prefix + file.path)
        except NotFound:
            raise StoreError(
                f"the file of rank {file.rank} cannot be seen by rank 0",
                key=prefix + file.path,
                hint="is the root on a file system that all hosts share?",
            ) from None
        if size != file.bytes:
            raise StoreError(
                f"the file of rank {file.rank} has {size} bytes, {file.bytes} were written",
                key=prefix + file.path,
            )

    in_threads(check, list(manifest.files), CHECK_THREADS)
