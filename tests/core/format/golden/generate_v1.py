"""Write the folder v1 beside this file anew.  By hand, and never after a release with this format.

    python tests/core/format/golden/generate_v1.py

Two ranks; every dtype; tensors that are cut, listed, replicated, empty and 0-dim; an alias; extras of
every kind.  `test_golden.py` knows what is in it, literally.
"""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))
from builders import Tensor, build
from holdfast.core.format.dtypes import DTYPES, numpy_dtype
from holdfast.layout import Box, Cut, Mesh, Sharding
from holdfast.store import LocalStore

HERE = Path(__file__).parent / "v1"
MESH = Mesh((("pp", 1), ("dp", 2)))
ROWS = Sharding((Cut(0, ("dp",)),))
COLUMNS = Sharding((Cut(1, ("dp",)),))
ON_ONE = Sharding(on=(("dp", (1,)),))
LISTED = Sharding(held=((1, Box((0, 0), (1, 3))), (0, Box((1, 0), (2, 3)))))


def tensors() -> dict[str, Tensor]:
    made = {
        "model.rows": Tensor(np.arange(15, dtype=np.float32).reshape(5, 3), ROWS),
        "model.columns": Tensor(np.arange(6, dtype=np.int16).reshape(2, 3) - 3, COLUMNS),
        "model.whole": Tensor(np.array([1.5, -2.0, 0.25], ml_dtypes.bfloat16)),
        "model.stage": Tensor(np.array([7, 8], np.uint8), ON_ONE, "buffer"),
        "model.listed": Tensor(np.array([[1, 2, 3], [4, 5, 6]], np.float64), LISTED),
        "model.empty": Tensor(np.zeros((0, 4), np.float32)),
        "optim.rows.exp_avg": Tensor(
            -np.arange(15, dtype=np.float32).reshape(5, 3), ROWS, "exp_avg"
        ),
        "optim.rows.step": Tensor(np.array(3.0, np.float32), state="step"),
    }
    for name in DTYPES:
        if name != "complex32":  # numpy has no such type to write its values with
            values = np.array([0, 1, 1], np.int8).astype(numpy_dtype(name))
            made[f"dtype.{name}"] = Tensor(values, state="tensor")
    return made


EXTRAS = {
    "sched": {"lr": 0.1, "betas": (0.9, 0.95), "last": math.inf, 3: b"\0\xff"},
    "count": 12,
    "big": 1 << 80,
    "table": np.array([[1, 2], [3, 4]], np.int32),
}
PER_RANK = {"rng": ("fresh", [{"seed": 11}, {"seed": 22}])}


def main() -> None:
    shutil.rmtree(HERE, ignore_errors=True)
    build(
        LocalStore(HERE),
        MESH,
        tensors(),
        step=42,
        run=3,
        extras=EXTRAS,
        per_rank=PER_RANK,
        aliases={"model.tied": "model.whole"},
    )


if __name__ == "__main__":
    main()
