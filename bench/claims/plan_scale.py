"""Planning at scale: 1 T parameters with Adam, 15,000 tensors x 3 states, 4,096 ranks, on one core.

Made-up metadata only: 1,250 layers of width 8,192 on pipeline 16 x data 32 x tensor 8 (FSDP2 over tensor
parallelism).  Measured: the manifest's size; the save plan of one rank (where its pieces lie, and its
image); the restore plan of one rank of another mesh, 8 x 64 x 8: parse the manifest, find the bytes of
everything that the rank wants, and cut the reads into blocks.  Nothing is read or written.
All of it once more with the `step` of each parameter, 15,000 scalars that every rank of a stage holds.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from bench.lib.claims import Claim
from bench.lib.common import measuring, report, row

CLAIMS = (
    Claim(
        "The manifest of 10^12 parameters on 4,096 ranks has at most 20 MB.",
        r"ranks: manifest \|",
        at_most=20,
        unit="MB",
    ),
    Claim(
        "Such a rank plans a save within a second.", r"^save plan of one rank", at_most=1, unit="s"
    ),
    Claim(
        "Such a rank plans a restore on another mesh within a second.",
        r"^restore plan of one rank",
        at_most=1,
        unit="s",
    ),
)

WIDTH, LAYERS = 8192, 1250
SAVED = (("pp", 16), ("dp", 32), ("tp", 8))
LIVE = (("pp", 8), ("dp", 64), ("tp", 8))
PARAMS = (
    ("attn.qkv.weight", (3 * WIDTH, WIDTH), 0), ("attn.qkv.bias", (3 * WIDTH,), 0),
    ("attn.proj.weight", (WIDTH, WIDTH), 1), ("attn.proj.bias", (WIDTH,), None),
    ("mlp.fc1.weight", (4 * WIDTH, WIDTH), 0), ("mlp.fc1.bias", (4 * WIDTH,), 0),
    ("mlp.fc2.weight", (WIDTH, 4 * WIDTH), 1), ("mlp.fc2.bias", (WIDTH,), None),
    ("ln1.weight", (WIDTH,), None), ("ln1.bias", (WIDTH,), None),
    ("ln2.weight", (WIDTH,), None), ("ln2.bias", (WIDTH,), None),
)  # fmt: skip
"""(name, shape, the dim that tensor parallelism cuts); data parallelism cuts dim 0 of what is left."""


def sharding(tp_dim: int | None, stage: int) -> Any:
    from holdfast.layout import Cut, Sharding

    cuts = [] if tp_dim is None else [Cut(tp_dim, ("tp",))]
    return Sharding((*cuts, Cut(0, ("dp",))), (("pp", (stage,)),))


def tensors(
    stages: int, steps: bool
) -> tuple[list[Any], list[tuple[str, str, tuple[int, ...], int]]]:
    """Shardings, and (name, state, shape, sharding's number) of every tensor."""
    from holdfast.layout import Sharding

    shardings: dict[Any, int] = {}
    found = []
    for layer in range(LAYERS):
        for name, shape, tp_dim in PARAMS:
            number = shardings.setdefault(
                sharding(tp_dim, layer * stages // LAYERS), len(shardings)
            )
            full = f"layers.{layer}.{name}"
            found.append((f"model.{full}", "param", shape, number))
            found += [(f"optim.{full}.{s}", s, shape, number) for s in ("exp_avg", "exp_avg_sq")]
            if steps:
                everywhere = Sharding((), (("pp", (layer * stages // LAYERS,)),))
                number = shardings.setdefault(everywhere, len(shardings))
                found.append((f"optim.{full}.step", "step", (), number))
    return list(shardings), found


def make_manifest(steps: bool) -> Any:
    from holdfast.core.codec.digest import ALGORITHM, CHUNK_BYTES, num_chunks
    from holdfast.core.format.image import plan_image
    from holdfast.core.format.manifest import (
        FORMAT_VERSION,
        FileEntry,
        Manifest,
        TensorEntry,
        from_sharding,
    )

    shardings, listed = tensors(dict(SAVED)["pp"], steps)
    entries = tuple(TensorEntry(n, "float32", shape, i, state) for n, state, shape, i in listed)

    def manifest(files: tuple[FileEntry, ...]) -> Manifest:
        return Manifest(
            FORMAT_VERSION, 1000, 1, "0001-000001", "2026-01-01T00:00:00Z", {"holdfast": "0", "torch": "0"},
            SAVED,
            CHUNK_BYTES, ALGORITHM, tuple(map(from_sharding, shardings)), entries, {}, files, {}, {},
        )  # fmt: skip

    placement = manifest(()).placement
    alike: dict[tuple[int, int, int], Any] = {}
    files = []
    for rank in range(placement.mesh.world):
        pp, dp, tp = (placement.mesh.coordinate(rank, axis) for axis in ("pp", "dp", "tp"))
        kind = pp, min(dp, 1), tp  # the first along dp holds the scalars, the others equally much
        if kind not in alike:
            alike[kind] = plan_image(entries, placement.pieces(rank), extras_bytes=8192)
        image = alike[kind]
        size = image.table_start + 8 * num_chunks(image.table_start)
        place = (image.data_start, image.extras_start, image.table_start)
        files.append(
            FileEntry(rank, f"0001-000001/r{rank:05d}.safetensors", size, *place, f"{rank:016x}")
        )
    return manifest(tuple(files))


class Memoryless:
    """The target of a want that nobody fills."""

    def memory(self) -> None:
        return None

    def put(self, at: Any, values: Any) -> None:
        raise NotImplementedError


def make_wants(rank: int, steps: bool) -> list[Any]:
    """What a rank of the live mesh holds: known from its live tensors, so not part of the plan."""
    from holdfast.core.checkpoint.rows import Want
    from holdfast.layout import Mesh

    mesh, target = Mesh(LIVE), Memoryless()
    shardings, listed = tensors(dict(LIVE)["pp"], steps)
    boxes = [(i, shardings[s].box(shape, mesh, rank)) for i, (_, _, shape, s) in enumerate(listed)]
    return [Want(i, box, target) for i, box in boxes if box is not None]


def timed(work: Callable[[], Any], rounds: int) -> tuple[list[float], Any]:
    samples, result = [], None
    for _ in range(rounds):
        gc.collect()
        started = time.perf_counter()
        result = work()
        samples.append(time.perf_counter() - started)
    return samples, result


def measure(rounds: int, steps: bool) -> dict[str, Any]:
    from holdfast.core.checkpoint.reading import BLOCK_CHUNKS, plan_blocks
    from holdfast.core.checkpoint.rows import group_rows, needs, plan_rows
    from holdfast.core.format.image import plan_image
    from holdfast.core.format.manifest import decode_manifest, encode_manifest
    from holdfast.core.layout.pieces import Placement

    manifest = make_manifest(steps)
    data = encode_manifest(manifest)
    table, layout = manifest.placement.table, manifest.layout
    rank = 777

    def save_plan() -> Any:
        pieces = Placement(layout, table).pieces(rank)
        return plan_image(manifest.tensors, pieces, extras_bytes=8192)

    wants = make_wants(rank, steps)

    def restore_plan() -> Any:
        found = decode_manifest(data, "manifest.json")
        indexes = group_rows(plan_rows(found, wants))
        size = found.chunk_bytes
        blocks = []
        for path, intervals in needs(indexes, size).items():
            blocks += plan_blocks(
                indexes[path].rows[0].file, intervals, indexes[path], size, BLOCK_CHUNKS
            )
        return indexes, blocks

    save_s, image = timed(save_plan, rounds)
    decode_s, _ = timed(lambda: decode_manifest(data, "manifest.json"), rounds)
    restore_s, (indexes, blocks) = timed(restore_plan, rounds)
    params = sum(a * b for _, (a, *r), _ in PARAMS for b in [r[0] if r else 1]) * LAYERS
    return {
        "parameters": params,
        "tensors": len(manifest.tensors),
        "ranks": layout.world,
        "manifest_bytes": len(data),
        "pieces": len(image.pieces.tensor),
        "wants": len(wants),
        "rows": sum(len(i.rows) for i in indexes.values()),
        "files": len(indexes),
        "blocks": len(blocks),
        "samples": {"save": save_s, "decode": decode_s, "restore": restore_s},
    }


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [line for f in found.values() for line in rows_of(f)]


def rows_of(f: dict[str, Any]) -> list[dict[str, Any]]:
    size = f["manifest_bytes"] / 1e6
    what = (
        f"{f['parameters'] / 1e12:.2f} T parameters, {f['tensors']} tensors, {f['ranks']} ranks: "
    )
    save, parse, restore = (median(f["samples"][k]) for k in ("save", "decode", "restore"))
    return [
        row(what + "manifest", f"{size:.1f} MB", "", size, " MB"),
        row("save plan of one rank", f"{f['pieces']} pieces", "", save, " s"),
        row("restore plan of one rank on another mesh", f"{f['rows']} parts of {f['files']} files",
            f"of it parsing {parse:.2f} s", restore, " s"),
    ]  # fmt: skip


def main() -> None:
    args = measuring(__doc__, rounds=5).parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    started = time.time()
    found = {"moments": measure(args.rounds, False), "with step": measure(args.rounds, True)}
    report(CLAIMS, __doc__, args, found, rows(found), started)


if __name__ == "__main__":
    main()
