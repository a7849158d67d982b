"""The manifest: one JSON file whose existence is the commit.

It states the step's tensors and extras, how every tensor is cut over the mesh, and which files hold the
bytes, with the digest of each file's digest table.  It lists nothing per rank that follows from the
shardings, so it stays small: 45,000 tensors on 4,096 ranks take 5.8 MB (bench/claims/plan_scale.py).

The first bytes are always `{"holdfast":1,"step":N,"run":R,` (readers that only list steps need no
more) and the last ones `,"digest":"<XXH3-64 of everything before this comma>"}`.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from holdfast.base.errors import Corrupt, FormatError, HoldfastError, UnsupportedVersion, printable
from holdfast.base.gc_pause import uncollected
from holdfast.base.wire import decode_json
from holdfast.core.codec.digest import SEAL_BYTES, hexdigest, with_seal, without_seal
from holdfast.core.format.dtypes import DTYPES
from holdfast.core.format.unsaved import Unsaved, no_text
from holdfast.core.layout import Box, Cut, Mesh, Sharding

if TYPE_CHECKING:
    from holdfast.core.layout.pieces import Placement

FORMAT_VERSION = 1
_MAX_BYTES = MAX_EXTRAS_BYTES = 1 << 30
"""Most bytes of a manifest, and of the extras in an image."""

PACK_HEAD = b"holdfast"
"""First bytes of a pack of attached files, so that no pack is empty."""
MAX_ATTACHED = 64 << 20
"""Most bytes of all files attached to a step."""

ReplicaRule = Literal["replicated", "unique", "averaged"]
Resize = Literal["same", "rank0", "redistribute", "fresh"]


class CutEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    dim: int
    axes: tuple[str, ...]


class FragmentEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    rank: int
    start: tuple[int, ...]
    stop: tuple[int, ...]


class ShardingEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """See `holdfast.core.layout.sharding.Sharding`."""

    cuts: tuple[CutEntry, ...] = ()
    on: dict[str, tuple[int, ...]] = {}
    held: tuple[FragmentEntry, ...] | None = None


MODEL_STATES = ("param", "buffer", "tensor")
"""Values of a tensor's `state` that are no states of optimizers."""


def owner_of(name: str, state: str) -> str:
    """The name of what a tensor is of: a parameter, for the `state` of an optimizer, which may have dots;
    else the tensor itself."""
    return name if state in MODEL_STATES else name.removesuffix(f".{state}")


class TensorEntry(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False
):
    """A logical tensor.  `state`: `param`, `buffer`, `tensor`, or an optimizer state's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sharding: int = 0
    state: str = "tensor"
    replica: ReplicaRule = "replicated"


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A rank's image: byte offsets of its tensors (`data`), extras and digest `table`; `digest`: of the
    table."""

    rank: int
    path: str
    bytes: int
    data: int
    extras: int
    table: int
    digest: str
    strip: str = ""


class AttachedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file kept beside a step; its bytes begin at `start` of the pack."""

    name: str
    start: int
    bytes: int
    digest: str


class PackEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The object of all attached files: `PACK_HEAD`, the files back to back, and at `table` the digest
    table, as in an image."""

    path: str
    bytes: int
    table: int
    digest: str
    files: tuple[AttachedFile, ...]


class Manifest(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True
):
    """All that a reader needs besides the bytes; field order is file order.  A field at its default is not
    written, so that older readers, which do not know it, accept the step."""

    holdfast: int
    step: int
    run: int
    attempt: str
    created: str
    software: dict[str, str]
    mesh: tuple[tuple[str, int], ...]
    chunk_bytes: int
    algorithm: str
    shardings: tuple[ShardingEntry, ...]
    tensors: tuple[TensorEntry, ...]
    aliases: dict[str, str]
    files: tuple[FileEntry, ...]
    extras: dict[str, Any]
    per_rank: dict[str, Resize | None]
    metrics: dict[str, float | None] = {}
    attached: PackEntry | None = None
    line: tuple[tuple[int, int], ...] = ()
    """Runs that this run continues, each with its last step that counts (`checkpoint.lineage`)."""

    @cached_property
    def layout(self) -> Mesh:
        return Mesh(self.mesh)

    @cached_property
    def by_name(self) -> dict[str, int]:
        return {t.name: i for i, t in enumerate(self.tensors)}

    @cached_property
    def _by_any_name(self) -> dict[str, int | None]:
        return self.by_name | {alias: self.by_name.get(n) for alias, n in self.aliases.items()}

    def find(self, name: str) -> int | None:
        """Number of a tensor by its name or alias; None if there is none."""
        return self._by_any_name.get(name)

    @cached_property
    def file_of(self) -> dict[int, FileEntry]:
        return {f.rank: f for f in self.files}

    @cached_property
    def placement(self) -> Placement:
        from holdfast.core.layout.pieces import Placement, Table

        table = Table.build(
            [t.name for t in self.tensors],
            [t.shape for t in self.tensors],
            [DTYPES[t.dtype].bytes for t in self.tensors],
            tuple(to_sharding(s) for s in self.shardings),
            [t.sharding for t in self.tensors],
        )
        return Placement(self.layout, table)

    @cached_property
    def objects(self) -> tuple[FileEntry, ...]:
        """All objects of the step: images, and the pack of attached files as a file of rank 0."""
        pack = self.attached
        if pack is None:
            return self.files
        ends = pack.table, pack.table, pack.table
        return (*self.files, FileEntry(0, pack.path, pack.bytes, *ends, pack.digest))

    @property
    def total_bytes(self) -> int:
        return sum(f.bytes for f in self.objects)


