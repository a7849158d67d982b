"""Optimizer states as megatron-core before 0.16 flattened them.

The checkpoint was saved by 0.14.0 on 4 ranks (TP 2, DP 2, bf16); what is expected is what 0.14.0 has loaded
of it on one.  Made by tests/system/distributed/megatron_flat.py.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.errors import FormatError
from holdfast.formats.read.foreign import Foreign, StoredPart
from holdfast.formats.read.megatron.tensors import unflattened
from holdfast.layout import Box

GOLDEN = Path(__file__).parents[2] / "core" / "format" / "golden" / "megatron_0_14.tar.xz"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron_0_14")
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(root)  # our own file; `filter` is not in every Python 3.10 and 3.11
    return root


def test_as_megatron_loads(source: Path) -> None:
    expected = np.load(source / "expected.npz")
    with holdfast.open(source / "iter_0000003") as checkpoint:
        aliases = checkpoint.manifest.aliases
        assert {aliases.get(n, n) for n in expected.files} == {
            t.name for t in checkpoint.manifest.tensors
        }
        for name in expected.files:
            found = checkpoint.read(name)
            assert found.dtype == expected[name].dtype == np.float32
            assert np.array_equal(found, expected[name]), name
        for group, mult in zip(checkpoint.extras["optim"]["param_groups"], (1.0, 0.0)):
            assert (group["step"], group["wd_mult"]) == (3.0, mult)
            assert all((".bias" in n or "norm" in n) == (mult == 0.0) for n in group["params"])


def test_it_has_ranges_that_end_inside_of_rows(source: Path) -> None:
    """So the arithmetic is of all kinds: several boxes for one range."""
    with holdfast.open(source / "iter_0000003") as checkpoint:
        parts = [len(s.held) for s in checkpoint.manifest.shardings]
    assert max(parts) > 4


@pytest.mark.parametrize("shape", [(2, 1, 13), (3, 1, 8), (2, 0, 12)])
def test_a_grid_of_another_weight(shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatError, match="no flattened state"):
        unflattened(Foreign("x", "float32", shape, "exp_avg", ()), (4, 6))


def test_a_part_of_several_ranks() -> None:
    part = StoredPart.of(Box((0, 0, 0), (2, 1, 12)), "file", lambda: ("file", 0))
    with pytest.raises(FormatError, match="of flattened states"):
        unflattened(Foreign("x", "float32", (2, 1, 12), "exp_avg", (part,)), (4, 6))
