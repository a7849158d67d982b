"""Corners of records: what writes to gradients, logs of newer versions, helpers that outlive a training,
hand-overs that fail, numbers that come twice, stores that are no directories."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import holdfast
import holdfast.restoring
from holdfast.delta import capture, queue, writer
from holdfast.delta.log import open_log
from holdfast.errors import Unavailable, UnsupportedVersion, UsageError
from holdfast.store import MemoryStore, open_store
from holdfast.testing import Counting
from memory.zygote import Lives

from .test_damage import segment, writers
from .test_delta_lives import FSDP, KILLED, check
from .test_exact import (
    OPTIMIZERS,
    Make,
    Run,
    check_equal,
    checkpointer,
    forget,
    recorded,
    root,  # noqa: F401
)

pytestmark = pytest.mark.slow


class Plain(Run):
    """Of which all buffers change from the first step on, so that records need no second plan."""

    def __init__(self, make: Make = OPTIMIZERS["adamw"]) -> None:
        super().__init__(make)
        del self.model.large


def new() -> Plain:
    return Plain()


@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_that_writes_to_gradients(
    root: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    foreach: bool,
) -> None:
    """SGD with Nesterov's momentum does with foreach.  However late the copy, it has them as they were."""
    copy = capture._copy

    def late(*args: Any) -> None:
        time.sleep(0.03)
        copy(*args)

    monkeypatch.setattr(capture, "_copy", late)

    def make(p: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=foreach)

    expected = recorded(root, lambda: Run(make), 5)
    forget(root, 4)
    again = Run(make)
    with checkpointer(root, again) as ckpt:
        assert ckpt.restore() == 5
    check_equal(again.everything(), expected)


def test_a_log_of_a_newer_version(root: Path) -> None:  # noqa: F811
    """It may be sound, so it is not passed over: a restart that ignored it would train those steps anew."""
    recorded(root, new, 5)
    forget(root, 4)
    with segment(root, 3).open("r+b") as file:
        file.seek(7)
        file.write(bytes([99]))
    with checkpointer(root, new()) as ckpt, pytest.raises(UnsupportedVersion, match="version 99"):
        ckpt.restore()


