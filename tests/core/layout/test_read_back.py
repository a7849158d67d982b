"""Images of random layouts, read back by random boxes: equal to numpy's slices."""

from __future__ import annotations

import uuid

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast.core.layout.pieces as pieces_module
from builders import Tensor, build
from core.layout.strategies import boxes_in, meshes, rows_on
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.core.checkpoint.verifying import verify
from holdfast.store import MemoryStore

KINDS = {1: np.uint8, 2: np.float16, 4: np.float32, 8: np.int64}


@pytest.fixture(autouse=True, scope="module")
def small_bytes():
    before, pieces_module.MIN_SHARE_BYTES = pieces_module.MIN_SHARE_BYTES, 64
    yield
    pieces_module.MIN_SHARE_BYTES = before


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_box_of_any_layout(data) -> None:
    mesh = data.draw(meshes())
    tensors = {}
    for name, shape, itemsize, sharding in data.draw(rows_on(mesh, most=4)):
        values = np.arange(1, 1 + int(np.prod(shape))).reshape(shape)
        tensors[name] = Tensor(values.astype(KINDS[itemsize]), sharding)
    store = MemoryStore(uuid.uuid4().hex)
    build(store, mesh, tensors)
    with Checkpoint.open(store.url) as c:
        for name, tensor in tensors.items():
            box = data.draw(boxes_in(tensor.values.shape))
            got = c.read(name, box)
            assert got.dtype == tensor.values.dtype
            assert np.array_equal(got, tensor.values[box.within((0,) * len(box.start))])
            assert np.array_equal(c.read(name), tensor.values)
    assert verify(store, 1).problems == []
