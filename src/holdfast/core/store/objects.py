"""Buckets as stores: S3 and compatible services, Google Cloud Storage and Azure, through obstore.

    ObjectStore("s3://bucket/runs/gpt")                       # extra torch-holdfast[object]

Differences from a disk, and how this module hides them:

* *A small object appears at once.*  `if_absent` is `If-None-Match: *`, and `replacing` is `If-Match` with
  the tag of the object whose bytes were compared.  Some services accept such a condition and ignore it: the
  first conditional put is sent twice, and a service that accepts the second one is refused.
* *A reply can be lost after the work was done.*  A repeated conditional put may then find its own
  object.  So this module repeats such puts, not obstore: if the key is taken after a request without a
  reply, it compares the object's bytes with its own.
* *A large object is a multipart upload*, which obstore sends from an iterator, `_UPLOADS` parts at a time:

      write(offset, part)  ->  early parts, by offset  ->  ready, in order  ->  obstore.put(iterator)
      several threads          wait for those before        at most `_WINDOW`      one thread of the writer

  If the writer is aborted, the iterator raises, and obstore aborts the upload.  There may be 10,000
  parts, so they are larger for a larger object.  Completing an upload takes no condition, so the key is
  looked up before.
* *Requests fail all the time.*  They are repeated with jitter, within the operation's time limit.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from holdfast.base.arguments import flag_of
from holdfast.base.errors import (
    HoldfastError,
    NotFound,
    StoreError,
    Unavailable,
    UsageError,
    redacted,
)
from holdfast.base.storage_deadlines import Patience, patient
from holdfast.base.threads import in_threads
from holdfast.core.store.bucket import RETRY_S, BucketAddress, address_of, connect
from holdfast.core.store.contract import (
    BLOCK_BYTES,
    SMALL_FILE_BYTES,
    WHOLE_BYTES,
    Bytes,
    Entry,
    EntryList,
    Parts,
    byte_view,
    check_key,
    check_length,
    check_prefix,
    exists,
    is_key,
    not_found,
    not_the_seen,
    past_end,
    seen_view,
    size_at,
    target_view,
)

try:
    import obstore
    from obstore.exceptions import (
        AlreadyExistsError,
        BaseError,
        NotFoundError,
        PermissionDeniedError,
        PreconditionError,
        UnauthenticatedError,
    )
except ImportError:
    raise UsageError(
        "buckets need the package obstore", hint="pip install 'torch-holdfast[object]'"
    ) from None

_T = TypeVar("_T")

UPLOAD_PART_BYTES = 8 << 20
"""Bytes of a part of an upload; more for an object of more than `_MOST_PARTS` such parts."""
_MOST_PARTS = 9_000
_UPLOADS = 4
"""Parts of one object that are sent at the same time."""
_WINDOW = UPLOAD_PART_BYTES
"""Bytes that are copied and wait to be sent.  With the `_UPLOADS` parts being sent, which obstore copies
once more, a writer holds 73 MiB (measured with 1.5 GB)."""
_EARLY_S = 0.2
"""Seconds that a part waits for the parts before it."""
_PAGE = 1_000

_proved: set[tuple[str, str, str]] = set()
"""Buckets that are known to enforce conditions: scheme, endpoint and bucket."""
_pid: int | None = None
"""Process that has started obstore's threads."""


