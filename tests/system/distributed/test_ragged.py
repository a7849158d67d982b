"""Plain tensors of which each of three ranks has some boxes of the whole, as torch's DCP knows them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast

from .cases import Case, check, run_module
from .ragged_cases import CASES, CUTS, dcp_knows_them, drawn

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ragged")


@pytest.fixture(scope="module")
def failed(out: Path) -> dict[str, list[str]]:
    return run_module("ragged_cases", 3, out)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_ragged(failed: dict[str, list[str]], case: Case) -> None:
    if case.__name__.startswith("files_of_dcp") and not dcp_knows_them:
        pytest.skip("this torch's DCP has no CheckpointableTensor")
    check(failed, case.__name__)


def test_one_rank_reads_them(failed: dict[str, list[str]], out: Path) -> None:
    roots = list(out.rglob("manifest.json"))
    assert len(roots) >= 2 * CUTS
    for number in range(CUTS):
        (root,) = (path for path in out.rglob(str(number)) if (path / "steps").is_dir())
        plain = torch.zeros(drawn(number)[1].shape)
        holdfast.load(root, {"t": plain})
        assert torch.equal(plain, drawn(number)[1])