def test_a_record_that_is_not_handed_over(
    root: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Records end there, aloud, and begin again with the next full save; none leads on over the gap."""
    put = queue.Queue.put

    def failing(self: queue.Queue, slot: int, record: Any) -> None:
        if record.step == 6:
            raise MemoryError("no room for a message")
        put(self, slot, record)

    monkeypatch.setattr(queue.Queue, "put", failing)
    expected, told = nine_steps(root)
    assert any("record of step 6 is lost" in text for text in told), told
    again = new()
    with checkpointer(root, again) as ckpt:
        assert ckpt.restore() == 9
    check_equal(again.everything(), expected)
    forget(root, 8)
    ckpt = checkpointer(root, new())
    with pytest.warns(holdfast.HoldfastWarning, match="after 5 is missing"):
        assert ckpt.restore() == 5
    ckpt.close()


def nine_steps(
    root: Path,  # noqa: F811
    after: Callable[[int, holdfast.Checkpointer], None] = lambda *_: None,
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """A training with a full save of every fourth step, and the warnings that it has heard; `after` each
    step something may happen to it."""
    run = new()
    options = {"every": holdfast.Every(durable=4, delta=1), "delta": holdfast.Delta()}
    with (
        warnings.catch_warnings(record=True) as caught,
        holdfast.Checkpointer(root, run.state, **options) as ckpt,
    ):
        warnings.simplefilter("always")
        for step in range(1, 10):
            run.step(step)
            ckpt.step(step)
            ckpt.wait()
            after(step, ckpt)
    return run.everything(), [str(w.message) for w in caught]


@pytest.mark.parametrize("fault", ["the first is not announced", "the next is not", "no process"])
def test_a_writer_that_cannot_begin(
    root: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    """Storage does not take its name, or the machine no process in its place.  Records end there, aloud and
    at once, and begin again with the next full save."""
    announce, announced = queue.announce, itertools.count(1)
    fails_at = {"the first is not announced": 1, "the next is not": 2}.get(fault, 0)

    def failing(*args: Any) -> None:
        if next(announced) == fails_at:
            raise Unavailable("storage is away")
        announce(*args)

    def no_process(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "cannot allocate memory")

    def kill_writer(step: int, ckpt: holdfast.Checkpointer) -> None:
        if step == 2 and fails_at != 1:
            with monkeypatch.context() as patched:
                if fault == "no process":
                    patched.setattr(queue.subprocess, "Popen", no_process)
                (pid,) = writers()
                os.kill(pid, signal.SIGKILL)
                await_error(ckpt)

    monkeypatch.setattr(queue, "announce", failing)
    expected, told = nine_steps(root, kill_writer)
    why = "cannot allocate memory" if fault == "no process" else "storage is away"
    assert any("records end" in text and why in text for text in told), told
    forget(root, 8)
    again = new()
    with checkpointer(root, again) as ckpt:
        assert ckpt.restore() == 9
    check_equal(again.everything(), expected)
    assert not writers()


def test_a_forked_child_that_trains(root: Path) -> None:  # noqa: F811
    """Records are its parent's: it adds nothing to them, and waits for nothing."""
    run = new()
    with checkpointer(root, run) as ckpt:
        for number in range(1, 6):
            run.step(number)
            child = os.fork()
            if child == 0:
                run.step(number + 1)
                os._exit(0)
            assert os.waitpid(child, 0) == (child, 0)
            ckpt.step(number)
        expected = run.everything()
    forget(root, 4)
    again = new()
    with checkpointer(root, again) as ckpt:
        assert ckpt.restore() == 5
        check_equal(again.everything(), expected)


def test_two_checkpointers_record_one_optimizer(root: Path) -> None:  # noqa: F811
    """Neither takes the other's hook for one that may change gradients."""
    run, every = new(), holdfast.Every(delta=1)
    roots = [root / "a", root / "b"]
    first, second = (
        holdfast.Checkpointer(r, run.state, every=every, delta=holdfast.Delta()) for r in roots
    )
    for step in range(1, 7):
        run.step(step)
        first.step(step)
        second.step(step)
    first.close()
    second.close()
    expected = run.everything()
    for place in roots:
        assert holdfast.steps(place) == [1]
        again = new()
        with checkpointer(place, again) as ckpt:
            assert ckpt.restore() == 6
        check_equal(again.everything(), expected)


def await_error(ckpt: holdfast.Checkpointer) -> None:
    """Until the queue knows that nothing is written any more."""
    until = time.monotonic() + 20
    while ckpt._tiers.delta.error is None:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_batches_of_another_size(root: Path) -> None:  # noqa: F811
    """From one step to the next, without a new plan."""
    run = new()
    with checkpointer(root, run, batch=2) as ckpt:
        for step in range(1, 16):
            run.step(step)
            ckpt.step(step)
            if step in (6, 11):
                ckpt._tiers.delta.rebatch(3 if step == 6 else 1)
        expected = run.everything()
    for base in (4, 8, 12):
        forget(root, base)
    names = [f.name.split("-") for f in sorted((root / "log").glob("*/0*-*"))]
    assert {int(last) - int(first) + 1 for first, last in names} == {1, 2, 3}
    assert len(list((root / "log").glob("*/plan-*.json"))) == 1
    again = new()
    with checkpointer(root, again) as ckpt:
        assert ckpt.restore() == 15
    check_equal(again.everything(), expected)


@pytest.mark.parametrize("number", [3, 2])
def test_step_numbers_must_grow(root: Path, number: int) -> None:  # noqa: F811
    """A record under a number that is taken would be lost; without a step of an optimizer there is none."""
    run = new()
    with checkpointer(root, run) as ckpt:
        for step in (1, 2, 3):
            run.step(step)
            ckpt.step(step)
        ckpt.step(3)
        run.step(4)
        with pytest.raises(UsageError, match=f"step {number} .* after step 3"):
            ckpt.step(number)
    again = new()
    with checkpointer(root, again) as ckpt:
        assert ckpt.restore() == 3


@pytest.mark.distributed
@pytest.mark.parametrize("pause", [0.0, 0.4], ids=["before the writer has begun", "later"])
def test_a_helper_that_outlives_the_training(lives: Lives, pause: float) -> None:
    """A process that the training forked, as a DataLoader does, holds its end of the writer's socket: the
    writer notices all the same that the training is dead."""
    told = lives.live(nodes=[0], until=4, die=True, helper=[3, 60], pause=pause, **FSDP)
    assert told[0].status == KILLED, lives.errors()
    (helper,) = (line["helper"] for line in told[0].lines if "helper" in line)
    try:
        began = time.monotonic()
        check(lives, lives.live(nodes=[0], until=4, **FSDP), 4, told[0].digests)
        assert time.monotonic() - began < 30
        os.kill(helper, 0)  # it was there all the time
    finally:
        os.kill(helper, signal.SIGKILL)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "script",
    [{"hook_at": [1, 4]}, {"rebatch": [4, 3]}, {"rebatch": [4, 3], "grow_at": 4, "grow": [1]}],
    ids=["late hook", "batches", "batches while one rank records nothing"],
)
def test_what_one_rank_alone_changes(lives: Lives, script: dict[str, Any]) -> None:
    """No rank plans alone, or waits for another that does not."""
    told = lives.live(nodes=[0] * 2, until=9, die=True, **FSDP, **script)
    assert [t.status for t in told] == [KILLED] * 2, lives.errors()
    state = {"grow_at": 0, "grow": []} if "grow_at" in script else {}
    again = lives.live(nodes=[0] * 2, until=9, **FSDP, **state)
    check(lives, again, 9, told[0].digests)


