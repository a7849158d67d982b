"""Segments: files of records, one per rank and batch of steps.  Torch-free.

```
log/0000000003/plan-<digest>.json                     how all ranks' records of run 3 are laid out
log/0000000003/0000000017-0000000024/r00002.log       records of steps 17 to 24 of rank 2
```
A segment appears whole or not at all.  Its header states for every record where it lies and which state it
leads on from; the record itself is an image (`holdfast.core.format.image`) whose tensors are gradients.

```
0       8        16        24       data        data + record.at
| magic | length | digest | header | ...       | image of a record | ...
```
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.base.arguments import MAX_STEP
from holdfast.base.errors import Corrupt, FormatError, UnsupportedVersion
from holdfast.base.wire import decode_json
from holdfast.core.codec.digest import (
    ALGORITHM,
    CHUNK_BYTES,
    MAX_TABLE_BYTES,
    digest,
    hexdigest,
)
from holdfast.core.format.image import ALIGN
from holdfast.core.format.manifest import ShardingEntry, TensorEntry
from holdfast.core.store import Reader, Store

VERSION = 1
MAGIC = b"HFLOG\r\n" + bytes([VERSION])
HEAD_BYTES = 24
LONG_BYTES = 1 << 20
"""Bytes of a header above which a byte at its end is read first: the file may be too short for it."""
MAX_HEADER_BYTES = 1 << 28


Identity = tuple[int, int]
"""A state: the run that reached it, and its step."""


class Applied(msgspec.Struct, frozen=True):
    """One call of an optimizer's step."""

    key: str
    hyper: tuple[Any, ...]
    """Hyperparameters of each parameter group, encoded as extras are."""
    missing: tuple[str, ...] = ()
    """Parameters without a gradient."""
    found_inf: float | None = None
    grad_scale: float | None = None
    """`found_inf` and `grad_scale` as a GradScaler set them for the optimizer's kernel."""
    hooks: int = 0
    """Number of hooks after the step, other than holdfast's; they may have written to weights."""


class Record(msgspec.Struct, frozen=True):
    """One step of one rank."""

    step: int
    parent: Identity
    """The state that it leads on from."""
    bytes: int
    """Length of its image."""
    data: int
    extras: int
    table: int
    """Bytes of the image at which tensors, extras and the digest table begin."""
    applied: tuple[Applied, ...]
    unchanged: tuple[str, ...] = ()
    """Names of recorded tensors that the step left unchanged."""
    notes: dict[str, tuple[str, str]] = {}
    """Digest and rule of each of its extras, by key."""
    late: tuple[str, ...] | None = None
    """Names of tensors that were written after the first optimizer step that may read them had begun; None
    if no step may read any."""
    at: int = 0
    """Bytes from the first record of the segment to this one."""
    digest: str = ""
    """Digest of its digest table."""
    sizes: dict[str, int] = {}
    """Lengths of packed tensors, by name: they differ from record to record."""


class SegmentHeader(msgspec.Struct, frozen=True):
    """The description of a segment and its records, at its beginning."""

    run: int
    rank: int
    world: int
    plan: str
    groups: dict[str, tuple[tuple[str, ...], ...]]
    """Parameters of each group on this rank, by optimizer."""
    kinds: dict[str, str] = {}
    """Classes of the optimizers as `module:name`, by optimizer."""
    records: tuple[Record, ...] = ()
    modules: dict[str, tuple[str, ...]] = {}
    """Keys of the modules that have an optimizer's parameters, by optimizer; absent in older logs."""


class SegmentPlan(msgspec.Struct, frozen=True):
    """The contents of all ranks' records: the part of a manifest that is the same for all of them."""

    mesh: tuple[tuple[str, int], ...]
    shardings: tuple[ShardingEntry, ...]
    tensors: tuple[TensorEntry, ...]
    aliases: dict[str, str]
    packed: tuple[TensorEntry, ...] = ()
    """Sparse gradients, whose nonzero elements are in packed tensors of `tensors`."""
    chunk_bytes: int = CHUNK_BYTES
    algorithm: str = ALGORITHM
    version: int = VERSION