class ObjectStore:
    """Objects of a bucket below a prefix.  Opening it makes no request."""

    read_bytes = 4 << 20
    read_threads = 12
    """A bucket's latency is 10 to 100 ms, and its bandwidth some 100 MB/s per request.  obstore and this
    process each hold the bytes under way: 96 MiB together."""

    def __init__(self, url: str) -> None:
        self.address: BucketAddress = address_of(url)
        self.url = self.address.url
        self.patience = Patience()
        self._prefix = self.address.prefix
        self._lock = threading.Lock()
        self._connections: tuple[float | None, Any, Any] | None = None

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    @patient
    def put(
        self, key: str, data: Bytes, *, if_absent: bool = False, replacing: Bytes | None = None
    ) -> None:
        """Make a small object appear, as `Store.put`: one request, two with `replacing`."""
        check_key(key)
        view = byte_view(data)
        flag_of(if_absent, "Store.put", "if_absent")
        seen = seen_view(key, if_absent, replacing)
        if seen is not None:
            self._replace(key, view, seen)
        elif if_absent:
            self._put_if(key, view, "create", exists)
            self._prove_conditions(key, view)
        else:
            self.ask("put", key, lambda inner, name: _put(inner, name, view, "overwrite"))

    def _replace(self, key: str, view: memoryview, seen: memoryview) -> None:
        found = self.ask("put", key, lambda inner, name: obstore.get(inner, name))
        meta = found.meta
        if meta["size"] != len(seen) or memoryview(found.bytes()) != seen:
            raise not_the_seen(key, self.url)
        version = {k: meta[k] for k in ("e_tag", "version") if meta[k] is not None}
        self._put_if(key, view, version, not_the_seen)

    def _put_if(
        self, key: str, view: memoryview, mode: Any, taken: Callable[[str, str], HoldfastError]
    ) -> None:
        """Put under a condition.  A request without a reply is repeated, although it may have succeeded."""
        is_doubtful, pauses = False, self._pauses()
        while True:
            try:
                _put(self._inner(repeat=False), self._prefix + key, view, mode)
                return
            except (AlreadyExistsError, PreconditionError) as error:
                if "ConditionalRequestConflict" not in str(error):  # S3: two at the same time
                    if is_doubtful and self.get(key) == view:
                        return  # put by the request whose reply was lost
                    raise taken(key, self.url) from None
                failed: StoreError = Unavailable(
                    f"cannot put '{self.place_of(key)}': {_said(error)}"
                )
            except (BaseError, OSError) as error:
                failed = self._translated("put", key, error)
                is_doubtful = True
            if not isinstance(failed, Unavailable) or not next(pauses, False):
                raise failed

    def _pauses(self) -> Iterator[bool]:
        """Yield True after longer and longer pauses, until the operation's time is over."""
        until, pause_s = time.monotonic() + self._limit_s * 0.6, 0.1
        while time.monotonic() + pause_s <= until:
            time.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, 5.0)
            yield True

    def _prove_conditions(self, key: str, view: memoryview) -> None:
        """UsageError if a second `If-None-Match` put of the same key succeeds.  Asked once for each
        bucket."""
        place = (self.address.scheme, self.address.options.get("endpoint", ""), self.address.bucket)
        if place in _proved or self.address.flag("unsafe"):
            return
        try:
            _put(self._inner(repeat=False), self._prefix + key, view, "create")
        except (AlreadyExistsError, PreconditionError):
            _proved.add(place)
            return
        except (BaseError, OSError):
            return  # no reply: the next put asks again
        with suppress(StoreError):  # the reason is told all the same
            self.delete(key)
        raise UsageError(
            f"{self.url} does not heed If-None-Match: each of several writers would believe that it won, "
            "and a step could be lost or mixed",
            key=key,
            hint="use a store that enforces conditional writes; if no second run can ever write here, say "
            "so in the URL: ?unsafe=yes",
        )

    def create(self, key: str, size: int) -> ObjectWriter:
        """Begin a large object, without a request.  `finish` puts an object of at most
        `UPLOAD_PART_BYTES`."""
        return ObjectWriter(self, Parts(key, size))

    @patient
    def get(self, key: str) -> bytes:
        """Return all bytes of an object, as `Store.get`: one request."""
        return self._whole(key, WHOLE_BYTES)

    @patient
    def get_small(self, key: str) -> bytes:
        """Return all bytes of a small object, as `Bounded.get_small`: one request."""
        return self._whole(key, SMALL_FILE_BYTES)

    def _whole(self, key: str, most_bytes: int) -> bytes:
        check_key(key)

        def fetch(inner: Any, name: str) -> bytes:
            found = obstore.get(inner, name)  # the head of the reply, which states the length
            check_length(key, self.url, found.meta["size"], most_bytes)
            return bytes(found.bytes())

        return self.ask("get", key, fetch)

    def read(self, key: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on, as `Store.read`: one request."""
        self.open(key).read(offset, into)

    def open(self, key: str) -> ObjectReader:
        """Open an object for many reads, without a request: a read raises `NotFound` if there is none."""
        check_key(key)
        return ObjectReader(self, key)

    @patient
    def size(self, key: str) -> int:
        """Length of an object in bytes: one request."""
        check_key(key)
        return int(self.ask("size", key, lambda inner, name: obstore.head(inner, name))["size"])

    def entries(self, prefix: str = "") -> list[Entry]:
        """All objects whose keys begin with `prefix`, with their lengths: as many requests as `list`."""
        return self.entries_many([prefix])

    def list(self, prefix: str = "") -> list[str]:
        """All keys that begin with `prefix`, sorted: a request for each 1,000 of them."""
        return [entry.key for entry in self.entries_many([prefix])]

    def entries_many(self, prefixes: Sequence[str]) -> EntryList:
        """All objects whose keys begin with one of `prefixes`, at one request per 1,000 objects.

        Several prefixes are found in a listing of their common folder; after 1,000 other objects, each
        prefix is listed by itself.
        """
        found = self._found(prefixes[0] if len(prefixes) == 1 else "", tuple(prefixes))
        if found is None:
            found = [entry for prefix in prefixes for entry in self.entries(prefix)]
        return sorted({*found})

    @patient
    def _found(self, common: str, prefixes: tuple[str, ...]) -> EntryList | None:
        for prefix in prefixes:
            check_prefix(prefix)
        folder = self._prefix + common.rpartition("/")[0]  # obstore lists by whole names

        def pages(inner: Any, _: str) -> EntryList | None:
            found: EntryList = []
            num_others, start = 0, len(self._prefix)
            for page in obstore.list(inner, folder.strip("/") or None, chunk_size=_PAGE):
                here = (Entry(o["path"][start:], o["size"]) for o in page)
                ours = [entry for entry in here if entry.key.startswith(prefixes)]
                num_others += len(page) - len(ours)
                if num_others > _PAGE and len(prefixes) > 1:
                    return None
                found += [entry for entry in ours if is_key(entry.key)]
            return found

        return self.ask("list", common, pages)

    @patient
    def delete(self, key: str) -> None:
        """Remove an object if it is there: one request."""
        check_key(key)
        with suppress(NotFound):  # Azure raises it
            self.ask("delete", key, lambda inner, name: obstore.delete(inner, name))

    @patient
    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects; one request per 1,000 on S3, per 256 on Azure, per object on Google."""
        for key in keys:
            check_key(key)
        names = [self._prefix + key for key in keys]
        try:
            self.ask("delete", keys[0], lambda inner, _: obstore.delete(inner, names))
        except NotFound:  # Google and Azure raise it, and may leave other objects
            in_threads(self.delete, [*keys], _UPLOADS)

    def place_of(self, key: str) -> str:
        """The address of a key, for messages."""
        return f"{self.address.scheme}://{self.address.bucket}/{self._prefix}{key}"

    def ask(
        self,
        operation: str,
        key: str,
        call: Callable[[Any, str], _T],
        may_repeat: Callable[[], bool] = lambda: True,
    ) -> _T:
        """Run `call` with obstore's store and the key's name in the bucket; raises StoreErrors.

        obstore repeats failing requests, but not one whose reply was cut short: that is repeated here while
        `may_repeat()`.
        """
        inner, pauses = self._inner(repeat=True), self._pauses()
        while True:
            try:
                return call(inner, self._prefix + key)
            except (BaseError, OSError) as error:
                if not (_CUT in str(error) and may_repeat() and next(pauses, False)):
                    raise self._translated(operation, key, error) from None

    @property
    def _limit_s(self) -> float:
        return RETRY_S if self.patience.limit_s is None else self.patience.limit_s

    def _inner(self, *, repeat: bool) -> Any:
        """Obstore's store; its limits are those of `patience` now."""
        _check_process()
        limit_s = self.patience.limit_s
        with self._lock:
            if self._connections is None or self._connections[0] != limit_s:
                once, again = (connect(self.address, limit_s, repeat=r) for r in (False, True))
                self._connections = (limit_s, once, again)
            return self._connections[2 if repeat else 1]

    def _translated(self, operation: str, key: str, error: Exception) -> StoreError:
        """Return obstore's error as a StoreError."""
        said, place = _said(error), self.place_of(key)
        if any(code in str(error) for code in ("NoSuchBucket", "ContainerNotFound")):
            return StoreError(
                f"cannot {operation} '{place}': there is no bucket {self.address.bucket!r}",
                key=key,
                hint="make the bucket first; if there is one, look at the endpoint (AWS_ENDPOINT_URL)",
            )
        if isinstance(error, (NotFoundError, FileNotFoundError)):
            return not_found(key, self.url)
        message = f"cannot {operation} '{place}': {said}"
        is_unknown = any(host in said for host in ("169.254.", "metadata.google"))
        if is_unknown or isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
            hint = "credentials come from the environment (AWS_ACCESS_KEY_ID, ...), ~/.aws or the machine"
            return StoreError(message, key=key, hint=hint)
        return Unavailable(message, key=key)


class ObjectReader:
    """One object being read, a request for each range."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self.patience = store.patience
        self._store = store
        self._key = key
        self._is_closed = False

    def place_of(self, key: str = "") -> str:
        """The address."""
        return self._store.place_of(self._key)

    @patient
    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on; `Corrupt` if the object is shorter."""
        if self._is_closed:
            raise UsageError(f"the reader of '{self._key}' is closed", key=self._key)
        view = target_view(into, offset)
        if not view:
            return
        stop = offset + len(view)

        def fetch(inner: Any, name: str) -> Any:
            try:
                return obstore.get_range(inner, name, start=offset, end=stop)
            except BaseError as error:
                if "416" in _status(error) or _NO_RANGE.search(str(error)):
                    return b""  # it ends before the range begins
                raise

        found = memoryview(self._store.ask("read", self._key, fetch))
        if len(found) != len(view):
            size = self._store.size(self._key)
            if size < stop:
                raise past_end(self._key, offset, stop, size)
            had = f"the reply has {len(found)} of {len(view)} bytes"
            raise Unavailable(f"cannot read '{self.place_of()}': {had}", key=self._key)
        view[:] = found

    def close(self) -> None:
        """Refuse further reads."""
        self._is_closed = True


class _Aborted(Exception):
    """Makes obstore abort an upload."""


class ObjectWriter:
    """One large object being written: parts are copied, put in order, and sent by a thread of the writer.

    An early part is held in memory until its turn.  After a failed `finish` only `abort` is possible.
    """

    block_bytes = BLOCK_BYTES

    def __init__(self, store: ObjectStore, parts: Parts) -> None:
        self.patience = store.patience
        self._store = store
        self._parts = parts
        self._state = "open"
        self._queue = _Ordered()
        self._upload: threading.Thread | None = None
        self._failed: BaseException | None = None

    def place_of(self, key: str = "") -> str:
        """The address."""
        return self._store.place_of(self._parts.key)

    @patient
    def write(self, offset: int, data: Bytes) -> None:
        """Copy a part; blocks while `_WINDOW` bytes wait to be sent.  A part that is written again must
        have the same bytes."""
        view = byte_view(data)
        self._parts.check(offset, len(view))
        self._parts.check_open(self._state)
        if self._parts.size > UPLOAD_PART_BYTES:
            self._begin()
            self._queue.wait_for_room(offset)
        self._raise_if_failed("write")
        self._queue.add(offset, bytes(view))
        self._parts.add(offset, len(view))

    @patient
    def finish(self) -> None:
        """Make the object appear with all its bytes; `Exists` if the key is taken."""
        self._parts.check_open(self._state)
        self._parts.check_complete()
        self._state = "failed"
        key = self._parts.key
        if self._upload is None:
            self._queue.end()
            self._store.put(key, b"".join(self._queue.parts()), if_absent=True)
        else:
            self._check_absent(key)
            self._queue.end()
            self._upload.join()
            self._forgive_lost_reply(key)
            self._raise_if_failed("finish")
        if self._state == "failed":
            self._state = "finished"

    def abort(self) -> None:
        """Discard everything written.  The sending thread aborts the upload, if the bucket answers."""
        if self._state == "finished":
            return
        self._state = "aborted"
        self._queue.fail(_Aborted())

    def _begin(self) -> None:
        with self._queue.changed:
            if self._upload is None:
                name = f"holdfast-upload-{self._parts.key.rpartition('/')[2]}"
                self._upload = threading.Thread(target=self._send, name=name, daemon=True)
                self._upload.start()

    def _send(self) -> None:
        part = UPLOAD_PART_BYTES
        while part * _MOST_PARTS < self._parts.size:
            part *= 2
        try:
            self._store.ask(
                "write",
                self._parts.key,
                lambda inner, name: obstore.put(
                    inner,
                    name,
                    self._queue.parts(),
                    use_multipart=True,
                    chunk_size=part,
                    max_concurrency=_UPLOADS,
                ),
                may_repeat=lambda: self._queue.num_taken == 0,  # the reply to its begin was lost
            )
        except BaseException as error:
            self._failed = error
            self._queue.fail(error)

    def _forgive_lost_reply(self, key: str) -> None:
        """Clear the error of an upload that succeeded but whose reply was lost: there was no object before,
        all parts were sent, and now there is an object of this length."""
        if isinstance(self._failed, StoreError) and self._queue.is_empty:
            with suppress(StoreError):
                if self._store.size(key) == self._parts.size:
                    self._failed = None

    def _check_absent(self, key: str) -> None:
        """`Exists` if the key is taken: obstore completes uploads without a condition."""
        if size_at(self._store, key) is not None:
            raise exists(key, self._store.url)

    def _raise_if_failed(self, operation: str) -> None:
        error = self._failed
        if error is None:
            return
        if isinstance(error, HoldfastError):
            raise error
        raise Unavailable(f"cannot {operation} '{self.place_of()}': {error}", key=self._parts.key)


class _Ordered:
    """A queue of parts that come in any order and leave in the order of their offsets."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._early: dict[int, bytes] = {}
        self._ready: deque[bytes] = deque()
        self._ready_bytes = 0
        self._next = 0
        self._is_ended = False
        self._error: BaseException | None = None
        self.num_taken = 0
        """Number of parts that have left."""
        self.is_empty = False
        """True once all parts have left and no more will come."""

    def add(self, offset: int, part: bytes) -> None:
        """Add a part, and make the parts whose turn it is ready."""
        with self.changed:
            self._early[offset] = part
            while (at := self._first()) is not None:
                found = self._early.pop(at)[self._next - at :]
                if found:
                    self._ready.append(found)
                    self._ready_bytes += len(found)
                    self._next += len(found)
            self.changed.notify_all()

    def _first(self) -> int | None:
        return next((at for at in self._early if at <= self._next), None)

    def wait_for_room(self, offset: int) -> None:
        """Block until a part may be copied: fewer than `_WINDOW` bytes are ready and it is its turn, or
        the upload has ended.  After `_EARLY_S` it may be copied early: its thread may be the one that
        will write the parts before it."""
        with self.changed:
            self.changed.wait_for(
                lambda: offset <= self._next or self._error is not None, timeout=_EARLY_S
            )
            self.changed.wait_for(lambda: self._ready_bytes < _WINDOW or self._error is not None)

    def end(self) -> None:
        """Declare that no more parts will come."""
        with self.changed:
            self._is_ended = True
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Drop all parts and raise this error in `parts`."""
        with self.changed:
            self._error = error
            self._early, self._ready = {}, deque()
            self.changed.notify_all()

    def parts(self) -> Iterator[bytes]:
        """The parts in order, until `end`; of a writer that never began to send, those that are there."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._ready or self._is_ended or self._error)
                if self._error is not None:
                    raise self._error
                if not self._ready:
                    self.is_empty = True
                    return
                part = self._ready.popleft()
                self.num_taken += 1
                self._ready_bytes -= len(part)
                self.changed.notify_all()
            yield part


def _put(inner: Any, name: str, view: memoryview, mode: Any) -> None:
    obstore.put(inner, name, bytes(view), mode=mode, use_multipart=False)


def _check_process() -> None:
    """UsageError in a forked child of a process that has used a bucket: obstore's threads are missing,
    and a request would hang."""
    global _pid
    if _pid is None:
        _pid = os.getpid()
    elif _pid != os.getpid():
        raise UsageError(
            "this process was forked from one that had used a bucket, where obstore cannot be used",
            hint="start processes by spawn or forkserver, or fork before the first use",
        )


_SECRETS = re.compile(
    r"((?:[?&][^=&\s]+|sig|sas|token|Signature|Credential|AWSAccessKeyId)=)[^&\s\"')]+",
    re.IGNORECASE,
)
"""Matches the query of a request's URL, which may hold a signature."""

_CUT = "request or response body error"
"""obstore's text for a connection that closed before the end of the reply."""
_NO_RANGE = re.compile(r"Wanted range starting at|CONTENT_RANGE header: \"bytes 0--1/0\"")
"""obstore's texts for a range past the end where the status does not say so (Azure's emulator)."""


def _said(error: Exception) -> str:
    """The first lines of obstore's message, without secrets and debug forms."""
    text = str(error).partition("\n\nDebug source")[0]
    return _SECRETS.sub(r"\1...", redacted(" ".join(text.split())))[:400]


def _status(error: Exception) -> str:
    """The line of obstore's message that states the HTTP status."""
    found = re.search(r"status code: (\d{3})", str(error))
    return found[1] if found else ""
