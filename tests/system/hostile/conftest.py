"""A sound step, to be damaged."""

from __future__ import annotations

import uuid

import numpy as np
import pytest

from builders import Tensor, build
from holdfast.layout import Cut, Mesh, Sharding
from holdfast.store import MemoryStore

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
