"""Records behind the root: each rank copies finished files of records there.

Records are small, and there is one for each step.  So they are not uploaded in rounds: every few seconds
each rank copies its own, in the order of their steps.  A step counts only with the records of all ranks and
their plan, so at any moment the records behind the root lead as far as the slowest rank has come.  Ranks
need not agree on anything.

    root      log/0000000007/0000000101-0000000108/r00003.log    written, never changed again
    behind    log/0000000007/0000000101-0000000108/r00003.log    its bytes, at the next pass of rank 3

Files that are deleted from the root during a pass are left out.  Each chunk is compared with its digest on
the way: a file that is damaged in the root is not copied, and the user is told.

If the root is lost, the steps of the last `Delta(upload_every_s=)` seconds, and of the time that their
upload took, are lost with it.

`close` makes the last pass.  If Python ends without `close`, the last pass first waits for the writer, and
both may take as long as a save at Python's end (`threads.EXIT_S`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from holdfast.base.errors import Exists, FormatError, HoldfastError, NotFound
from holdfast.base.events import emit, span
from holdfast.base.threads import EXIT_S, Worker, before_exit
from holdfast.core.checkpoint.names import run_of_log
from holdfast.core.checkpoint.recorded import parse_segment
from holdfast.core.checkpoint.transfer import copy_object
from holdfast.core.group import Group
from holdfast.core.store import Store
from holdfast.tiers.records.log import read_segment
from holdfast.tiers.records.segment import plan_key, read_plan
from holdfast.tiers.records.transfer import provable


class RecordUpload:
    """Copies records of a root to another store, in the background, every so many seconds."""

    def __init__(
        self,
        root: Store,
        store: Store,
        group: Group,
        every_s: float,
        *,
        flush: Callable[[float], None],
        news: list[str],
    ) -> None:
        """`flush`: waits, so many seconds at most, until all records so far are in the root.
        `news`: takes the messages for the user."""
        self._files = RecordFiles(root, store, group, news)
        self._news = news
        self._group = group
        self._flush = flush
        self._outage = Outage(group)
        self._end = threading.Event()
        self._must_flush = False
        self._is_complete = False
        """True if the last pass has copied all files."""
        self._cancel, self._pid = before_exit(self._at_exit), os.getpid()
        self._worker = Worker("holdfast-upload-log")
        self._worker.submit(self._run, every_s)

    def close(self, limit_s: float) -> None:
        """Copy what is left, for `limit_s` at most; then one rank tells the user what is not copied."""
        self._cancel()
        self._end.set()
        with suppress(TimeoutError):
            self._worker.settle(limit_s)
        self._worker.shutdown()
        if self.left() and _first(self._group, "upload-log/left"):
            self._news += self.left()

    def left(self) -> list[str]:
        """Say that records are not uploaded, if some may not be."""
        if self._is_complete:
            return []
        return [
            f"not all records are uploaded to {self._files.store.url}; they lie in "
            f"{self._files.root.url}, and the next run with this upload= begins with them"
        ]

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:  # a forked child has not its parent's thread
            return
        self._must_flush = True
        self._end.set()

    # -- upload thread ----------------------------------------------------------------------------

    def _run(self, every_s: float) -> None:
        while not self._end.wait(every_s):
            self._pass()
        is_flushed = self._flushed() if self._must_flush else True
        self._is_complete = self._pass() and is_flushed

    def _flushed(self) -> bool:
        """Wait until all records are in the root; True if they are."""
        try:
            self._flush(EXIT_S)
        except Exception as error:
            emit("upload.failed", error=_text(error))
            return False
        return True

    def _pass(self) -> bool:
        """Copy the files since the last pass, older steps first; True if no error came."""
        self._outage.look()
        try:
            if new := self._files.new():
                with span("upload.records", files=len(new)) as fields:
                    fields["bytes"] = sum(self._files.copy(key) for key in new)
        except Exception as error:
            self._failed(error)
            return False
        self._recovered()
        return True

    def _failed(self, error: Exception) -> None:
        emit("upload.failed", error=_text(error))
        if self._outage.begins() and not self._end.is_set():
            self._news.append(
                f"records were not uploaded to {self._files.store.url}; they go on being made, and "
                f"their upload is tried again: {_text(error)}"
            )

    def _recovered(self) -> None:
        away_s = self._outage.ends()
        if away_s is not None:
            self._news.append(
                f"records are uploaded to {self._files.store.url} again, after {away_s:.0f} s"
            )


class RecordFiles:
    """The files of records, and the plans, that one rank copies.  For one thread."""

    def __init__(self, root: Store, store: Store, group: Group, news: list[str]) -> None:
        """`news`: as of `RecordUpload`."""
        self.root = root
        self.store = store
        self._rank, self._size = group.rank, group.size
        self._news = news
        self._there: set[str] | None = None
        """Keys that need not be copied any more; None until the store has been listed."""
        self._chunk_bytes: dict[str, int] = {}
        """Bytes of a chunk of the records of a plan, by the plan's key."""

    def new(self) -> list[str]:
        """Return the keys to copy, in the order of their steps, without a gap.

        A file that appears during a listing may be in it although the file before is not; in the next
        listing both are.
        """
        if self._there is None:
            self._there = set(self.store.list("log/"))
        there = self._there

        def look() -> list[str]:
            listed = self.root.list("log/")
            there.intersection_update(listed)  # a key that is gone from the root never comes again
            return sorted((k for k in listed if k not in there and self._is_mine(k)), key=_order)

        seen = look()
        return [key for key in look() if _order(key) <= _order(seen[-1])] if seen else []

    def _is_mine(self, key: str) -> bool:
        """True if this rank copies the file: one of its own, or its share of those of a run on more
        ranks.  Rank 0 copies all plans."""
        parsed = parse_segment(key)
        if parsed is None:
            return self._rank == 0 and "/plan-" in key and run_of_log(key) is not None
        return parsed[3] % self._size == self._rank

    def copy(self, key: str) -> int:
        """Copy a file of records, or a plan; return its bytes, 0 if it was not copied: it is gone from
        the root, or damaged, which the user is told, or its plan is damaged."""
        assert self._there is not None
        num_bytes = 0
        try:
            copy = self._copy_plan if parse_segment(key) is None else self._copy_segment
            num_bytes = copy(key)
        except NotFound:
            pass  # it was deleted after a full save
        except Exists:
            pass  # an earlier request had succeeded, though its answer was lost: the bytes are the same
        except FormatError as error:
            self._damaged(key, error)
        self._there.add(key)
        return num_bytes

    def _copy_segment(self, key: str) -> int:
        segment = read_segment(self.root, key)
        try:
            chunk_bytes = self._chunk_bytes_of(segment.header.run, segment.header.plan)
        except FormatError:  # rank 0 tells the user; without its plan a record cannot be read
            return 0
        file = provable(self.root, segment, chunk_bytes)
        copy_object(file, self.root, self.store, 1, lambda _: None)
        return file.num_bytes

    def _copy_plan(self, key: str) -> int:
        self._chunk_bytes_of(run_of_log(key) or 0, key.rpartition("/plan-")[2].partition(".")[0])
        data = self.root.get(key)
        self.store.put(key, data)
        return len(data)

    def _chunk_bytes_of(self, run: int, plan: str) -> int:
        """Bytes of a chunk of the records of a plan.  FormatError if the plan is damaged."""
        key = plan_key(run, plan)
        if key not in self._chunk_bytes:
            self._chunk_bytes[key] = read_plan(self.root, run, plan).chunk_bytes
        return self._chunk_bytes[key]

    def _damaged(self, key: str, error: FormatError) -> None:
        """Tell the user of a damaged file, which is not copied."""
        emit("log.damaged", key=key, error=error.message)
        parsed = parse_segment(key)
        what = f"the plan of records {key} is"
        if parsed is not None:
            _, first, last, rank = parsed
            what = f"rank {rank}'s records of steps {first} to {last} are"
        self._news.append(
            f"{what} damaged in {self.root.url} and not uploaded to {self.store.url}: if the root is "
            f"lost, no record after this one counts until the next full save ({error.message})"
        )


