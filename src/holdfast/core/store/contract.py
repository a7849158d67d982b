"""The interface that holdfast asks of storage: flat keys, immutable bytes.

A key is a relative path of `/`-separated names (`steps/0000000010/manifest.json`).  An object is
written once and never changed; it is either wholly there or not there at all.  Five questions make
a store, and each has one answer that object storage can give as well as a file system:

* *How does an object appear?*  `put` makes a small one appear at once, durable when the call
  returns; `if_absent=True` makes exactly one of several writers win (the others get `Exists`), and so
  does `replacing=` among several that have seen the same object and mean to replace it.
  `create` opens a large one: parts arrive in any order and from several threads, the object
  appears at `finish()`, durable, or never.
* *How is it read?*  By ranges, into the caller's memory.  A range past the end is an error, never
  a short read.  Who reads many ranges of one object opens it first: a file system then reads ahead.
  A store that takes long to begin to answer may ask for longer ranges by more threads (`Reads`).
* *What is there?*  `list(prefix)`: every key below, sorted; `entries(prefix)`: their sizes as well.  A
  key whose `put` or `finish` returned before the call is listed.  Either is one request on object
  storage for every 1,000 keys; a directory has to look at each file for its size, so who needs no sizes
  asks for the list.  (No `exists()`: two ranks may see two answers.)
* *How does it go?*  `delete`; deleting what is not there is fine.  A store that can delete many objects, or
  list several prefixes, by one request may have methods for that (`Bulk`).

No rename of directories, no locks, no append: NFS and object stores have none that can be trusted.
Errors are `StoreError`s: a store translates its own at its border.  Methods block and are
thread-safe.

Some rules every store enforces alike, by the checks below: the form of keys, the ends of ranges, the parts
of a writer.  A caller's mistake must fail in the same way on memory, disk and object storage; else a
program that was tested on one breaks on another.  So each store asks here before it touches anything:

    check_key("steps/0000000010/manifest.json")     # fine
    check_key("../secrets")                         # UsageError

A key is a relative path.  It must not be the directory of another key as well (`a` and `a/b`):
object storage allows that, a file system cannot.
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
    """Parts must start at a multiple of this, and be a multiple long but for the last.

    A power of two: 4096 for a disk, several MiB for object storage.  Whoever writes asks each writer.
    """

    def write(self, offset: int, data: Bytes) -> None:
        """Write a part.  Thread-safe; the memory is the caller's again when the call returns.

        A part may come again, with the same bytes.  Parts are best written about in order: a bucket's
        writer keeps those that come before their turn in memory.
        """

    def finish(self) -> None:
        """Make the object appear with all its bytes, durable.  Raises if a part is missing."""

    def abort(self) -> None:
        """Forget everything written; safe after any error, also after `finish` raised."""


@runtime_checkable
class Reader(Protocol):
    """One object being read; owned by the caller, who must not close it under a `read`.

    After the object was deleted, a read gives its bytes, or `NotFound`, or `Unavailable`: never another
    object's.
    """

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on, as `Store.read`.  Thread-safe."""

    def close(self) -> None:
        """Let go of it.  Safe to call twice."""


