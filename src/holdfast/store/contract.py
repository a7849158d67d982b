"""The rules that every store enforces alike: the form of keys, the ends of ranges, the parts of a
writer.

A caller's mistake must fail in the same way on memory, disk and object storage; else a program that
was tested on one breaks on another.  So each store asks here before it touches anything:

    check_key("steps/0000000010/manifest.json")     # fine
    check_key("../secrets")                         # UsageError

A key is a relative path.  It must not be the directory of another key as well (`a` and `a/b`):
object storage allows that, a file system cannot.
"""

from __future__ import annotations

from holdfast.arguments import count_of, shown, unfit
from holdfast.errors import Corrupt, Exists, NotFound, UsageError
from holdfast.store.base import Bytes, Writer

BLOCK_BYTES = 4096
"""Parts are aligned to this in every store, though only a disk (O_DIRECT) needs it."""

HIDDEN = (".tmp-", ".nfs")
"""Names of files under way (ours) and of files deleted while open (NFS): never listed, no keys."""

MAX_KEY_CHARS = 1024
MAX_BYTES = 1 << 60
"""Most bytes of an object."""


def check_key(key: str) -> None:
    """Raise `UsageError` unless `key` can name an object in every store."""
    fault = _fault(key) if isinstance(key, str) else "it must be a text"
    if fault:
        raise UsageError(
            f"bad key {shown(key)}: {fault}", hint="a key looks like steps/0000000010/x"
        )


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
        if part.startswith(HIDDEN):
            return f"names that begin with {' or '.join(HIDDEN)} are for files under way"
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
    if type(offset) is not int or offset > MAX_BYTES:
        offset = count_of(offset, "Store.read", "offset", least=0, most=MAX_BYTES)
    if offset < 0:
        raise UsageError(f"cannot read at offset {offset}: offsets start at 0")
    if not isinstance(into, memoryview):
        raise unfit("Store.read", "into", into, "a memoryview to be filled")
    if into.readonly:
        raise UsageError("into: cannot read into memory that is read-only")
    return byte_view(into)


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
        self.size = count_of(size, "Store.create", "size", least=0, most=MAX_BYTES)
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