class Outage:
    """A time in which a store fails, of which one rank tells the user for all.

    Outages have numbers.  The first rank that posts the beginning of outage n tells the user, and posts its
    end when the store answers that rank again.  A rank that fails from then on is in another outage.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._number = 0
        self._since: float | None = None
        self._is_mine = False
        """True if this rank tells of it."""

    def look(self) -> None:
        """Before a try: see whether the rank that told of this outage has posted its end."""
        if self._since is not None and not self._is_mine and self._is_over():
            self._since = None

    def begins(self) -> bool:
        """Note a failure; True if this rank has to tell the user."""
        if self._since is not None:
            return False
        self._since = time.monotonic()
        while self._is_over():
            self._number += 1
        self._is_mine = _first(self._group, f"upload-log/away/{self._number}")
        return self._is_mine

    def ends(self) -> float | None:
        """Note a success; return the seconds since the first failure if this rank told of it, else None."""
        if self._since is None:
            return None
        away_s, self._since = time.monotonic() - self._since, None
        if not self._is_mine:
            return None
        with suppress(HoldfastError):
            self._group.post(f"upload-log/back/{self._number}", b"1")
        return away_s

    def _is_over(self) -> bool:
        try:
            return self._group.peek(f"upload-log/back/{self._number}") is not None
        except HoldfastError:
            return False


def _first(group: Group, key: str) -> bool:
    """True for the first rank that calls it with this key; for every rank if the board does not answer."""
    try:
        group.post_first(key, str(group.rank).encode())
        return group.peek(key) == str(group.rank).encode()
    except HoldfastError:
        return True


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"


def _order(key: str) -> tuple[int, int]:
    """Plans first, then records by their steps."""
    parsed = parse_segment(key)
    return (-1, -1) if parsed is None else (parsed[0], parsed[1])
