"""A sound step, and what reading everything of a damaged one says."""

from __future__ import annotations

import uuid

import numpy as np
import pytest

from builders import Tensor, build
from holdfast.checkpoint.opened import Checkpoint, plain_tensor
from holdfast.format.extras import decode
from holdfast.layout import Cut, Mesh, Sharding
from holdfast.store import MemoryStore, Store

ROWS = Sharding((Cut(0, ("dp",)),))


@pytest.fixture
def store() -> MemoryStore:
    """Two ranks; each file has more than one chunk of data, and extras of its own."""
    made = MemoryStore(uuid.uuid4().hex)
    large = np.arange(160_000, dtype=np.float32).reshape(400, 400)
    tensors = {
        "model.w": Tensor(large, ROWS),
        "model.b": Tensor(np.arange(7, dtype=np.int16)),
        "model.s": Tensor(np.array(3.0)),
    }
    own = {"rng": ("fresh", [{"seed": b"\1" * 300}, {"seed": b"\2" * 300}])}
    build(made, Mesh((("dp", 2),)), tensors, extras={"sched": {"lr": 0.5}}, per_rank=own)
    return made


def read_everything(store: Store, step: int = 1) -> None:
    """All tensors, extras and every rank's extras of a step."""
    c = Checkpoint.open(store.url, step)
    for name in c.names():
        c.read(name)
    assert c.extras is not None
    for file in c.manifest.files:
        for tree in c.file_extras(file).values():
            decode(tree, plain_tensor)
