"""Committing: the one write that makes a step exist.

A step is many files of many ranks, each of which may die at any time.  So ranks first write the files, to
a folder of this attempt, where no reader looks.  Once all files are durable, rank 0 puts the manifest,
which names every file with its length and digests, and which a store shows whole or not at all:

    ranks     steps/0000000005/0002-000007/r00000.safetensors    a crash from here on leaves files
              steps/0000000005/0002-000007/r00001.safetensors    that no manifest names: the next
              ...                                                save sweeps them
    rank 0    is run 2 the newest claim?  does it see all files, at their lengths?
              steps/0000000005/manifest.json                     from here on the step exists
              delete the attempt that was there before           a crash here costs nothing but space

Only this order protects a step: there is no lock that a dead process could hold.  If two processes save one
step at once, one wins: the put of the manifest is conditional on the manifest read at the beginning.

Invariants (docs/reference/format.md states them for other implementations):

* *must*: every byte that a manifest names is durable before the manifest is written;
* *must*: a file that a manifest names is never written again;
* *must*: a run whose claim is not the newest commits nothing;
* *must*: a manifest is replaced only while it is the one that was there when the commit began.
"""

from __future__ import annotations

from holdfast.base.errors import Exists, NotFound, StoreError, UsageError
from holdfast.base.threads import in_threads
from holdfast.core.checkpoint.claiming import Claim, check_claim
from holdfast.core.checkpoint.names import attempt_in, manifest_key, step_prefix
from holdfast.core.format.manifest import FileEntry, Manifest, encode_manifest
from holdfast.core.store import LocalStore, Store, put_over
from holdfast.core.store.contract import size_at

_CHECK_THREADS = 8


def commit(
    store: Store, manifest: Manifest, mine: Claim | None = None, data: bytes | None = None
) -> str | None:
    """Make a step exist.  All files that the manifest names must be durable already.  Return the attempt of
    the step that this replaces; None if there is none or it cannot be read.  `data`: the bytes of the
    manifest, if another home of the step has them already.

    Commits nothing on StoreError (a file is not visible here, or has another length) and on UsageError
    (another process has saved or deleted this step meanwhile).
    """
    key = manifest_key(manifest.step)
    data = encode_manifest(manifest) if data is None else data
    seen = bytes_at(store, key)
    if mine is not None:
        check_claim(store, mine)
    check_lengths(store, manifest)
    try:
        put_over(store, key, data, seen)
    except (Exists, NotFound):
        now = bytes_at(store, key)
        if now is None and key in store.list(key):  # a link without a target takes the name
            store.put(key, data)
        elif now == data:  # the same commit, by another process: durable when this returns
            put_over(store, key, data, now)
        else:
            raise _overtaken(store, manifest.step, now) from None
    return None if seen is None else attempt_in(seen, manifest.step)


def bytes_at(store: Store, key: str) -> bytes | None:
    """The bytes under a key, sound or not; None if there are none."""
    try:
        return store.get(key)
    except NotFound:
        return None


def _overtaken(store: Store, step: int, now: bytes | None) -> UsageError:
    deed = "deleted" if now is None else "saved"
    return UsageError(
        f"another process has {deed} step {step} of {store.url} while this one committed its save of it, "
        "which is not committed",
        step=step,
        hint="two programs must not write to one root; stop one of them",
    )


def check_lengths(store: Store, manifest: Manifest) -> None:
    """StoreError unless every file of a manifest exists at its length."""
    prefix = step_prefix(manifest.step)
    there: dict[str, int] = {}
    if not isinstance(store, LocalStore):  # one listing instead of a request per file
        there = dict(store.entries(f"{prefix}{manifest.attempt}/"))

    def check(file: FileEntry) -> None:
        size = size_at(store, prefix + file.path)
        if size is None:
            raise StoreError(
                f"the file of rank {file.rank} cannot be seen by rank 0",
                key=prefix + file.path,
                hint="is the root on a file system that all hosts share?",
            )
        if size != file.bytes:
            raise StoreError(
                f"the file of rank {file.rank} has {size} bytes, {file.bytes} were written",
                key=prefix + file.path,
            )

    doubtful = [f for f in manifest.objects if there.get(prefix + f.path) != f.bytes]
    in_threads(check, doubtful, _CHECK_THREADS)
