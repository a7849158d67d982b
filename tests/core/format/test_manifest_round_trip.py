"""Manifests: what is written is read again, and stays small."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import FSDP_TP, Tensor, build, transformer
from holdfast.core.format.manifest import (
    MANIFEST_HEAD_BYTES,
    Manifest,
    decode_head,
    decode_manifest,
    encode_manifest,
)
from holdfast.errors import FormatError, UsageError
from holdfast.layout import Cut, Mesh, Sharding
from holdfast.store import MemoryStore


@pytest.fixture
def manifest(request) -> Manifest:
    own = {"rng": ("fresh", list(range(4)))}
    store = MemoryStore(request.node.name)
    return build(store, FSDP_TP, transformer(), extras={"n": (1, b"2")}, per_rank=own)


NAMES = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=4)
"""Names without control characters, which are refused."""


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 10**10 - 1),
    st.integers(0, 10**9 - 1),
    st.dictionaries(NAMES, NAMES, max_size=3),
    st.dictionaries(NAMES, st.integers(-(2**53), 2**53), max_size=3),
)
def test_round_trip(step, run, software, extras) -> None:
    m = build(MemoryStore("round"), Mesh((("dp", 2),)), {"w": Tensor(np.zeros(4))})
    m = msgspec.structs.replace(m, step=step, run=run, software=software, extras=extras)
    data = encode_manifest(m)
    assert decode_manifest(data, "m") == m
    assert encode_manifest(decode_manifest(data, "m")) == data
    assert decode_head(data[:MANIFEST_HEAD_BYTES], "m") == (1, step, run)


def test_a_text_that_utf8_cannot_have_is_refused(manifest) -> None:
    """Other systems' checkpoints may have some."""
    with pytest.raises(UsageError, match="half of a surrogate pair"):
        encode_manifest(msgspec.structs.replace(manifest, extras={"file": "caf\udce9"}))


def test_shardings_of_all_kinds_come_back(manifest) -> None:
    back = decode_manifest(encode_manifest(manifest), "m")
    assert back == manifest
    assert back.placement.table.shardings == manifest.placement.table.shardings


def test_size_does_not_grow_with_ranks_times_tensors() -> None:
    def size(ranks: int) -> int:
        cut = Sharding((Cut(0, ("dp",)),))
        tensors = {f"t{i}": Tensor(np.zeros(64, np.int8), cut) for i in range(200)}
        return len(
            encode_manifest(build(MemoryStore(f"n{ranks}"), Mesh((("dp", ranks),)), tensors))
        )

    per_rank = (size(64) - size(8)) / 56
    assert per_rank < 200  # its file's entry, and nothing per tensor


def test_image_offsets_follow_from_the_manifest(manifest) -> None:
    from holdfast.core.checkpoint.verifying import planned_image

    for file in manifest.files:
        image = planned_image(manifest, file, manifest.placement)
        assert image.total_bytes == file.bytes
        moved = msgspec.structs.replace(file, data=file.data + 4096)
        with pytest.raises(FormatError, match="offsets"):
            planned_image(manifest, moved, manifest.placement)
