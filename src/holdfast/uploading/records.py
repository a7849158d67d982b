"""Records behind the root: each rank copies the files of records that it finds closed there.

A record is small and there is one of each step, so they are not uploaded step by step in rounds, but every
few seconds by each rank for itself, in the order of their steps.  A step counts only with the records of
all ranks, and a plan is as good as a record that is missing: so what has come behind the root at any moment
leads as far as all ranks have come.  Nothing has to be agreed.

    root      log/0000000007/0000000101-0000000108/r00003.log    written, never changed again
    behind    log/0000000007/0000000101-0000000108/r00003.log    its bytes, at the next pass of rank 3

What the root has had when a pass began, and nobody needs any more at its end, is left out.  Bytes are
copied as they are: a record is proved by its digests when it is replayed.

When the root is lost, the steps of the last `Delta(upload_every_s=)` seconds, and of the time that their
upload took, are lost with it.
"""

from __future__ import annotations

import threading
import time

from holdfast.checkpoint.names import run_of_log
from holdfast.checkpoint.recorded import parse_segment
from holdfast.checkpoint.transfer import Provable, copy_object
from holdfast.errors import Exists, HoldfastError, NotFound
from holdfast.events import emit, span
from holdfast.group import Group
from holdfast.store import Store


class RecordUpload:
    """Copies records of a root to another store, in the background, every so many seconds."""

    def __init__(self, root: Store, store: Store, group: Group, every_s: float) -> None:
        self.root = root
        self.store = store
        self.news: list[str] = []
        """Messages that the user is to be told."""
        self._rank, self._size = group.rank, group.size
        self._every_s = every_s
        self._there: set[str] | None = None
        """Keys that need not be copied any more; None until it has been looked what there is."""
        self._failed_since: float | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-upload-log", daemon=True)
        self._thread.start()

    def close(self, limit_s: float) -> None:
        """Copy what is left, at most so long.  What is not copied then is told."""
        self._end.set()
        self._thread.join(limit_s)
        if self._thread.is_alive() or self._failed_since is not None:
            self.news.append(
                f"not all records are uploaded to {self.store.url}; they lie in {self.root.url}, and the "
                "next run with this upload= begins with them"
            )

    def _run(self) -> None:
        while not self._end.wait(self._every_s):
            self._pass()
        self._pass()

    def _pass(self) -> None:
        """Copy what has come since the last pass, older steps first."""
        try:
            if self._there is None:
                self._there = set(self.store.list("log/"))
            if new := self._new(self._there):
                with span("upload.records", files=len(new)) as fields:
                    fields["bytes"] = sum(self._copy(key) for key in new)
        except Exception as error:
            self._failed(error)
        else:
            self._recovered()

    def _new(self, there: set[str]) -> list[str]:
        """The files to copy, in the order of their steps, without a gap: one that came during a listing may
        be in it without the one before, but not in the next listing."""

        def look() -> list[str]:
            keys = (k for k in self.root.list("log/") if k not in there and self._is_mine(k))
            return sorted(keys, key=_order)

        seen = look()
        return [key for key in look() if _order(key) <= _order(seen[-1])] if seen else []

    def _is_mine(self, key: str) -> bool:
        """True if this rank copies it: its own files and, of a run on more ranks, its share; rank 0 all
        plans."""
        parsed = parse_segment(key)
        if parsed is None:
            return self._rank == 0 and "/plan-" in key and run_of_log(key) is not None
        return parsed[3] % self._size == self._rank

    def _copy(self, key: str) -> int:
        """Copy a file of records, or a plan; return its bytes."""
        assert self._there is not None
        num_bytes = 0
        try:
            num_bytes = self.root.size(key)
            copy_object(Provable(key, num_bytes, ()), self.root, self.store, 1, lambda _: None)
        except NotFound:
            pass  # a full save has made it superfluous
        except Exists:
            pass  # a request was done though its answer was lost: it has this very name and bytes
        self._there.add(key)
        return num_bytes

    def _failed(self, error: Exception) -> None:
        text = (
            str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
        )
        emit("upload.failed", error=text)
        if self._failed_since is None:
            self._failed_since = time.monotonic()
            if not self._end.is_set():
                self.news.append(
                    f"records were not uploaded to {self.store.url}; they go on being made, and their "
                    f"upload is tried again: {text}"
                )

    def _recovered(self) -> None:
        if self._failed_since is not None:
            away_s = time.monotonic() - self._failed_since
            self._failed_since = None
            self.news.append(
                f"records are uploaded to {self.store.url} again, after {away_s:.0f} s"
            )


def _order(key: str) -> tuple[int, int]:
    """Plans first, then records by their steps."""
    parsed = parse_segment(key)
    return (-1, -1) if parsed is None else (parsed[0], parsed[1])
