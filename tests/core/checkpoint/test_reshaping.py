"""Plans for another mesh: bytes against brute force, and speed at scale."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest

from builders import FSDP_TP, Tensor, build, describe, memory, transformer
from holdfast.core.checkpoint.reshaping import Reshape, parse_mesh, total_tensor_bytes
from holdfast.core.format.manifest import FileEntry, TensorEntry, from_sharding
from holdfast.errors import UsageError
from holdfast.layout import Cut, Mesh, Sharding


def test_mesh_texts() -> None:
    assert parse_mesh("dp=4,tp=2").axes == (("dp", 4), ("tp", 2))
    for text in ("dp", "dp=0", "dp=2,dp=2", "", "=3", "dp=x"):
        with pytest.raises(UsageError):
            parse_mesh(text)


@pytest.mark.parametrize("text", ["dp=2,tp=2", "dp=4", "fsdp=3", "dp=1,tp=4", "tp=2,cp=2"])
def test_what_ranks_want_is_what_their_boxes_hold(text: str) -> None:
    manifest = build(memory(), FSDP_TP, transformer())
    reshape = Reshape.onto(manifest, parse_mesh(text))
    counts = [np.zeros(t.shape, int) for t in manifest.tensors]
    for rank in range(reshape.mesh.world):
        start, stop = reshape.boxes(rank)
        reading = reshape.reading(rank)
        assert reading.wanted_bytes == 4 * np.prod(stop - start, axis=1).sum()
        assert (
            reading.wanted_bytes == sum(reading.by_file.values()) == sum(reading.by_state.values())
        )
        for count, a, b in zip(counts, start.tolist(), stop.tolist()):
            count[tuple(slice(x, y) for x, y in zip(a, b))[: count.ndim]] += 1
    for count in counts:
        assert count.min() == count.max() >= 1  # every element, equally often


@pytest.mark.parametrize(
    "text", ["dp=2,tp=2", "dp=4", "fsdp=3", "dp=1,tp=4", "tp=2,cp=2", "cp=2,dp=2", "pp=2,dp=2,cp=2"]
)
def test_holdings_are_those_whose_boxes_are_the_same(text: str) -> None:
    weight, cut = np.ones((8, 6), np.float32), (Cut(0, ("dp",)),)
    staged = {
        "a": Tensor(weight, Sharding(cut, (("pp", (0,)),))),
        "b": Tensor(weight, Sharding(cut, (("pp", (1,)),))),
        "steps": Tensor(np.float32(1), Sharding((Cut(0, ("pp",)),))),
    }
    staged_mesh = Mesh((("pp", 2), ("dp", 2)))
    for mesh, tensors in ((FSDP_TP, transformer()), (staged_mesh, staged)):
        reshape = Reshape.onto(build(memory(), mesh, tensors), parse_mesh(text))
        ranks = range(reshape.mesh.world)
        boxes = [b"".join(part.tobytes() for part in reshape.boxes(r)) for r in ranks]
        found = reshape.holdings()
        for a in ranks:
            for b in ranks:
                assert (found[a] == found[b]) == (boxes[a] == boxes[b]), (text, a, b)


def test_the_same_mesh_reads_what_it_saved() -> None:
    manifest = build(memory(), FSDP_TP, transformer())
    reshape = Reshape.onto(manifest, parse_mesh("dp=2,tp=2"))
    total = sum(4 * np.prod(s) for s in reshape.table.shape.tolist())
    assert total_tensor_bytes(reshape) == total
    assert [a for a, text in reshape.assumed if text.startswith("as saved")] == ["dp", "tp"]


def test_every_assumption_is_stated() -> None:
    manifest = build(memory(), FSDP_TP, transformer())
    assumed = dict(Reshape.onto(manifest, parse_mesh("fsdp=2,cp=2")).assumed)
    assert "cut along dim 0" in assumed["fsdp"]
    assert "reads the same" in assumed["cp"]
    assert "gone" in assumed["dp"]
    assert "gone" in assumed["tp"]


def test_pipeline_stages_regroup() -> None:
    mesh = Mesh((("pp", 4),))
    stages = {
        f"model.{i}": Tensor(np.ones((2, 2), "f4"), Sharding(on=(("pp", (i,)),))) for i in range(4)
    }
    manifest = build(memory(), mesh, stages)
    reshape = Reshape.onto(manifest, parse_mesh("pp=2"))
    assert [list(reshape.reading(r).by_file) for r in (0, 1)] == [[0, 1], [2, 3]]


def test_a_rank_that_is_not_there() -> None:
    manifest = build(memory(), FSDP_TP, transformer())
    with pytest.raises(UsageError, match="rank 4"):
        Reshape.onto(manifest, parse_mesh("dp=4")).reading(4)


def test_a_large_step_is_planned_fast() -> None:
    """45,000 tensors on 4,096 ranks; a bound of 20 s would fail if anything grew as their product."""
    mesh = Mesh((("dp", 512), ("tp", 8)))
    cuts = [Sharding((Cut(d, ("tp",)), Cut(0, ("dp",)))) for d in (0, 1)]
    tensors = tuple(
        TensorEntry(f"model.{i}", "float32", (8192, 8192), i % 2, "param") for i in range(45_000)
    )
    manifest = msgspec.structs.replace(
        describe(mesh, {}),
        tensors=tensors,
        shardings=tuple(from_sharding(c) for c in cuts),
        files=tuple(FileEntry(r, f"a/{r}", 1 << 30, 8, 8, 8, "0" * 16) for r in range(mesh.world)),
    )
    reshape = Reshape.onto(manifest, parse_mesh("dp=256,tp=8"))
    began = time.process_time()
    reading = reshape.reading(9)
    assert time.process_time() - began < 20
    assert reading.wanted_bytes == 45_000 * 8192 * 8192 * 4 // 2048
    assert len(reading.by_file) < 10