@runtime_checkable
class Store(Protocol):
    """Flat keys to immutable bytes."""

    url: str
    """The store's address, for messages and for opening it again."""

    def put(
        self, key: str, data: Bytes, *, if_absent: bool = False, replacing: Bytes | None = None
    ) -> None:
        """Make a small object appear, replacing an older one unless `if_absent` (then `Exists`).

        `replacing`: the bytes of the object as the caller has seen it.  It is replaced only if these are
        its bytes now; else `Exists`, or `NotFound` if it is gone.  Of several calls that have seen the
        same object exactly one wins, whatever process or host they come from; calls without a condition,
        and `delete`, are not held off meanwhile.  Object storage does so with `If-Match`.  Not together
        with `if_absent`: UsageError.
        """

    def create(self, key: str, size: int) -> Writer:
        """Begin a large object of exactly `size` bytes under a fresh key."""

    def get(self, key: str) -> bytes:
        """The whole of an object: a manifest, a plan, or smaller.  `NotFound` if there is none, `Corrupt`
        if it has more than `WHOLE_BYTES`, whatever asked for it; the store looks at the length first."""

    def read(self, key: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset` on.  `NotFound`; `Corrupt` if it ends before."""

    def open(self, key: str) -> Reader:
        """Open an object to read many ranges.  `NotFound` if there is none, now or at a read."""

    def size(self, key: str) -> int:
        """Length of an object in bytes.  `NotFound` if there is none."""

    def entries(self, prefix: str = "") -> list[Entry]:
        """All objects whose keys begin with `prefix`, as `list`, with the length of each.

        An object that is deleted meanwhile may be left out.
        """

    def list(self, prefix: str = "") -> list[str]:
        """All keys that begin with `prefix`, sorted.  A missing prefix is an empty list."""

    def delete(self, key: str) -> None:
        """Remove an object if it is there; durable when the call returns."""


EntryList: TypeAlias = list[Entry]


@runtime_checkable
class Bulk(Protocol):
    """What a store may have besides, where one request does the work of many: both methods, or neither.

    `holdfast.store.delete_many` and `keys_below` ask for them, and make do with `Store`'s own.
    """

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove those objects that are there, in any order; durable when the call returns.  If it fails,
        or the process dies, some may be gone and others not."""

    def entries_many(self, prefixes: Sequence[str]) -> EntryList:
        """All objects whose keys begin with one of `prefixes`, each once, as `Store.entries`."""


@runtime_checkable
class Bounded(Protocol):
    """A store that knows the length of an object before it takes it into memory."""

    def get_small(self, key: str) -> bytes:
        """`Store.get`, but `Corrupt` if the object has more than `SMALL_FILE_BYTES`."""


class Reads(NamedTuple):
    """How a store is read best; it may state so by its attributes `read_bytes` and `read_threads`."""

    num_bytes: int
    """Bytes of a range; 0 if that is all the same to it."""
    threads: int
    """Threads that read at the same time; 0 to go by the cores of the host."""


def reads_of(store: Store) -> Reads:
    """How a store says it is read best."""
    return Reads(getattr(store, "read_bytes", 0), getattr(store, "read_threads", 0))


# -- the rules ---------------------------------------------------------------------------------------


BLOCK_BYTES = 4096
"""Parts are aligned to this in every store, though only a disk (O_DIRECT) needs it."""

_HIDDEN = (".tmp-", ".nfs")
"""Names of files under way (ours) and of files deleted while open (NFS): never listed, no keys."""

WHOLE_BYTES = 1 << 30
"""Most bytes of an object that is read whole: a manifest of very many tensors."""
SMALL_FILE_BYTES = 64 << 20
"""Most bytes of one that lists no tensors: notes, claims, an index of files."""
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
    """True if a name that was found in storage can be a key: what others put there may have any name."""
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
    """The flat bytes of memory that a range from `offset` on is to be read into."""
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
    """Return the length of an object that is about to be read whole.  Corrupt if it is too long."""
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
    """The error for an object that is not the one that was to be replaced."""
    return Exists(
        f"the object '{key}' in {url} is not the one that was to be replaced",
        key=key,
        hint="another process has put it since it was read; read it again",
    )


def seen_view(key: str, if_absent: bool, replacing: Bytes | None) -> memoryview | None:
    """The bytes that a `put` is to replace.  UsageError if it asks that there be none as well."""
    if replacing is None:
        return None
    if if_absent:
        raise UsageError(
            f"cannot put '{key}' both if_absent and replacing what is there: give one", key=key
        )
    return byte_view(replacing)


def part_bytes(writer: Writer, wanted: int) -> int:
    """The length of parts for a writer: `wanted` bytes, or one of its blocks if that is more.

    Both are powers of two, so the one is a multiple of the other.
    """
    return max(writer.block_bytes, wanted)


def check_blocks(writer: Writer, key: str, part_bytes: int, hint: str | None = None) -> None:
    """UsageError unless parts of an object can be of `part_bytes`, for those who cannot choose."""
    if part_bytes % writer.block_bytes:
        raise UsageError(
            f"cannot write '{key}' in parts of {part_bytes:,} bytes: this store takes multiples of "
            f"{writer.block_bytes:,} (Writer.block_bytes)",
            key=key,
            hint=hint,
        )


def check_range(key: str, offset: int, view: memoryview, size: int) -> None:
    """Corrupt if a range reaches past the end that an object had when it was opened."""
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
    """Record of which bytes of an object under way have arrived.

    Parts come in any order and from any thread; a part may come again (a retry).  Recording is one
    append and the only question, whether all is there, is asked once, so ranges are sorted then.
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
