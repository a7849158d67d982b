"""Verifying finds every kind of damage, says where, and goes on to the next."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from builders import FSDP_TP, Tensor, build, transformer
from holdfast.core.checkpoint.committing import commit
from holdfast.core.checkpoint.verifying import good_before, verify
from holdfast.core.format.manifest import Manifest
from holdfast.layout import Cut, Sharding
from holdfast.store import LocalStore

LARGE = 400
"""Width of a model whose files have many digest chunks."""


def path_of(store: LocalStore, manifest: Manifest, rank: int) -> Path:
    return Path(store.root) / f"steps/{manifest.step:010d}" / manifest.file_of[rank].path


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x10]))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def test_a_sound_step_is_good(store: LocalStore) -> None:
    told: list[int] = []
    manifest = build(
        store,
        FSDP_TP,
        transformer(width=LARGE),
        extras={"lr": 0.1},
        per_rank={"rng": ("fresh", [b"a", b"b", b"c", b"d"])},
    )
    report = verify(store, 1, progress=told.append)
    assert report.good
    assert report.problems == []
    assert report.num_files == 4
    assert report.bytes == sum(told) == sum(f.table for f in manifest.files)


def test_every_damaged_range_is_reported(store: LocalStore) -> None:
    manifest = build(store, FSDP_TP, transformer(width=LARGE))
    file = manifest.file_of[2]
    chunk = manifest.chunk_bytes
    assert file.table > 5 * chunk
    flip(path_of(store, manifest, 2), 2 * chunk + 5)
    flip(path_of(store, manifest, 2), 4 * chunk)
    flip(path_of(store, manifest, 3), manifest.file_of[3].extras - 1)
    report = verify(store, 1)
    found = [(p.key[-18:], p.start, p.stop) for p in report.problems]
    last = manifest.file_of[3].table // chunk * chunk
    assert found == [
        ("r00002.safetensors", 2 * chunk, 3 * chunk),
        ("r00002.safetensors", 4 * chunk, 5 * chunk),
        ("r00003.safetensors", last, manifest.file_of[3].table),
    ]
    assert all("model." in p.message or "optim." in p.message for p in report.problems)


@pytest.mark.parametrize("quick", [False, True])
def test_each_region_of_a_file_is_guarded(store: LocalStore, quick: bool) -> None:
    """One flipped bit in the header or in the table is found, even without reading the data."""
    manifest = build(store, FSDP_TP, transformer())
    file = manifest.file_of[1]
    for at in (0, 20, file.data - 1, file.table, file.bytes - 1):
        flip(path_of(store, manifest, 1), at)
        assert not verify(store, 1, quick=quick).good, at
        flip(path_of(store, manifest, 1), at)
    assert verify(store, 1, quick=quick).good


def test_every_byte_of_a_file_is_guarded(store: LocalStore) -> None:
    manifest = build(store, FSDP_TP, transformer(layers=1, width=4))
    random = np.random.default_rng(0)
    for at in random.integers(0, manifest.file_of[0].bytes, 50).tolist():
        flip(path_of(store, manifest, 0), at)
        assert not verify(store, 1).good, at
        flip(path_of(store, manifest, 0), at)


def test_missing_and_cut_files(store: LocalStore) -> None:
    manifest = build(store, FSDP_TP, transformer())
    path_of(store, manifest, 0).unlink()
    os.truncate(path_of(store, manifest, 1), 100)
    messages = [p.message for p in verify(store, 1, quick=True).problems]
    size = manifest.file_of[1].bytes
    assert messages == ["is missing", f"has 100 bytes instead of {size:,}"]


def test_a_rank_that_must_have_a_file(store: LocalStore) -> None:
    """Rank 2's file is listed as rank 3's: sizes add up, but it is not who holds the bytes."""
    small = Tensor(np.ones((8, 8), "f4"), Sharding((Cut(0, ("dp",)),)))
    manifest = build(store, FSDP_TP, {"model.w": small})
    first, second = manifest.files
    moved = msgspec.structs.replace(second, rank=3)
    commit(store, msgspec.structs.replace(manifest, files=(first, moved)))
    messages = [p.message for p in verify(store, 1).problems]
    assert "the manifest states offsets" in messages[0]
    assert "its shardings give" in messages[0]


def test_a_header_that_does_not_follow_from_the_manifest(store: LocalStore) -> None:
    """Digests agree, but another tensor's name is in the manifest."""
    manifest = build(store, FSDP_TP, transformer())
    first = manifest.tensors[0]
    renamed = msgspec.structs.replace(first, name="model.wtx.weight")
    commit(store, msgspec.structs.replace(manifest, tensors=(renamed, *manifest.tensors[1:])))
    problems = verify(store, 1).problems
    assert problems
    assert all("header is not the one" in p.message for p in problems)


def test_extras_that_cannot_be_decoded(store: LocalStore) -> None:
    manifest = build(store, FSDP_TP, transformer())
    broken = {"a": {"$nothing": 1}, "b": {"$at": "model.gone"}, "c": {"$tensor": ["float32"]}}
    commit(store, msgspec.structs.replace(manifest, extras=broken))
    problems = verify(store, 1).problems
    assert [p.message.split("'")[1] for p in problems] == ["a", "b", "c"]


def test_a_damaged_manifest_is_a_report_not_an_error(store: LocalStore) -> None:
    manifest = build(store, FSDP_TP, transformer())
    path = Path(store.root) / f"steps/{manifest.step:010d}/manifest.json"
    flip(path, 200)
    (problem,) = verify(store, 1).problems
    assert "manifest" in problem.message


def test_the_newest_older_step_that_is_good(store: LocalStore) -> None:
    made = {s: build(store, FSDP_TP, transformer(), step=s) for s in (1, 2, 3)}
    assert good_before(store, 3) == 2
    flip(path_of(store, made[2], 0), 5000)
    assert good_before(store, 3) == 1
    assert good_before(store, 1) is None
