"""Checkpoints of many ranks, made in one process: images are written for each rank of a mesh in turn.

store = LocalStore(tmp_path)
build(store, Mesh((("dp", 2), ("tp", 2))), {
    "model.w": Tensor(np.ones((8, 8), "f4"), Sharding((Cut(0, ("dp",)), Cut(1, ("tp",))))),
}, step=10)
"""

from __future__ import annotations

import itertools
import time
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from holdfast.core.checkpoint.committing import commit
from holdfast.core.checkpoint.names import step_prefix
from holdfast.core.codec.digest import ALGORITHM, CHUNK_BYTES, digest_chunks, hexdigest, num_chunks
from holdfast.core.format import extras as coding
from holdfast.core.format.image import plan_image
from holdfast.core.format.manifest import (
    FORMAT_VERSION,
    FileEntry,
    Manifest,
    Resize,
    TensorEntry,
    from_sharding,
)
from holdfast.layout import Cut, Mesh, Sharding
from holdfast.store import MemoryStore, Store

WHOLE = Sharding()
_attempts = itertools.count(1)


@dataclass(frozen=True)
class Tensor:
    """Values, how they are cut, and the state's name."""

    values: Any
    sharding: Sharding = WHOLE
    state: str = "param"


def describe(mesh: Mesh, tensors: dict[str, Tensor], *, step: int = 1, run: int = 1) -> Manifest:
    """The manifest of such a checkpoint, without files or extras."""
    shardings = list(dict.fromkeys(t.sharding for t in tensors.values()))
    entries = tuple(
        TensorEntry(n, t.values.dtype.name, t.values.shape, shardings.index(t.sharding), t.state)
        for n, t in tensors.items()
    )
    return Manifest(
        FORMAT_VERSION, step, run, f"{run:04d}-{next(_attempts):06d}",
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        {"holdfast": "0", "torch": "0"}, mesh.axes, CHUNK_BYTES, ALGORITHM,
        tuple(from_sharding(s) for s in shardings), entries, {}, (), {}, {},
    )  # fmt: skip


def build(
    store: Store,
    mesh: Mesh,
    tensors: dict[str, Tensor],
    *,
    step: int = 1,
    run: int = 1,
    extras: dict[str, Any] | None = None,
    per_rank: dict[str, tuple[Resize | None, list[Any]]] | None = None,
    aliases: dict[str, str] | None = None,
    committed: bool = True,
) -> Manifest:
    """Write and commit a step as the ranks of `mesh` would.

    `per_rank`: key -> (rule, one value per rank).  `committed=False` leaves what a crash leaves.
    """
    draft = describe(mesh, tensors, step=step, run=run)
    own = per_rank or {}
    files = []
    for rank in range(mesh.world):
        values = {k: coding.encode(v[rank]) for k, (_, v) in own.items()}
        files.append(
            _write(store, draft, tensors, rank, msgspec.json.encode(values) if own else b"")
        )
    manifest = msgspec.structs.replace(
        draft,
        files=tuple(f for f in files if f is not None),
        extras={k: coding.encode(v) for k, v in (extras or {}).items()},
        per_rank={k: rule for k, (rule, _) in own.items()},
        aliases=aliases or {},
    )
    if committed:
        commit(store, manifest)
    return manifest


def _write(
    store: Store, manifest: Manifest, tensors: dict[str, Tensor], rank: int, own: bytes
) -> FileEntry | None:
    pieces = manifest.placement.pieces(rank)
    if not pieces.total_bytes and not own:
        return None
    room = -(-len(own) // 4096) * 4096
    image = plan_image(manifest.tensors, pieces, extras_bytes=room)
    body = bytearray(image.header)
    for number, start, stop in zip(pieces.tensor, pieces.start.tolist(), pieces.stop.tolist()):
        t = manifest.tensors[int(number)]
        box = tuple(slice(a, b) for a, b in zip(start, stop))[: len(t.shape)]
        body += np.ascontiguousarray(tensors[t.name].values[box]).tobytes()
    body += own.ljust(room)
    assert len(body) == image.table_start
    table = np.empty(num_chunks(len(body)), "<u8")
    digest_chunks(memoryview(body), table)
    path = f"{manifest.attempt}/r{rank:05d}.safetensors"
    store.put(step_prefix(manifest.step) + path, bytes(body) + table.tobytes())
    return FileEntry(
        rank, path, image.total_bytes, image.data_start, image.extras_start, image.table_start,
        hexdigest(table.tobytes()),
    )  # fmt: skip


FSDP_TP = Mesh((("dp", 2), ("tp", 2)))


def transformer(
    mesh: Mesh = FSDP_TP, *, layers: int = 2, width: int = 8, seed: int = 0
) -> dict[str, Tensor]:
    """A small model and its Adam state, cut as FSDP over tensor parallelism cuts them."""
    axes = tuple(a for a in ("dp", "fsdp") if a in mesh.sizes)
    dp = (Cut(0, axes),) if axes else ()
    tp = ("tp",) if "tp" in mesh.sizes else ()
    column = Sharding((Cut(0, tp), *dp)) if tp else Sharding(dp)
    row = Sharding((Cut(1, tp), *dp)) if tp else Sharding(dp)
    plain = Sharding(dp)
    shapes = {"wte.weight": ((4 * width, width), column), "norm.weight": ((width,), plain)}
    for i in range(layers):
        shapes[f"h.{i}.attn.wq.weight"] = ((width, width), column)
        shapes[f"h.{i}.attn.wo.weight"] = ((width, width), row)
        shapes[f"h.{i}.mlp.up.weight"] = ((4 * width, width), column)
        shapes[f"h.{i}.mlp.down.weight"] = ((width, 4 * width), row)
        shapes[f"h.{i}.norm.weight"] = ((width,), plain)
    random = np.random.default_rng(seed)

    def values(shape: tuple[int, ...]) -> Any:
        return random.standard_normal(shape).astype("f4")

    found = {f"model.{n}": Tensor(values(s), cut) for n, (s, cut) in shapes.items()}
    for name, (shape, cut) in shapes.items():
        for state in ("exp_avg", "exp_avg_sq"):
            found[f"optim.{name}.{state}"] = Tensor(values(shape), cut, state)
        found[f"optim.{name}.step"] = Tensor(np.array(10.0, "f4"), WHOLE, "step")
    return found


def memory() -> MemoryStore:
    """An empty store in this process's memory."""
    return MemoryStore(f"test-{uuid.uuid4().hex}")