def to_sharding(entry: ShardingEntry) -> Sharding:
    held = None
    if entry.held is not None:
        held = tuple((f.rank, Box(f.start, f.stop)) for f in entry.held)
    cuts = tuple(Cut(c.dim, c.axes) for c in entry.cuts)
    return Sharding(cuts, tuple(sorted(entry.on.items())), held)


def from_sharding(sharding: Sharding) -> ShardingEntry:
    held = None
    if sharding.held is not None:
        held = tuple(FragmentEntry(r, b.start, b.stop) for r, b in sharding.held)
    cuts = tuple(
        [CutEntry(c.dim, c.axes) for c in sharding.cuts]
    )  # an empty tuple is the default itself
    return ShardingEntry(cuts, dict(sharding.on), held)


CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""Characters that no name may have: a terminal that lists names would execute them."""


def with_control(m: Manifest) -> str | None:
    """The first name with a control character; None if no name has one."""
    names = [t.name for t in m.tensors]
    names += [*{t.state for t in m.tensors}, *m.aliases, *(f.path for f in m.objects)]
    names += [*(axis for axis, _ in m.mesh), *m.extras, *m.per_rank, *m.metrics, *m.software]
    names += [m.attempt, m.created]
    if "".join(names).isprintable():
        return None
    return next(filter(CONTROL.search, names), None)


def readable(manifest: Manifest) -> Manifest:
    """Return the manifest.  UsageError if it has a name that readers would refuse."""
    name = with_control(manifest)
    if name is not None:
        why, hint = "a name with a control character cannot be saved", "give it another name"
        raise Unsaved(printable(name[:200]), why, hint)
    return manifest


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the canonical bytes of a manifest, with its seal.  UsageError if they are too many."""
    try:
        document = msgspec.json.encode(manifest)
    except UnicodeEncodeError as error:  # names of a foreign checkpoint
        raise no_text(error) from None
    if len(document) > _MAX_BYTES - SEAL_BYTES:
        why = f"it has {len(document):,} bytes, of which readers take at most {_MAX_BYTES:,}"
        raise Unsaved("the manifest", why, "have large arrays as tensors")
    return with_seal(document)


_HEAD = re.compile(rb'\{"holdfast":(\d{1,9}),"step":(\d{1,18}),"run":(\d{1,9}),')
MANIFEST_HEAD_BYTES = 80


def decode_head(data: bytes, key: str) -> tuple[int, int, int]:
    """(version, step, run) from the first `MANIFEST_HEAD_BYTES` bytes of a manifest of any version."""
    head = _HEAD.match(data)
    if not head:
        raise FormatError("not a holdfast manifest", key=key)
    version, step, run = map(int, head.groups())
    return version, step, run


def _check_version(data: bytes, key: str) -> None:
    version = decode_head(data, key)[0]
    if version != FORMAT_VERSION:
        raise UnsupportedVersion(
            f"format version {version}; this holdfast reads version {FORMAT_VERSION}",
            key=key,
            hint="install the holdfast that wrote it, or a newer one",
        )


def verified(data: bytes, key: str) -> memoryview:
    """Return the bytes of a manifest without its seal.  Corrupt if the seal does not hold;
    UnsupportedVersion or FormatError."""
    if len(data) > _MAX_BYTES:
        raise FormatError(f"manifest of {len(data)} bytes; at most {_MAX_BYTES}", key=key)
    _check_version(data, key)
    body, expected = without_seal(data)
    if not expected:
        raise Corrupt(
            "manifest is cut short: its seal is missing", key=key, start=0, stop=len(data)
        )
    if (found := hexdigest(body)) != expected:
        raise Corrupt(
            f"manifest differs from what was written: digest {found}, expected {expected}",
            key=key,
            start=0,
            stop=len(body),
            expected=expected,
            found=found,
        )
    return body


def decode_manifest(data: bytes, key: str) -> Manifest:
    """Parse and check a manifest.  Corrupt, UnsupportedVersion or FormatError."""
    from holdfast.core.format.checking import (
        check,
        require,
    )  # a run that only saves does not need it

    body = verified(data, key)
    try:
        with uncollected():
            manifest = decode_json(b"".join((body, b"}")), Manifest)
            head = (manifest.holdfast, manifest.step, manifest.run)
            require(head == decode_head(data, key), "it states its version, step or run twice")
            check(manifest)
    except HoldfastError as error:
        error.key = error.key or key
        raise
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(f"malformed manifest: {error}", key=key) from None
    return manifest
