"""Checkpoints of every format version that was ever released: read for ever, to the last bit.

What they hold is written out here and not taken from the code that made them.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.core.checkpoint.verifying import verify
from holdfast.store import LocalStore

V1 = Path(__file__).parent / "v1"
RAW = {  # the little-endian bytes of 0, 1, 1 in every element type
    "bool": "000101",
    "uint8": "000101",
    "int8": "000101",
    "uint16": "000001000100",
    "int16": "000001000100",
    "uint32": "000000000100000001000000",
    "int32": "000000000100000001000000",
    "uint64": "0000000000000000" + "0100000000000000" * 2,
    "int64": "0000000000000000" + "0100000000000000" * 2,
    "float16": "0000003c003c",
    "bfloat16": "0000803f803f",
    "float32": "000000000000803f0000803f",
    "float64": "0000000000000000" + "000000000000f03f" * 2,
    "complex64": "0000000000000000" + "0000803f00000000" * 2,
    "complex128": "00" * 16 + ("000000000000f03f" + "00" * 8) * 2,
    "float8_e4m3fn": "003838",
    "float8_e5m2": "003c3c",
    "float8_e4m3fnuz": "004040",
    "float8_e5m2fnuz": "004040",
    "float8_e8m0fnu": None,  # has no zero
}


@pytest.fixture
def c() -> holdfast.Checkpoint:
    return holdfast.open(V1)


def test_what_there_is(c) -> None:
    assert holdfast.steps(V1) == [42]
    assert c.step == 42
    assert c.manifest.run == 3
    assert c.mesh == "pp 1 x dp 2"
    assert len(c.manifest.files) == 2
    assert {n for n in c.names() if not n.startswith("dtype.")} == {
        "model.rows", "model.columns", "model.whole", "model.stage", "model.listed", "model.empty",
        "optim.rows.exp_avg", "optim.rows.step", "model.tied",
    }  # fmt: skip


def test_values(c) -> None:
    rows = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14]]
    assert c.read("model.rows").tolist() == rows
    assert c.read("optim.rows.exp_avg").tolist() == [[-x for x in row] for row in rows]
    assert c.read("optim.rows.step").tolist() == 3.0
    assert c.read("model.columns").tolist() == [[-3, -2, -1], [0, 1, 2]]
    assert c.read("model.whole").astype(float).tolist() == [1.5, -2.0, 0.25]
    assert c.read("model.tied").astype(float).tolist() == [1.5, -2.0, 0.25]
    assert c.read("model.stage").tolist() == [7, 8]
    assert c.read("model.listed").tolist() == [[1, 2, 3], [4, 5, 6]]
    assert c.read("model.empty").shape == (0, 4)


def test_parts(c) -> None:
    assert c.read("model.rows", ((2, 4), (1, 3))).tolist() == [[7, 8], [10, 11]]
    assert c.read("model.columns", (None, (1, 3))).tolist() == [[-2, -1], [1, 2]]


@pytest.mark.parametrize("dtype", [d for d in RAW if RAW[d] is not None])
def test_every_dtype(c, dtype) -> None:
    values = c.read(f"dtype.{dtype}")
    assert c.info(f"dtype.{dtype}").dtype == dtype
    assert values.dtype.name == dtype
    assert values.tobytes().hex() == RAW[dtype]


def test_the_dtype_without_a_zero(c) -> None:
    values = c.read("dtype.float8_e8m0fnu")
    assert values.tobytes()[1:].hex() == "7f7f"


def test_states_and_shardings(c) -> None:
    assert c.info("optim.rows.exp_avg").state == "exp_avg"
    assert c.info("model.stage").state == "buffer"
    assert str(c.info("model.rows").sharding) == "dim 0 over dp"
    assert str(c.info("model.columns").sharding) == "dim 1 over dp"
    assert str(c.info("model.stage").sharding) == "on dp 1"
    assert str(c.info("model.listed").sharding) == "2 listed fragments"


def test_extras(c) -> None:
    extras = c.extras
    assert extras["sched"] == {"lr": 0.1, "betas": (0.9, 0.95), "last": math.inf, 3: b"\0\xff"}
    assert type(extras["sched"]["betas"]) is tuple
    assert (extras["count"], extras["big"]) == (12, 1208925819614629174706176)
    assert extras["table"].dtype == np.int32
    assert extras["table"].tolist() == [[1, 2], [3, 4]]
    assert c.manifest.per_rank == {"rng": "fresh"}
    assert [c.rank_extras(r) for r in (0, 1)] == [{"rng": {"seed": 11}}, {"rng": {"seed": 22}}]


def test_it_verifies() -> None:
    report = verify(LocalStore(V1), 42)
    assert report.problems == []
    assert report.num_files == 2


def test_it_is_a_safetensors_file_to_others(c) -> None:
    safetensors = pytest.importorskip("safetensors")
    first, second = (V1 / "steps" / "0000000042" / file.path for file in c.manifest.files)
    with safetensors.safe_open(first, "numpy") as f:
        assert f.get_tensor("model.rows@0:3,0:3").tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
        assert f.get_tensor("model.listed@1:2,0:3").tolist() == [[4, 5, 6]]
        assert "holdfast.digests" in f.keys()  # noqa: SIM118
    with safetensors.safe_open(second, "numpy") as f:
        assert f.get_tensor("model.rows@3:5,0:3").tolist() == [[9, 10, 11], [12, 13, 14]]
        assert f.get_tensor("model.stage").tolist() == [7, 8]
