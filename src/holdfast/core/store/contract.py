"""The interface that holdfast asks of storage: flat keys, immutable bytes.

A key is a relative path of `/`-separated names (`steps/0000000010/manifest.json`).  An object is written
once and never changed; it exists with all its bytes or not at all.  Four questions define a store; file
systems and object storage can both answer them:

* *How does an object appear?*  `put` makes a small one appear at once, durable when the call
  returns; `if_absent=True` makes exactly one of several writers win (the others get `Exists`), and so
  does `replacing=` among several that have seen the same object and mean to replace it.
  `create` opens a large one: parts arrive in any order and from several threads, the object
  appears at `finish()`, durable, or never.
* *How is it read?*  By ranges, into the caller's memory.  A range past the end is an error, never
  a short read.  To read many ranges of one object, open it first: a file system then reads ahead.
  A store with a high latency may ask for longer ranges and more threads (`Reads`).
* *What is there?*  `list(prefix)`: every key below, sorted; `entries(prefix)`: their sizes as well.  A
  key whose `put` or `finish` returned before the call is listed.  On object storage both take one request
  for every 1,000 keys; a directory stats each file for `entries`, so use `list` if sizes do not matter.
  (There is no `exists()`: two ranks may see two answers.)
* *How does it go?*  `delete`; deleting an absent object is no error.  A store that can delete many objects,
  or list several prefixes, in one request may have methods for that (`Bulk`).

There is no rename of directories, no lock and no append: NFS and object stores have none to rely on.
Errors are `StoreError`s: a store translates its own at its border.  Methods block and are
thread-safe.

Every store calls the checks below before it does any I/O: the form of keys, the ends of ranges, the parts
of a writer.  So a caller's mistake fails in the same way in memory, on disk and on object storage; a
program that was tested on one does not break on another:

    check_key("steps/0000000010/manifest.json")     # fine
    check_key("../secrets")                         # UsageError

A key must not be the directory of another key as well (`a` and `a/b`): a file system cannot store both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from holdfast.base.arguments import count_of, shown, unfit
from holdfast.base.errors import Corrupt, Exists, NotFound, UsageError

# -- the interface -----------------------------------------------------------------------------------


Bytes: TypeAlias = "bytes | bytearray | memoryview"


class Entry(NamedTuple):
    """One object as a listing shows it."""

    key: str
    bytes: int
    """Length of the object."""


@runtime_checkable
class Writer(Protocol):
    """One large object being written; owned by the caller until `finish` or `abort`."""

    block_bytes: int
    """Parts start at a multiple of this; all but the last are a multiple long.

    A power of two: 4096 for a disk, several MiB for object storage.
    """

    def write(self, offset: int, data: Bytes) -> None:
        """Write a part.  Thread-safe; the caller may reuse the memory when the call returns.

        A part may be written again with the same bytes.  Write parts roughly in order: a bucket's writer
        holds early parts in memory.
        """

    def finish(self) -> None:
        """Make the object appear with all its bytes, durable.  Raises if a part is missing."""

    def abort(self) -> None:
        """Discard everything written; safe after any error, also after `finish` raised."""


@runtime_checkable
class Reader(Protocol):
    """One object being read; owned by the caller, who must not close it during a `read`.

    After the object was deleted, a read returns its bytes or raises `NotFound` or `Unavailable`; it never
    returns another object's bytes.
    """

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on, as `Store.read`.  Thread-safe."""

    def close(self) -> None:
        """Release the object.  Safe to call twice."""


