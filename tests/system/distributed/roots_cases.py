"""Worker, 2 ranks: roots that lead each rank elsewhere, and several paths to one root."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.errors import UsageError
from holdfast.live.saving import same_root

from .cases import run_all


def state() -> dict[str, Any]:
    return {"x": {"t": torch.full((4,), 1.0)}}


def own(out: Path) -> Path:
    return out / f"of-rank-{dist.get_rank()}"


def make(out: Path) -> Path:
    """Roots of the same state, each with one step."""
    made = out / "made"
    for step in (10, 20):
        holdfast.save(made / str(step), state(), step=step)
    return made


def give(made: Path, out: Path, steps: dict[int, int]) -> None:
    """Give some ranks a root with a step."""
    if dist.get_rank() == 0:
        out.mkdir(exist_ok=True)
        for rank, step in steps.items():
            shutil.copytree(made / str(step), out / f"of-rank-{rank}")
    dist.barrier()


def refused(out: Path, call: Callable[[], object]) -> None:
    with pytest.raises(UsageError) as info:
        call()
    assert "of-rank-0" in str(info.value) and "of-rank-1" in str(info.value), info.value
    assert "broadcast" in str(info.value)


def a_run_with_a_root_for_each_rank(out: Path) -> None:
    """Whether both are empty, one has a step, or each has another."""
    made, cases = make(out), ({}, {0: 20}, {1: 20}, {0: 20, 1: 10})
    for number, steps in enumerate(cases):
        place = out / str(number)
        give(made, place, steps)
        refused(place, lambda place=place: holdfast.Checkpointer(own(place), state()))
    with holdfast.Checkpointer(out / "1" / "of-rank-0", state()) as ckpt:  # it is free again
        assert ckpt.restore() == 20


def a_load_from_a_root_for_each_rank(out: Path) -> None:
    made, cases = make(out), ({0: 20}, {1: 20}, {0: 20, 1: 10})
    for number, steps in enumerate(cases):
        place = out / str(number)
        give(made, place, steps)
        refused(place, lambda place=place: holdfast.load(own(place), state()))
    one = own(out / "2")
    refused(out, lambda: holdfast.load(one, state(), step=20))
    with holdfast.Checkpointer(out / "run", state()) as ckpt:
        refused(out, lambda: ckpt.restore(source=one))
    with pytest.raises(holdfast.errors.NotRecoverable, match="no checkpoint"):
        holdfast.load(out / "nothing" / str(dist.get_rank()), state())


def copies_do_to_load(out: Path) -> None:
    """Each node may have one of its own."""
    give(make(out), out, {0: 20, 1: 20})
    live = {"x": {"t": torch.zeros(4)}}
    assert holdfast.load(own(out), live) == 20
    assert live["x"]["t"].tolist() == [1.0] * 4


def the_home_behind_is_one_too(out: Path) -> None:
    with pytest.raises(UsageError, match="differ"):
        holdfast.Checkpointer(out / "root", state(), upload=own(out))


def several_paths_to_one_root(out: Path) -> None:
    """Links, a relative path, and a mount of another name: nothing is refused."""
    rank = dist.get_rank()
    if rank == 0:
        (out / "root").mkdir()
        (out / "link").symlink_to(out / "root")
    dist.barrier()
    relative = os.path.relpath(out / "root")
    for step, path in enumerate((out / "link", relative, f"file://{out}/link/"), 1):
        with holdfast.Checkpointer(path if rank else out / "root", state()) as ckpt:
            assert ckpt.restore() == step - 1
            ckpt.save(step).wait()
        assert holdfast.load(path if rank else out / "root", state()) == step
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # as if the kernel knew nothing of its being one place
        patch.setattr(same_root.os.path, "realpath", str)
        with holdfast.Checkpointer(out / ("link" if rank else "root"), state()) as ckpt:
            assert ckpt.restore() == 3
        assert holdfast.load(out / ("link" if rank else "root"), state()) == 3


CASES = [
    a_run_with_a_root_for_each_rank,
    a_load_from_a_root_for_each_rank,
    copies_do_to_load,
    the_home_behind_is_one_too,
    several_paths_to_one_root,
]

if __name__ == "__main__":
    run_all(CASES)
