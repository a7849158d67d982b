"""Files that FSDP1, FSDP2 and tensor parallelism write on four ranks, read here without any of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.errors import FormatError, HoldfastError, NotFound
from holdfast.formats.read.verifying import verify_foreign

from .cases import Case, check, run_module
from .files_cases import CASES, net

pytestmark = [pytest.mark.distributed]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def failed(out: Path) -> dict[str, list[str]]:
    return run_module("files_cases", 4, out)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_files(failed: dict[str, list[str]], case: Case) -> None:
    check(failed, case.__name__)


def flat(saved: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Names that holdfast gives to what torch has gathered."""
    states = saved.get("optimizer", saved.get("optim"))["state"]
    return {f"model.{n}": t for n, t in saved["model"].items()} | {
        f"optim.{n}.{k}": t for n, one in states.items() for k, t in one.items()
    }


def assert_equal(checkpoint: holdfast.Checkpoint, expected: dict[str, torch.Tensor]) -> None:
    assert sorted(n for n in checkpoint.names() if n[:3] != "rng") == sorted(expected)
    for name, tensor in expected.items():
        assert np.array_equal(checkpoint.read(name), tensor.numpy()), name


@pytest.mark.parametrize("name", ["flat", "orig", "mesh"])
def test_fsdp1(out: Path, failed: dict[str, list[str]], name: str) -> None:
    """A file of the whole state, and the folder of every rank's shards, hold what torch has gathered.

    With original parameters on CPUs, torch 2.13 itself gathers exp_avg_sq as exp_avg, too; so shards are
    compared with what it gathers of the same training without them.
    """
    check(failed, "fsdp1")
    file = out / f"fsdp1/{name}-full/rank0.pt"
    assert_equal(holdfast.open(file), flat(torch.load(file)))
    expected = flat(torch.load(out / "fsdp1/flat-full/rank0.pt"))
    assert len(expected) == 6 + 6 * 3
    checkpoint = holdfast.open(out / f"fsdp1/{name}-sharded")
    assert_equal(checkpoint, expected)
    assert checkpoint.extras["epoch"] == 3
    assert checkpoint.extras["loss"] == {"ranks": [0.5, 1.5, 2.5, 3.5]}
    for rank, at in enumerate(checkpoint.extras["rng"]["ranks"]):
        saved = torch.load(out / f"fsdp1/{name}-full/rank{rank}.pt")["rng"]
        assert np.array_equal(checkpoint.read(at), saved.numpy())
    report = verify_foreign(checkpoint)
    assert report.good and report.num_with_crc == 4 and report.num_copies > 0


def test_fsdp1_into_a_live_optimizer(out: Path, failed: dict[str, list[str]]) -> None:
    check(failed, "fsdp1")
    expected = torch.load(out / "fsdp1/flat-full/rank0.pt")
    for source in ("flat-sharded", "mesh-sharded", "flat-full/rank0.pt"):
        model = net(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
        holdfast.load(out / "fsdp1" / source, {"model": model, "optim": optimizer})
        assert optimizer.param_groups[0]["lr"] == 0.01
        for name, p in model.named_parameters():
            assert torch.equal(p, expected["model"][name])
            for state, value in expected["optimizer"]["state"][name].items():
                assert torch.equal(optimizer.state[p][state], value)


@pytest.mark.parametrize("name", ["shard", "hybrid", "tensor"])
def test_fsdp2(out: Path, failed: dict[str, list[str]], name: str) -> None:
    """Model, optimizer and extras in sets of their own; the optimizer's numbers are proved by shapes."""
    check(failed, "fsdp2")
    expected = torch.load(out / f"fsdp2/{name}/expected.bin.txt")
    checkpoint = holdfast.open(out / "fsdp2" / name)
    assert_equal(checkpoint, flat(expected))
    assert checkpoint.extras["sched"] == {"last": 7}
    assert checkpoint.extras["optim"]["param_groups"][0]["params"][0] == "0.weight"
    report = verify_foreign(checkpoint)
    assert report.good and report.num_copies > 0
    assert report.num_with_crc == (0 if name == "hybrid" else 8)  # those with tensors in them


def test_replicas_that_differ_are_found(
    out: Path, failed: dict[str, list[str]], tmp_path: Path
) -> None:
    """Where torch was told to write no CRC-32, a flipped bit still shows if there is a replica."""
    check(failed, "fsdp2")
    for rank in range(4):
        name = f"model_world_size_4_rank_{rank}.pt"
        data = bytearray((out / "fsdp2/hybrid" / name).read_bytes())
        if rank == 3:
            value = holdfast.open(out / "fsdp2/hybrid").read("model.0.weight", ((6, 12), None))
            at = bytes(data).find(value.tobytes())
            assert at > 0
            data[at] ^= 1
        (tmp_path / name).write_bytes(data)
    report = verify_foreign(holdfast.open(tmp_path))
    (problem,) = report.problems
    assert "model.0.weight: replicas differ in 1 of 72 elements" in problem.message
    assert "rank_3.pt" in problem.key and (report.num_archives, report.num_with_crc) == (4, 0)


def test_ranks_that_are_missing_or_mixed_up(
    out: Path, failed: dict[str, list[str]], tmp_path: Path
) -> None:
    check(failed, "fsdp1")
    whole = sorted((out / "fsdp1/flat-sharded").iterdir())
    for name, order, message in (
        ("one", [0], "one rank's part|saved by 4 ranks"),
        ("three", [0, 1, 2], "saved by 4 ranks, but there are 3 files"),
        ("gap", [0, None, 2, 3], "no file of rank 1"),
        ("swapped", [1, 0, 2, 3], "the file of rank 0 was saved by rank 1"),
        ("again", [0, 0, 2, 3], "the file of rank 1 was saved by rank 0"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        for number, rank in enumerate(order):
            if rank is not None:
                (folder / f"rank{number}.pt").write_bytes(whole[rank].read_bytes())
        with pytest.raises((FormatError, NotFound), match=message):
            holdfast.open(folder)
    for rank in range(3):  # DTensors do not say how many ranks there were
        (tmp_path / f"rank{rank}.pt").write_bytes(
            (out / f"fsdp1/mesh-sharded/rank{rank}.pt").read_bytes()
        )
    with pytest.raises(HoldfastError, match="do not make up"):
        holdfast.open(tmp_path)