def segment_key(run: int, first: int, last: int, rank: int) -> str:
    return f"log/{run:010d}/{first:010d}-{last:010d}/r{rank:05d}.log"


def plan_key(run: int, name: str) -> str:
    return f"log/{run:010d}/plan-{name}.json"


def put_plan(store: Store, run: int, plan: SegmentPlan) -> str:
    """Store a plan under the digest of its bytes; return that name."""
    data = msgspec.json.encode(plan)
    name = hexdigest(data)
    store.put(plan_key(run, name), data)
    return name


def read_plan(store: Store, run: int, name: str) -> SegmentPlan:
    """Read a plan, verified.  NotFound, Corrupt, FormatError, UnsupportedVersion."""
    key = plan_key(run, name)
    data = store.get(key)
    if (found := hexdigest(data)) != name:
        raise Corrupt("a plan differs from what was written", key=key, expected=name, found=found)
    try:
        plan = decode_json(data, SegmentPlan)
    except msgspec.DecodeError as error:
        raise FormatError(f"malformed plan: {error}", key=key) from None
    if plan.version > VERSION:
        raise UnsupportedVersion(f"log of version {plan.version}", key=key)
    return plan


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def encode_header(header: SegmentHeader) -> bytes:
    """The bytes before a segment's first record, padded to `ALIGN`."""
    body = msgspec.json.encode(header)
    if len(body) > MAX_HEADER_BYTES:
        raise FormatError(f"a header of {len(body)} bytes; at most {MAX_HEADER_BYTES}")
    head = MAGIC + len(body).to_bytes(8, "little") + digest(body).to_bytes(8, "little") + body
    return head.ljust(aligned(len(head)), b"\0")


def read_header(reader: Reader, key: str) -> tuple[SegmentHeader, int]:
    """A segment's header, and where its records begin.  Corrupt, FormatError, UnsupportedVersion."""
    head = bytearray(HEAD_BYTES)
    reader.read(0, memoryview(head))
    if head[:7] != MAGIC[:7]:
        raise FormatError("not a segment of a log", key=key)
    if head[7] > VERSION:
        raise UnsupportedVersion(
            f"log of version {head[7]}; this holdfast reads {VERSION}", key=key
        )
    size = int.from_bytes(head[8:16], "little")
    if size > MAX_HEADER_BYTES:
        raise FormatError(f"a header of {size} bytes", key=key)
    if size > LONG_BYTES:  # before memory is set aside: Corrupt if the file ends before
        reader.read(HEAD_BYTES + size - 1, memoryview(bytearray(1)))
    body = bytearray(size)
    reader.read(HEAD_BYTES, memoryview(body))
    if digest(body) != int.from_bytes(head[16:24], "little"):
        raise Corrupt("its header differs from what was written", key=key, start=0, stop=size)
    try:
        header = decode_json(body, SegmentHeader)
    except msgspec.DecodeError as error:
        raise FormatError(f"malformed header: {error}", key=key) from None
    _check(header, key)
    return header, aligned(HEAD_BYTES + size)


def _check(header: SegmentHeader, key: str) -> None:
    """Raise FormatError for a header that no writer writes, or that ranks cannot send each other."""
    try:
        msgspec.msgpack.encode(header)
    except OverflowError:
        raise FormatError("a header with a number of more than 64 bits", key=key) from None
    for record in header.records:
        if not record.parent < (header.run, record.step) <= (header.run, MAX_STEP):
            what = f"step {record.step} of run {header.run} leads on from {record.parent}"
            raise FormatError(f"a record that no run can make: {what}", key=key)
        if record.bytes - record.table > MAX_TABLE_BYTES:
            size = record.bytes - record.table
            raise FormatError(f"step {record.step}: a digest table of {size} bytes", key=key)
        for one in record.applied:
            groups = header.groups.get(one.key, one.hyper)
            if len(one.hyper) != len(groups) or not all(isinstance(h, dict) for h in one.hyper):
                raise FormatError(f"the groups of {one.key!r} are not those of its steps", key=key)
