"""Consolidating: the same bytes, whole, where Hugging Face's loaders find them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from builders import FSDP_TP, Tensor, build, memory, transformer
from holdfast.core.checkpoint.diffing import compare_checkpoints
from holdfast.core.checkpoint.names import committed
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.outfiles import MIN_MEMORY_BYTES
from holdfast.core.checkpoint.verifying import verify
from holdfast.core.format.dtypes import numpy_dtype
from holdfast.errors import Corrupt
from holdfast.layout import Cut, Sharding
from holdfast.store import LocalStore, MemoryStore


def source_of(store: MemoryStore | None = None, **options: object) -> Checkpoint:
    store = store or memory()
    return Checkpoint(store, build(store, FSDP_TP, transformer(), **options))  # type: ignore[arg-type]


def consolidate(source: Checkpoint, path: Path, **options: Any) -> Checkpoint:
    holdfast.convert(source, path, **options)
    return Checkpoint.open(str(path))


@pytest.mark.parametrize("max_file_bytes", [1, 1000, 5_000_000_000])
def test_the_round_trip_is_bit_exact(tmp_path: Path, max_file_bytes: int) -> None:
    source = source_of(step=7, extras={"sched": {"epoch": 3}})
    told: list[int] = []

    def tell(phase: str, done: int, total: int) -> None:
        told.append(done if phase == "write" else 0)

    made = consolidate(source, tmp_path, max_file_bytes=max_file_bytes, progress=tell)
    found = compare_checkpoints(source, made)
    assert found.identical
    assert found.num_equal == len(source.manifest.tensors)
    assert verify(LocalStore(tmp_path), 7).good
    m = made.manifest
    assert sum(told) == sum(f.bytes for f in m.files)
    holders = [len(s.on["file"]) for s in m.shardings]
    assert holders == [1] * len(m.mesh and m.files)
    for f in m.files:
        num = len(m.placement.pieces(f.rank).tensor)
        assert f.extras - f.data <= max_file_bytes or num == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_smaller_than_tensors(tmp_path: Path, threads: int) -> None:
    """Blocks that begin and end inside tensors of odd shapes and every size of element."""
    random = np.random.default_rng(1)
    cuts = (Sharding((Cut(1, ("dp",)), Cut(0, ("tp",)))), Sharding((Cut(0, ("dp", "tp")),)))
    tensors = {}
    for i, dtype in enumerate(["float32", "bfloat16", "int8", "complex128", "float64"]):
        raw = random.standard_normal((301, 7, 53)).astype(numpy_dtype(dtype))
        tensors[f"model.{i}"] = Tensor(raw, cuts[i % 2])
    store = memory()
    source = Checkpoint(store, build(store, FSDP_TP, tensors))
    made = consolidate(source, tmp_path, memory_bytes=threads * MIN_MEMORY_BYTES)
    assert compare_checkpoints(source, made).identical
    assert verify(LocalStore(tmp_path), 1).good


def test_safetensors_reads_it_through_the_index(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    source = source_of(step=7)
    consolidate(source, tmp_path, max_file_bytes=800)
    folder = tmp_path / "steps/0000000007"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    weights = [n for n in source.names() if n.startswith("model.")]
    assert sorted(index["weight_map"]) == sorted(n.removeprefix("model.") for n in weights)
    assert index["metadata"]["total_size"] == sum(source.info(n).bytes for n in weights)
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1
    for i, path in enumerate(files):
        assert path.endswith(f"/model-{i + 1:05d}-of-{len(files):05d}.safetensors")
    for name, path in index["weight_map"].items():
        with safetensors.safe_open(folder / path, "np") as file:
            assert np.array_equal(file.get_tensor(name), source.read(f"model.{name}"))


def test_a_torch_model_is_restored_from_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def new() -> tuple[object, object]:
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(0)
    model, optim = new()
    for _ in range(3):
        optim.zero_grad()
        model(torch.randn(5, 8)).square().sum().backward()
        optim.step()
    state = {"model": model, "optim": optim, "steps": 3}
    holdfast.save(tmp_path / "a", state, step=3)
    with holdfast.open(tmp_path / "a") as source:
        consolidate(source, tmp_path / "b")
    again, fresh = new()
    loaded = {"model": again, "optim": fresh, "steps": 0}
    assert holdfast.load(tmp_path / "b", loaded) == 3
    assert loaded["steps"] == 3
    assert fresh.param_groups[0]["lr"] == optim.param_groups[0]["lr"]
    for p, q in zip(model.parameters(), again.parameters()):
        assert torch.equal(p, q)
        for name, value in optim.state[p].items():
            assert torch.equal(value, fresh.state[q][name])


def test_extras_of_single_ranks(tmp_path: Path) -> None:
    per_rank = {"rng": ("fresh", [1, 2, 3, 4]), "clock": ("rank0", [10, 20, 30, 40])}
    source = source_of(extras={"lr": 0.1}, per_rank=per_rank)
    assert holdfast.convert(source, tmp_path).left_out == ("rng",)
    made = holdfast.open(tmp_path)
    assert made.extras == {"lr": 0.1, "clock": 10}
    assert made.manifest.per_rank == {}


def test_damage_stops_it_and_leaves_nothing(tmp_path: Path) -> None:
    store = memory()
    source = source_of(store)
    key = source.images.key(source.manifest.files[1])
    data = bytearray(store.get(key))
    data[source.manifest.files[1].data + 3] ^= 1
    store.put(key, bytes(data))
    with pytest.raises(Corrupt):
        consolidate(source, tmp_path)
    assert committed(LocalStore(tmp_path)) == []
