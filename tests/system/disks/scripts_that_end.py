"""Training scripts that end without `close()`, all forked at once from a process that has imported torch.

    python -m system.disks.scripts_that_end FOLDER NAME...

Each ends as Python ends: its exit status is printed, and what it said is in `FOLDER/NAME.txt`.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
import holdfast.live.roots
import holdfast.session.checkpointer
from holdfast.base import threads
from holdfast.store import LocalStore
from holdfast.testing import Slow
from ports import free_port
from system.disks.frozen import Frozen

STEPS = 3
SLOW_S = 0.03
"""For each operation of storage, so that the last save is under way for long enough."""
KEPT = []
"""What lives until Python has ended."""


def train(root: Path, every: holdfast.Every, **options: object) -> holdfast.Checkpointer:
    """Makes `STEPS` steps; the last save has just begun when this returns."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optim": optimizer}
    holdfast.live.roots.open_store = lambda url: Slow(LocalStore(url), SLOW_S)
    ckpt = holdfast.Checkpointer(root, state, every=every, when_busy="queue", **options)
    ckpt.restore()
    for step in range(1, STEPS + 1):
        make_step(model, optimizer)
        ckpt.step(step)
    return ckpt


def at_its_end(root: Path) -> None:
    """The Checkpointer is one of a function that has returned."""
    train(root, holdfast.Every(durable=1))


def by_an_error(root: Path) -> None:
    ckpt = train(root, holdfast.Every(durable=1))
    raise ArithmeticError(f"after step {ckpt.every.durable}")


def by_sys_exit(root: Path) -> None:
    ckpt = train(root, holdfast.Every(durable=1))
    sys.exit(3 if ckpt else 0)


def with_records(root: Path) -> None:
    every = holdfast.Every(durable=10, delta=1)
    KEPT.append(train(root, every, delta=holdfast.Delta(batch=8)))


def after_a_save_has_failed(root: Path) -> None:
    ckpt = train(root, holdfast.Every())
    (root / "steps").write_text("in the way")
    save = ckpt.save(5)
    while not save.done():
        time.sleep(0.01)


def with_storage_that_does_not_answer(root: Path) -> None:
    threads.EXIT_S = 1.0
    ckpt = train(root, holdfast.Every())
    ckpt.wait()
    disk = Frozen(root).__enter__()
    KEPT.extend([disk, ckpt.save(5)])
    while not disk.num_waiting:
        time.sleep(0.01)


def with_several_endings_that_fail(root: Path) -> None:
    """Warnings are errors, and each of two runs has one to give; another ending fails before."""

    def fail(_: float) -> None:
        raise ArithmeticError("in an ending")

    threads.at_exit(fail)
    warnings.filterwarnings("error", category=holdfast.HoldfastWarning)
    for name in ("one", "two"):
        ckpt = train(root / name, holdfast.Every(durable=1000))
        (root / name / "steps").write_text("in the way")
        save = ckpt.save(5)
        while not save.done():
            time.sleep(0.01)
        KEPT.append(ckpt)


def when_closed(root: Path) -> None:
    train(root, holdfast.Every(durable=1)).close()


def as_rank(rank: int, root: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    dist.init_process_group("gloo")
    train(root.with_name("as_ranks"), holdfast.Every(durable=1))
    dist.destroy_process_group()


def as_rank_0(root: Path) -> None:
    as_rank(0, root)


def as_rank_1(root: Path) -> None:
    as_rank(1, root)


def make_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()


def main(folder: Path, names: list[str]) -> None:
    model = torch.nn.Linear(1000, 1)
    make_step(model, torch.optim.AdamW(model.parameters()))  # what it imports, all have
    holdfast.errors.silence("held-long")  # which a busy machine makes true
    threads.EXIT_S = 300.0  # what is to be finished has the time on a busy machine, too
    os.environ["MASTER_PORT"] = str(free_port())
    children = {}
    for name in names:
        child = os.fork()
        if not child:
            said = os.open(folder / f"{name}.txt", os.O_WRONLY | os.O_CREAT)
            os.dup2(said, 1)  # gloo's words, too
            os.dup2(said, 2)
            warnings.simplefilter("always")
            globals()[name](folder / name)
            return
        children[name] = child
    for name, child in children.items():
        print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