# -- a store that is no directory -----------------------------------------------------------------


class InThread:
    """For `subprocess.Popen`: the real writer, in a thread, where the memory of a store is."""

    pid = os.getpid()

    def __init__(self, command: list[str], pass_fds: list[int], **_: Any) -> None:
        line = socket.socket(fileno=os.dup(pass_fds[0]))
        one = writer.Writer(line, os.getppid())
        self._thread = threading.Thread(target=one.run, daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        return 0


@pytest.mark.parametrize("batch", [1, 3])
def test_records_in_a_store_of_objects(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """Nothing but what `Store` promises is used: written, replayed, deleted with the steps they follow."""
    name = f"memory://records-{batch}"
    store = Counting(MemoryStore(f"records-{batch}"))
    monkeypatch.setattr(holdfast.restoring, "open_store", lambda url: store)
    monkeypatch.setattr(writer, "open_store", lambda url: store)
    fake = SimpleNamespace(Popen=InThread, DEVNULL=-3, TimeoutExpired=TimeoutError)
    monkeypatch.setattr(queue, "subprocess", fake)
    expected = recorded(name, new, 7, batch=batch)  # type: ignore[arg-type]
    assert [k for k in store.list("log/") if k.endswith(".log")]
    store.delete("steps/0000000004/manifest.json")
    again = new()
    with checkpointer(name, again) as ckpt:  # type: ignore[arg-type]
        assert ckpt.restore() == 7
        check_equal(again.everything(), expected)
        ckpt.save(7).wait()
    keep = {"keep": holdfast.Keep(last=1), "delta": holdfast.Delta()}
    with holdfast.Checkpointer(name, new().state, every=holdfast.Every(delta=1), **keep) as ckpt:
        assert ckpt.restore() == 7
        ckpt.save(7).wait()
    assert not [k for k in store.list("log/") if k.endswith(".log")]


def test_the_memory_of_this_process_is_refused() -> None:
    """Its writer is another process, and what that wrote there would be gone."""
    with pytest.raises(UsageError, match="memory of one process"):
        checkpointer("memory://refused", new())  # type: ignore[arg-type]


# -- the published recovery -----------------------------------------------------------------------


class Steady(Plain):
    """With a rate that does not change, and gradients as they come."""

    def __init__(self, make: Make) -> None:
        super().__init__(make)
        self.sched = torch.optim.lr_scheduler.ExponentialLR(self.optim, 1.0)
        self.state["sched"] = self.sched
        self.clip = 0.0  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("make", "low", "high"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.01), 0.0, 1e-5),
        (lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), 0.4, 1.0),
        (lambda p: torch.optim.Adam(p, lr=0.01), 0.4, 1.0),
    ],
    ids=["sgd", "momentum", "adam"],
)
def test_one_step_with_merged_gradients(
    root: Path,  # noqa: F811
    make: Make,
    low: float,
    high: float,
) -> None:
    """The recovery of LowDiff (its "parallel recovery") on the gradients of a log: right for plain SGD, and
    far off for what has a memory; replay is exact for all."""
    recorded(root, lambda: Steady(make), 9)
    for base in (4, 8):
        forget(root, base)
    exact, merged, base = Steady(make), Steady(make), Steady(make)
    with checkpointer(root, exact) as ckpt:
        assert ckpt.restore() == 9
    plain = Steady(make)
    for number in range(1, 10):
        plain.step(number)
    check_equal(exact.everything(), plain.everything())
    for run in (merged, base):
        assert holdfast.load(str(root), run.state, 1) == 1
    log, _ = open_log(open_store(str(root)))
    steps = [log.open(step, {}, {}) for step in log.after((1, 1))]
    assert len(steps) == 8
    merged.optim.zero_grad()
    for name, p in merged.model.named_parameters():
        found = [s.read(f"optim.{name}.grad") for s in steps if f"optim.{name}.grad" in s.names()]
        p.grad = torch.stack([torch.from_numpy(g) for g in found]).sum(0) if found else None
    merged.optim.step()

    def update(run: Run) -> torch.Tensor:
        pairs = zip(run.model.parameters(), base.model.parameters())
        return torch.cat([(a - b).detach().flatten() for a, b in pairs])

    error = float((update(exact) - update(merged)).norm() / update(exact).norm())
    assert low <= error <= high, error
