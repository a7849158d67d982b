"""Worker, 3 ranks: saving beside the training, and what a failure of one rank does to all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast import events
from holdfast.errors import Deadline, OutOfSpace, RankErrors
from holdfast.state import snapshot
from holdfast.testing import Faulty

from .cases import run_all

WAIT_S = 30.0


class Net(nn.Module):
    """Its buffers change in the forward pass, right after a save was called."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(200, 301), nn.Tanh(), nn.Linear(301, 200))
        self.register_buffer("seen", torch.zeros(40_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.body(x).square().mean()


class Run:
    """A training run with a checkpointer, sharded or replicated."""

    def __init__(self, root: Path, *, shard: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.root = root
        self.net = Net()
        self.model: nn.Module = self.net
        if shard:
            fully_shard(self.net.body)
            fully_shard(self.net)
        else:
            self.model = nn.parallel.DistributedDataParallel(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.state = {"model": self.model, "optim": self.optimizer, "step": 0}
        self.ckpt = holdfast.Checkpointer(
            root, self.state, **{"deadline_s": WAIT_S, "on_error": "raise", **options}
        )

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.state["step"] += 1
            self.optimizer.zero_grad()
            torch.manual_seed(self.state["step"] * 10 + dist.get_rank())
            self.model(torch.randn(8, 200)).backward()
            self.optimizer.step()

    def copy(self) -> dict[str, torch.Tensor]:
        """All tensors now, whole, under holdfast's names."""
        found = {f"model.{n}": whole(p) for n, p in self.net.named_parameters()}
        found["model.seen"] = self.net.seen.clone()
        for name, p in self.net.named_parameters():
            for key, value in self.optimizer.state[p].items():
                found[f"optim.{name}.{key}"] = whole(value)
        return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def check_saved(root: Path, step: int, copy: dict[str, torch.Tensor]) -> None:
    """The checkpoint holds exactly the copy."""
    with holdfast.open(str(root), step) as checkpoint:
        assert set(checkpoint.names()) == set(copy)
        for name, tensor in copy.items():
            assert torch.equal(torch.from_numpy(checkpoint.read(name)), tensor), name
        assert checkpoint.extras["step"] == step


def everyone(value: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@contextmanager
def store_of(run: Run, fail: Callable[[str, str], Exception | None]) -> Iterator[None]:
    """While open, `fail` is asked before each operation of this rank's store."""
    inner = run.ckpt._tiers.durable.store
    run.ckpt._tiers.durable.store = Faulty(inner, fail)
    yield
    run.ckpt._tiers.durable.store = inner


class Gate:
    """Holds writes up until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __call__(self, op: str, key: str) -> None:
        if op == "create":
            assert self.opened.wait(WAIT_S)


def files_of(root: Path, step: int) -> list[Path]:
    return [p for p in root.glob(f"steps/{step:010d}/**/*") if p.is_file()]


# -- the snapshot ---------------------------------------------------------------------------------


def snapshots_are_of_the_moment_of_the_call(root: Path) -> None:
    """Nothing is written before training has gone on for steps; yet the call's state is saved."""
    for name, shard in (("sharded", True), ("replicated", False)):
        run = Run(root / name, shard=shard)
        run.train(2)
        for _ in range(4):
            gate, step = Gate(), run.state["step"]
            copy = run.copy()
            with store_of(run, gate):
                save = run.ckpt.save(step)
                run.train(3)
                assert not save.done()
                gate.opened.set()
                save.wait(WAIT_S)
            check_saved(run.root, step, copy)
        assert not torch.equal(copy["model.seen"], run.net.seen)
        run.ckpt.close()


def a_write_in_the_window_fails_aloud(root: Path) -> None:
    """Rank 1 edits weights while they are copied: no step, and each rank is told whose fault it is."""
    run = Run(root)
    run.train()
    original = snapshot.Copies.run

    def edited(copies: Any, *args: Any) -> None:
        original(copies, *args)
        if dist.get_rank() == 1:
            with torch.no_grad():
                run.net.body[0].weight.add_(1)

    snapshot.Copies.run = edited
    try:
        with pytest.raises(
            RankErrors, match=r"outside optimizer\.step\(\).*body\.0\.weight"
        ) as caught:
            run.ckpt.save(1).wait(WAIT_S)
    finally:
        snapshot.Copies.run = original
    assert caught.value.errors.keys() == {1}
    dist.barrier()
    assert files_of(root, 1) == []
    check_next_save(run)


def check_next_save(run: Run) -> None:
    """After a failure: training goes on, the next save works, nothing is left behind."""
    run.train(2)
    copy, step = run.copy(), run.state["step"]
    run.ckpt._saves.clear()  # the failure has been looked at
    run.ckpt.save(step).wait(WAIT_S)
    check_saved(run.root, step, copy)
    run.ckpt.close()
    dist.barrier()
    assert holdfast.steps(str(run.root)) == [step]
    assert {p.parts[-2] for p in run.root.glob("steps/*/*/*")} == {attempt(run.root, step)}


def attempt(root: Path, step: int) -> str:
    return holdfast.open(str(root), step).manifest.attempt


# -- busy -----------------------------------------------------------------------------------------


def a_busy_save_is_skipped_by_all(root: Path) -> None:
    """One rank's store is slow; the step that falls due meanwhile is left out on every rank."""
    run = Run(root, every=holdfast.Every(durable=1))
    gate = Gate()
    if dist.get_rank() != 1:
        gate.opened.set()
    events.counters.clear()
    with store_of(run, gate):
        run.train()
        copy = run.copy()
        run.ckpt.step(1)
        run.train()
        run.ckpt.step(2)
        second = run.ckpt._saves[-1]
        second.wait(WAIT_S)
        assert second.skipped
        gate.opened.set()
        with pytest.warns(holdfast.HoldfastWarning, match="step 2 was left out"):
            run.ckpt.wait()
    assert events.counters["save.skipped"] == 1
    dist.barrier()
    assert holdfast.steps(str(root)) == [1]
    check_saved(root, 1, copy)
    run.train()
    run.ckpt.step(3)
    run.ckpt.close()
    dist.barrier()
    assert holdfast.steps(str(root)) == [1, 3]


def a_busy_save_waits_in_the_queue(root: Path) -> None:
    run = Run(root, every=holdfast.Every(durable=1), when_busy="queue")
    gate = Gate()
    with store_of(run, gate):
        copies = {}
        for step in (1, 2):
            run.train()
            copies[step] = run.copy()
            run.ckpt.step(step)
        assert not any(save.done() for save in run.ckpt._saves)
        gate.opened.set()
        run.ckpt.wait()
    dist.barrier()
    assert holdfast.steps(str(root)) == [1, 2]
    for step, copy in copies.items():
        check_saved(root, step, copy)
    run.ckpt.close()


# -- failures -------------------------------------------------------------------------------------


def check_failed_save(
    root: Path, ranks: tuple[int, ...], op: str, expected: dict[int, str]
) -> None:
    """`op` of these ranks' stores says that there is no space left."""
    run = Run(root)
    run.train()

    def fail(name: str, key: str) -> Exception | None:
        return OutOfSpace(f"disk {dist.get_rank()} is full") if name == op else None

    with store_of(run, fail if dist.get_rank() in ranks else lambda *_: None):
        save = run.ckpt.save(1)
        run.train()
        with pytest.raises(RankErrors) as caught:
            save.wait(WAIT_S)
    assert caught.value.errors == expected
    assert caught.value.step == 1
    dist.barrier()
    assert holdfast.steps(str(root)) == []
    assert files_of(root, 1) == []
    check_next_save(run)


def a_full_disk_of_one_rank_fails_the_save_on_all(root: Path) -> None:
    for op in ("create", "write", "finish"):
        check_failed_save(root / op, (1,), op, {1: "OutOfSpace: disk 1 is full"})


def full_disks_of_several_ranks_are_all_named(root: Path) -> None:
    both = {0: "OutOfSpace: disk 0 is full", 2: "OutOfSpace: disk 2 is full"}
    check_failed_save(root, (0, 2), "write", both)


def a_commit_that_fails_is_told_to_all(root: Path) -> None:
    check_failed_save(root, (0,), "put", {0: "commit: OutOfSpace: disk 0 is full"})


def a_failed_save_is_a_warning_unless_asked_otherwise(root: Path) -> None:
    run = Run(root, on_error="warn")
    run.train()
    failing = dist.get_rank() == 2
    with store_of(run, lambda op, key: OutOfSpace("full") if failing and op == "create" else None):
        run.ckpt.save(1)
        with pytest.warns(holdfast.HoldfastWarning, match=r"rank 2: OutOfSpace: full"):
            run.ckpt.wait()
    run.ckpt.close()


def a_rank_that_never_saves_is_named_in_time(root: Path) -> None:
    deadline_s = 2.0
    run = Run(root, deadline_s=deadline_s)
    run.train()
    if dist.get_rank() != 2:
        started = time.monotonic()
        with pytest.raises(Deadline, match="rank 2 has not begun the save of step 1 within 2 s"):
            run.ckpt.save(1).wait(WAIT_S)
        assert time.monotonic() - started < deadline_s + 8
        run.ckpt._saves.clear()
    dist.barrier()
    run.train()
    run.ckpt.close()
    assert files_of(root, 1) == []


def ranks_that_save_different_steps_are_told(root: Path) -> None:
    run = Run(root)
    run.train()
    step = 7 if dist.get_rank() == 1 else 1
    with pytest.raises(holdfast.HoldfastError, match="rank 1 saves step 7, rank 0 step 1"):
        run.ckpt.save(step).wait(WAIT_S)
    dist.barrier()
    check_next_save(run)


def a_tensor_that_differs_between_ranks_is_refused(root: Path) -> None:
    run = Run(root)
    run.train()
    run.state["own"] = torch.zeros(3 + dist.get_rank())
    with pytest.raises(holdfast.HoldfastError, match=r"'own' is float32 \(3,\) on rank 0 but"):
        run.ckpt.save(1).wait(WAIT_S)
    del run.state["own"]
    check_next_save(run)


def state_that_one_rank_cannot_save_fails_the_save_on_all(root: Path) -> None:
    """And at once: the others need not wait for a deadline."""
    run = Run(root, on_error="warn")
    run.train(1)
    if dist.get_rank() == 1:
        run.state["odd"] = object()
    save = run.ckpt.save(1)
    with pytest.raises(RankErrors) as caught:
        save.wait(WAIT_S / 3)
    told = everyone(str(caught.value))
    assert told.count(told[0]) == 3
    assert "rank 1: UsageError: odd" in told[0]
    run.state.pop("odd", None)
    check_next_save(run)


def a_plan_that_fails_is_made_again(root: Path) -> None:
    """The exchange of descriptions breaks off once; later saves hold all that there is by then."""
    run = Run(root, on_error="warn")
    run.ckpt.save(1).wait(WAIT_S)  # before the first step: no optimizer state
    run.train(2)
    planner = run.ckpt._tiers.capture.planner
    original, planner.make_plan = planner.make_plan, None  # not callable: fails on every rank
    with pytest.raises(Exception, match="not callable"):
        run.ckpt.save(2).wait(WAIT_S)
    planner.make_plan = original
    run.train(1)
    copy = run.copy()
    run.ckpt.save(3).wait(WAIT_S)
    check_saved(root, 3, copy)
    run.ckpt.close()
    dist.barrier()
    assert holdfast.steps(str(root)) == [1, 3]


CASES = [
    snapshots_are_of_the_moment_of_the_call,
    a_write_in_the_window_fails_aloud,
    a_busy_save_is_skipped_by_all,
    a_busy_save_waits_in_the_queue,
    a_full_disk_of_one_rank_fails_the_save_on_all,
    full_disks_of_several_ranks_are_all_named,
    a_commit_that_fails_is_told_to_all,
    a_failed_save_is_a_warning_unless_asked_otherwise,
    ranks_that_save_different_steps_are_told,
    a_tensor_that_differs_between_ranks_is_refused,
    state_that_one_rank_cannot_save_fails_the_save_on_all,
    a_plan_that_fails_is_made_again,
    a_rank_that_never_saves_is_named_in_time,
]

if __name__ == "__main__":
    run_all(CASES)