@runtime_checkable
class Store(Protocol):
    """Flat keys to immutable bytes."""

    url: str
    """The store's address, for messages and for opening it again."""

    def put(
        self, key: str, data: Bytes, *, if_absent: bool = False, replacing: Bytes | None = None
    ) -> None:
        """Make a small object appear, replacing an older one unless `if_absent` (then `Exists`).

        `replacing`: compare and swap.  The object is replaced only if its bytes equal these; else `Exists`,
        or `NotFound` if it is gone.  Of several such calls with the same bytes exactly one wins, from
        whatever process or host; unconditional calls and `delete` do not wait for them.  Object storage
        uses `If-Match`.  UsageError together with `if_absent`.
        """

    def create(self, key: str, size: int) -> Writer:
        """Begin a large object of exactly `size` bytes under a fresh key."""

    def get(self, key: str) -> bytes:
        """Return all bytes of an object: a manifest, a plan, or smaller.  `NotFound` if there is none;
        `Corrupt`, before any byte is read, if it is longer than `WHOLE_BYTES`."""

    def read(self, key: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on.  `NotFound`; `Corrupt` if the object is shorter."""

    def open(self, key: str) -> Reader:
        """Open an object to read many ranges.  `NotFound` if there is none, now or at a read."""

    def size(self, key: str) -> int:
        """Length of an object in bytes.  `NotFound` if there is none."""

    def entries(self, prefix: str = "") -> list[Entry]:
        """All objects whose keys begin with `prefix`, sorted, with their lengths.

        An object that is deleted during the call may be missing.
        """

    def list(self, prefix: str = "") -> list[str]:
        """All keys that begin with `prefix`, sorted; empty if there are none."""

    def delete(self, key: str) -> None:
        """Remove an object if it is there; durable when the call returns."""


EntryList: TypeAlias = list[Entry]


@runtime_checkable
class Bulk(Protocol):
    """Optional bulk requests of a store: both methods, or neither.

    Without them, `delete_many` and `keys_below` of this package use `Store`'s own methods.
    """

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects, in any order; absent ones are no error.  Durable when the call returns; after an
        error or a crash some may be deleted and others not."""

    def entries_many(self, prefixes: Sequence[str]) -> EntryList:
        """All objects whose keys begin with one of `prefixes`, each once, as `Store.entries`."""


@runtime_checkable
class Bounded(Protocol):
    """A store that checks the length of an object before it reads it into memory."""

    def get_small(self, key: str) -> bytes:
        """`Store.get`, but `Corrupt` if the object has more than `SMALL_FILE_BYTES`."""


class Reads(NamedTuple):
    """How a store is read fastest: its optional attributes `read_bytes` and `read_threads`."""

    num_bytes: int
    """Bytes of a range; 0: any."""
    threads: int
    """Threads that read at the same time; 0: by the number of cores."""


def reads_of(store: Store) -> Reads:
    """Return how a store is read fastest; zeros if it does not say."""
    return Reads(getattr(store, "read_bytes", 0), getattr(store, "read_threads", 0))


def size_at(store: Store, key: str) -> int | None:
    """Return the length of an object in bytes; None if there is none."""
    try:
        return store.size(key)
    except NotFound:
        return None


# -- the rules ---------------------------------------------------------------------------------------


BLOCK_BYTES = 4096
"""Parts are aligned to this in every store, though only a disk (O_DIRECT) needs it."""

_HIDDEN = (".tmp-", ".nfs")
"""Prefixes of temporary files, and of files deleted while open (NFS): never listed, never keys."""

WHOLE_BYTES = 1 << 30
"""Most bytes of an object that is read whole: a manifest of very many tensors."""
SMALL_FILE_BYTES = 64 << 20
"""Most bytes of a file that lists no tensors: notes, claims, an index of files."""
MAX_KEY_CHARS = 1024
_MAX_BYTES = 1 << 60
"""Most bytes of an object."""


def check_key(key: str) -> None:
    """Raise `UsageError` unless `key` can name an object in every store."""
    fault = _fault(key) if isinstance(key, str) else "it must be a text"
    if fault:
        raise UsageError(
            f"bad key {shown(key)}: {fault}", hint="a key looks like steps/0000000010/x"
        )


def is_key(name: str) -> bool:
    """True if a name from a listing is a valid key: other programs' files may have any name."""
    return _fault(name) is None


def check_prefix(prefix: str) -> None:
    """Raise `UsageError` unless keys can begin with `prefix`; `""` and a final `/` are fine."""
    if not isinstance(prefix, str):
        raise UsageError(f"bad prefix {shown(prefix)}: it must be a text")
    directory, slash, _ = prefix.rpartition("/")
    fault = _fault(directory) if slash else None
    fault = fault or _fault_in_text(prefix)
    if fault:
        raise UsageError(f"bad prefix {shown(prefix)}: {fault}")


def _fault(key: str) -> str | None:
    for part in key.split("/"):
        if part in ("", ".", ".."):
            return f"it has a part {part!r}; keys are relative paths without detours"
        if part.startswith(_HIDDEN):
            return f"names that begin with {' or '.join(_HIDDEN)} are for files under way"
    return _fault_in_text(key)


def _fault_in_text(key: str) -> str | None:
    if len(key) > MAX_KEY_CHARS:
        return f"it has {len(key)} characters, more than {MAX_KEY_CHARS}"
    if "\0" in key or "\\" in key:
        return "it has a NUL or a backslash"
    try:
        key.encode()
    except UnicodeEncodeError:
        return "it cannot be written in UTF-8"
    return None


def byte_view(data: Bytes) -> memoryview:
    """The memory of `data` as flat bytes, without a copy; it must be contiguous."""
    try:
        view = memoryview(data)
    except TypeError:
        raise unfit("Store", "data", data, "bytes, or memory that gives its bytes") from None
    if not view.c_contiguous:
        raise UsageError("data: the memory of an object must be contiguous", hint="copy it first")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def target_view(into: memoryview, offset: int) -> memoryview:
    """Return `into` as flat bytes.  UsageError unless it is writable and `offset` not negative."""
    if type(offset) is not int or offset > _MAX_BYTES:
        offset = count_of(offset, "Store.read", "offset", least=0, most=_MAX_BYTES)
    if offset < 0:
        raise UsageError(f"cannot read at offset {offset}: offsets start at 0")
    if not isinstance(into, memoryview):
        raise unfit("Store.read", "into", into, "a memoryview to be filled")
    if into.readonly:
        raise UsageError("into: cannot read into memory that is read-only")
    return byte_view(into)


def check_length(key: str, url: str, size: int, most_bytes: int) -> int:
    """Return `size`, the length of an object about to be read.  Corrupt if above `most_bytes`."""
    if size > most_bytes:
        raise Corrupt(
            f"'{key}' in {url} has {size:,} bytes; of its kind at most {most_bytes:,} are read",
            key=key,
            expected=f"at most {most_bytes} bytes",
            found=f"{size} bytes",
            hint="it is not what was written there; put it back from a copy",
        )
    return size


def not_found(key: str, url: str) -> NotFound:
    """The error for a key that names nothing."""
    return NotFound(f"no object '{key}' in {url}", key=key)


def exists(key: str, url: str) -> Exists:
    """The error for a key that is taken."""
    return Exists(f"there is an object '{key}' in {url} already", key=key)


def not_the_seen(key: str, url: str) -> Exists:
    """The error for a `put` whose `replacing` differs from the object's bytes."""
    return Exists(
        f"the object '{key}' in {url} has changed since it was read",
        key=key,
        hint="another process has replaced it; read it again",
    )


def seen_view(key: str, if_absent: bool, replacing: Bytes | None) -> memoryview | None:
    """Return `replacing` of a `put` as flat bytes.  UsageError if `if_absent` is given, too."""
    if replacing is None:
        return None
    if if_absent:
        raise UsageError(
            f"cannot put '{key}' both if_absent and replacing what is there: give one", key=key
        )
    return byte_view(replacing)


def part_bytes(writer: Writer, wanted: int) -> int:
    """Return the part length for a writer: the larger of `wanted` and its block, both powers of two."""
    return max(writer.block_bytes, wanted)


def check_blocks(writer: Writer, key: str, part_bytes: int, hint: str | None = None) -> None:
    """UsageError unless a writer takes parts of `part_bytes`, for callers with a fixed part length."""
    if part_bytes % writer.block_bytes:
        raise UsageError(
            f"cannot write '{key}' in parts of {part_bytes:,} bytes: this store takes multiples of "
            f"{writer.block_bytes:,} (Writer.block_bytes)",
            key=key,
            hint=hint,
        )


def check_range(key: str, offset: int, view: memoryview, size: int) -> None:
    """Corrupt if the range of `view` at `offset` reaches past the end of an object of `size` bytes."""
    if view and offset + len(view) > size:
        raise past_end(key, offset, offset + len(view), size)


def past_end(key: str, start: int, stop: int, size: int) -> Corrupt:
    """The error for a range that reaches past the end of an object of `size` bytes."""
    return Corrupt(
        f"'{key}' ends at byte {size}, before the end of the range {start}..{stop} to be read",
        key=key,
        start=start,
        stop=stop,
        expected=f"at least {stop} bytes",
        found=f"{size} bytes",
        hint="the object was cut short, or what describes it belongs to another one",
    )


class Parts:
    """The byte ranges of an object that a writer has received.

    Parts come in any order, from any thread, and possibly twice (a retry).  Adding one is a list append;
    ranges are sorted only by `check_complete`, which is called once.
    """

    def __init__(self, key: str, size: int) -> None:
        check_key(key)
        self.key = key
        self.size = count_of(size, "Store.create", "size", least=0, most=_MAX_BYTES)
        self._done: list[tuple[int, int]] = []

    def check(self, offset: int, num_bytes: int) -> None:
        """Raise `UsageError` for a part that is out of bounds or not aligned."""
        stop = offset + num_bytes
        if offset < 0 or stop > self.size:
            raise self._refusal(offset, stop, f"the object is {self.size} bytes long")
        if offset % BLOCK_BYTES or (num_bytes % BLOCK_BYTES and stop != self.size):
            rule = f"parts start at a multiple of {BLOCK_BYTES}, and all but the last end at one"
            raise self._refusal(offset, stop, rule)

    def check_open(self, state: str) -> None:
        """Raise `UsageError` unless the state of the writer is `open`."""
        if state != "open":
            hint = "abort it and write the object again" if state == "failed" else None
            raise UsageError(f"the writer of '{self.key}' is {state}", key=self.key, hint=hint)

    def add(self, offset: int, num_bytes: int) -> None:
        """Record a part that was written."""
        self._done.append((offset, offset + num_bytes))

    def check_complete(self) -> None:
        """Raise `UsageError` that names the first hole, if there is one."""
        reached = 0
        for start, stop in [*sorted(self._done), (self.size, self.size)]:
            if start > reached:
                raise UsageError(
                    f"cannot finish '{self.key}': bytes {reached}..{start} were never written",
                    key=self.key,
                )
            reached = max(reached, stop)

    def _refusal(self, start: int, stop: int, rule: str) -> UsageError:
        message = f"cannot write bytes {start}..{stop} of '{self.key}': {rule}"
        return UsageError(message, key=self.key)
