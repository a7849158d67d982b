"""Corners of records: what writes to gradients, logs of newer versions, helpers that outlive a training,
hand-overs that fail, numbers that come twice, stores that are no directories."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
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
import holdfast.live.roots
from holdfast import events
from holdfast.base import background
from holdfast.errors import (
    AgentError,
    Deadline,
    HoldfastError,
    StateMismatch,
    Unavailable,
    UnsupportedVersion,
    UsageError,
)
from holdfast.store import LocalStore, MemoryStore, open_store
from holdfast.testing import Counting
from holdfast.tiers.records import capture, copying, queue, ring, writer
from holdfast.tiers.records import log as log_module
from holdfast.tiers.records.log import open_log
from holdfast.tiers.records.writer_registry import announce
from tiers.memory.agents import await_gone
from tiers.memory.zygote import Lives

from .test_damage import segment, the_writer, writers
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


@pytest.mark.parametrize("when_full", ["wait", "drop"])
def test_no_step_begins_before_the_record_before_is_the_writers(
    root: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    when_full: str,
) -> None:
    """However busy the machine is: with the training process no more than one record is lost."""
    order: list[tuple[str, int]] = []
    put, run = queue.Queue.put, Plain()

    def late(self: queue.Queue, slot: int, record: Any, *more: Any) -> None:
        time.sleep(0.05)
        put(self, slot, record, *more)
        order.append(("put", record.step))

    monkeypatch.setattr(queue.Queue, "put", late)
    with checkpointer(root, run, when_full=when_full, queue=9) as ckpt:
        for number in range(1, 8):
            run.step(number)
            order.append(("made", number))
            ckpt.step(number)
    for number in range(2, 7):
        assert order.index(("put", number)) < order.index(("made", number + 1)), order


@pytest.mark.parametrize("when_full", ["wait", "drop"])
def test_a_record_that_cannot_be_handed_over(
    root: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    when_full: str,
) -> None:
    """Training ends with an error, or goes on without records."""
    stuck, put, run = threading.Event(), queue.Queue.put, Plain()

    def hangs(self: queue.Queue, slot: int, record: Any, *more: Any) -> None:
        stuck.wait(300)
        put(self, slot, record, *more)

    monkeypatch.setattr(queue.Queue, "put", hangs)
    monkeypatch.setattr(capture, "HURRY_S", 0.2)
    broken: list[str] = []
    ckpt = checkpointer(root, run, when_full=when_full, queue=9)
    monkeypatch.setattr(ckpt._tiers.get("delta")._capture, "_deadline_s", 0.3)
    with holdfast.events.listen(
        lambda e: broken.append(e.fields["why"]) if e.name == "delta.broken" else None
    ):
        for number in range(1, 4):
            run.step(number)
            if number == 3 and when_full == "wait":
                with pytest.raises(Deadline, match="the writer took no record for"):
                    ckpt.step(number)
            else:
                ckpt.step(number)
    expected = (
        "the writer took no record for 0.3 s" if when_full == "wait" else "storage is too slow"
    )
    assert broken == [expected]
    stuck.set()
    ckpt.close()


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
    copy = copying._copy

    def late(*args: Any) -> None:
        time.sleep(0.03)
        copy(*args)

    monkeypatch.setattr(copying, "_copy", late)

    def make(p: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=foreach)

    expected = recorded(root, lambda: Run(make), 5)
    forget(root, 4)
    again = Run(make)
    with checkpointer(root, again) as ckpt:
        assert ckpt.restore() == 5
    check_equal(again.everything(), expected)


class Transposed(Plain):
    """Of a parameter that does not lie as autograd lays its gradient, as in DDP's buckets."""

    def __init__(self) -> None:
        super().__init__(OPTIMIZERS["sgd"])
        last = self.model.last
        last.weight = torch.nn.Parameter(last.weight.detach().t().contiguous().t())
        self.optim = torch.optim.Adam(self.model.parameters(), lr=0.01, fused=True)
        self.sched = torch.optim.lr_scheduler.ExponentialLR(self.optim, 0.8)
        self.state |= {"optim": self.optim, "sched": self.sched}
        self.optim.register_step_pre_hook(self.lay)

    def lay(self, *_: Any) -> None:
        grad = self.model.last.weight.grad
        assert grad is not None
        self.model.last.weight.grad = grad.contiguous()


def test_a_fused_optimizer_that_mixes_up_elements(root: Path) -> None:  # noqa: F811
    """Torch's do on CPUs: no record holds what they compute, which is said, and the training goes on."""
    run = Transposed()
    options: Any = {"every": holdfast.Every(durable=4, delta=1), "delta": holdfast.Delta()}
    with holdfast.Checkpointer(root, run.state, **options) as ckpt:
        run.step(1)
        ckpt.step(1)
        run.step(2)
        with pytest.warns(
            holdfast.HoldfastWarning, match=r"gradient of last\.weight has other strides"
        ):
            ckpt.step(2)
        for number in (3, 4, 5):
            run.step(number)
            ckpt.step(number)
    again = Transposed()
    with holdfast.Checkpointer(root, again.state, **options) as ckpt:
        assert ckpt.restore() == 4


def test_gradients_of_16_bits_that_lie_otherwise(root: Path) -> None:  # noqa: F811
    """Torch rounds otherwise where memory has gaps: no record holds what is computed."""
    weight = torch.nn.Parameter(torch.randn(64).half())
    state = {"w": torch.nn.ParameterList([weight]), "optim": torch.optim.Adam([weight], lr=0.01)}
    options: Any = {"every": holdfast.Every(delta=1), "delta": holdfast.Delta()}
    with holdfast.Checkpointer(root, state, **options) as ckpt:
        for number in (1, 2):
            weight.grad = torch.randn(128).half()[::2] if number == 2 else torch.randn(64).half()
            state["optim"].step()
            if number == 2:
                with pytest.warns(
                    holdfast.HoldfastWarning, match=r"gradient of .* has other strides"
                ):
                    ckpt.step(2)
            else:
                ckpt.step(1)


def test_records_of_another_dtype(root: Path) -> None:  # noqa: F811
    """A model that is restored into 16 bits would make other steps with them."""
    recorded(root, new, 5)
    run = Run(OPTIMIZERS["adamw"], torch.bfloat16)
    del run.model.large
    with checkpointer(root, run) as ckpt:
        with pytest.raises(
            StateMismatch, match=r"have float32 gradients of .* which is bfloat16 in the live state"
        ):
            ckpt.restore(cast=True)
        assert ckpt.restore(step=4, cast=True) == 4


def test_the_writer_imports_nothing_from_the_working_directory(
    root: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file may lie there with the name of a module that it needs."""
    tmp_path.joinpath("secrets.py").write_text("raise ImportError('the script has its own')")
    monkeypatch.chdir(tmp_path)
    expected = recorded(root, new, 3)
    again = new()
    with checkpointer(root, again) as ckpt:
        assert ckpt.restore() == 3
    check_equal(again.everything(), expected)


def test_segments_that_are_deleted_beside_are_not_damaged(
    root: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A training deletes old ones while another process lists the log."""
    recorded(root, new, 5)
    listed, deleted = LocalStore.list, segment(root, 3)

    def then_deleted(self: LocalStore, prefix: str) -> list[str]:
        found = listed(self, prefix)
        deleted.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(LocalStore, "list", then_deleted)
    log, damaged = open_log(open_store(str(root)))
    assert damaged == [] and 3 not in {step.step for step in log.steps.values()}


def test_plans_that_are_deleted_beside_are_not_damaged(
    root: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They go with the last segments of their run, whose headers were read before."""
    recorded(root, new, 5)
    read = log_module.read_headers

    def then_deleted(*args: Any) -> Any:
        found = read(*args)
        shutil.rmtree(root / "log")
        return found

    monkeypatch.setattr(log_module, "read_headers", then_deleted)
    told: list[str] = []
    with events.listen(lambda event: told.append(event.name)):
        log, damaged = open_log(open_store(str(root)))
    assert damaged == [] and not log.after((1, 0)) and "log.damaged" not in told


class Drawing:
    """As a loader that makes its iterator when it is asked for its state."""

    def __init__(self) -> None:
        self.drawn = 0

    def state_dict(self) -> dict[str, int]:
        if not self.drawn:
            self.drawn = int(torch.randint(1, 9, ()))
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = 0


def test_generators_are_those_of_the_step(tmp_path: Path) -> None:
    """Also where what was restored is saved again at once."""
    source, state = tmp_path / "source", {"x": torch.zeros(3), "loader": Drawing()}
    with holdfast.Checkpointer(source, state) as ckpt:
        ckpt.save(1).wait()
        expected = torch.get_rng_state()
    torch.manual_seed(5)
    with holdfast.Checkpointer(tmp_path / "root", state) as ckpt:
        assert ckpt.restore(source=source, keep_source=True) == 1
        assert torch.equal(torch.get_rng_state(), expected)


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

    def failing(self: queue.Queue, slot: int, record: Any, *more: Any) -> None:
        if record.step == 6:
            raise MemoryError("no room for a message")
        put(self, slot, record, *more)

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


def test_an_error_that_the_script_catches(root: Path) -> None:  # noqa: F811
    """It is told when the call has done its work: that step is recorded as well."""
    run, told = new(), []
    with checkpointer(root, run) as ckpt:
        for number in range(1, 11):
            run.step(number)
            if number == 8:
                (root / "steps" / "0000000008").write_text("in the way of a full save")
            try:
                ckpt.step(number)
            except HoldfastError as error:
                told.append((number, str(error)))
            while number == 8 and not ckpt._saves.untold[-1].done():
                time.sleep(0.01)
        expected = run.everything()
    assert [number for number, _ in told] == [9] and "save of step 8 failed" in told[0][1]
    again = new()
    with checkpointer(root, again) as ckpt:
        assert ckpt.restore() == 10
    check_equal(again.everything(), expected)


def test_records_whose_full_step_was_never_complete(root: Path) -> None:  # noqa: F811
    recorded(root, new, 3)
    forget(root, 1)
    with (
        checkpointer(root, new()) as ckpt,
        pytest.warns(holdfast.HoldfastWarning, match="steps 2 to 3 are recorded"),
    ):
        assert ckpt.restore() == 0


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
                    patched.setattr(background.subprocess, "Popen", no_process)
                os.kill(the_writer(), signal.SIGKILL)
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
    for pid in writers():  # that was told nothing: it ends by itself as soon as it has begun
        await_gone(pid)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (errno.ENOMEM, "no memory for records: "),
        (errno.ENOSPC, "no memory for records: "),
        (errno.EMFILE, "a record could not be made: OSError: "),
    ],
    ids=["memory", "space", "files"],
)
def test_a_ring_that_cannot_be_made(
    root: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    text: str,
) -> None:
    """The system says why: only what it lacks memory for is said to lack memory."""

    def failing(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    run = Plain()
    monkeypatch.setattr(ring.os, "memfd_create", failing)
    with checkpointer(root, run) as ckpt:
        run.step(1)
        ckpt.step(1)
        run.step(2)
        with pytest.raises(AgentError) as caught:
            ckpt.step(2)
    assert str(caught.value).startswith(text) and os.strerror(code) in str(caught.value)


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
    until = time.monotonic() + 120
    while ckpt._tiers.get("delta").error is None:
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
                ckpt._tiers.get("delta").rebatch(3 if step == 6 else 1)
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
@pytest.mark.soak_except("later")
@pytest.mark.parametrize("pause", [0.0, 0.4], ids=["before the writer has begun", "later"])
def test_a_helper_that_outlives_the_training(lives: Lives, pause: float) -> None:
    """A process that the training forked, as a DataLoader does, holds its end of the writer's socket: the
    writer notices all the same that the training is dead."""
    told = lives.live(nodes=[0], until=4, die=True, helper=[3, 600], pause=pause, **FSDP)
    assert told[0].status == KILLED, lives.errors()
    (helper,) = (line["helper"] for line in told[0].lines if "helper" in line)
    try:
        began = time.monotonic()
        check(lives, lives.live(nodes=[0], until=4, **FSDP), 4, told[0].digests)
        assert time.monotonic() - began < 300
        os.kill(helper, 0)  # it was there all the time
    finally:
        os.kill(helper, signal.SIGKILL)


@pytest.mark.distributed
@pytest.mark.soak_except("batches while one rank records nothing")
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
        one = writer.RecordWriter(line, os.getppid())
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
    monkeypatch.setattr(holdfast.live.roots, "open_store", lambda url: store)
    monkeypatch.setattr(writer, "open_store", lambda url: store)
    monkeypatch.setattr(background, "subprocess", SimpleNamespace(Popen=InThread, DEVNULL=-3))
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
    with pytest.raises(UsageError, match="in this process's memory"):
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
        assert holdfast.load(str(root), run.state, step=1) == 1
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


@pytest.mark.soak_except("0000000001/notes.txt")
@pytest.mark.parametrize("name", ["train.log", "1763868000/events.out", "0000000001/notes.txt"])
def test_files_of_the_script_below_log(root: Path, name: str) -> None:  # noqa: F811
    """They are no runs, and not ours to delete."""
    own = root / "log" / name
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    run, keep = Run(OPTIMIZERS["adamw"]), holdfast.Keep(last=1)
    every = holdfast.Every(durable=3, delta=1)
    for stop in (5, 9):
        delta = holdfast.Delta()
        with holdfast.Checkpointer(root, run.state, every=every, delta=delta, keep=keep) as ckpt:
            for step in range(ckpt.restore() + 1, stop):
                run.step(step)
                ckpt.step(step)
                ckpt.wait()
    assert own.read_text() == "mine"
    assert sorted(int(c.stem) for c in (root / "claims").iterdir()) == [2]
    assert holdfast.steps(root) == [6]
    assert {int(p.parent.name[-10:]) for p in root.glob("log/*/*/*.log")} == {7, 8}


@pytest.mark.parametrize("once", [False, True])
def test_no_other_state_is_saved_where_records_lead_on(root: Path, once: bool) -> None:  # noqa: F811
    run, every = Run(OPTIMIZERS["adamw"]), holdfast.Every(durable=5, delta=1)
    with holdfast.Checkpointer(root, run.state, every=every, delta=holdfast.Delta()) as ckpt:
        for step in range(1, 9):
            run.step(step)
            ckpt.step(step)
            ckpt.wait()
        if not once:
            with pytest.raises(UsageError, match="records lead on from step 5"):
                ckpt.save(5)
        ckpt.save(8)
        if not once:
            kept = run.everything()
            run.step(9)
            with pytest.raises(UsageError, match="an optimizer has made a step since"):
                ckpt.save(8)
    found = kept if not once else run.everything()
    if once:
        with pytest.raises(UsageError, match="lead on from its step 5"):
            holdfast.save(root, run.state, step=5)
        holdfast.save(root, run.state, step=8)
    assert holdfast.steps(root) == [1, 5, 8]
    with holdfast.Checkpointer(root, run.state, every=every, delta=holdfast.Delta()) as ckpt:
        assert ckpt.restore() == 8
    check_equal(run.everything(), found)


@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize("number", [1, 4])
def test_a_step_that_is_saved_before_it_is_recorded(root: Path, number: int, made: bool) -> None:  # noqa: F811
    """If the optimizer has not made it, records that lead on from its number would leave it out."""
    run, options = new(), {"every": holdfast.Every(delta=1), "delta": holdfast.Delta()}
    with holdfast.Checkpointer(root, run.state, **options) as ckpt:
        for step in range(1, 8):
            if step == number and not made:
                ckpt.save(step).wait()
            run.step(step)
            if step == number and made:
                ckpt.save(step).wait()
            if step == number and not made:
                with pytest.raises(UsageError, match=f"step {step} was saved before an optimizer"):
                    ckpt.step(step)
            else:
                ckpt.step(step)
        expected = run.everything()
    again = new()
    with holdfast.Checkpointer(root, again.state, **options) as ckpt:
        assert ckpt.restore() == 7
    check_equal(again.everything(), expected)


def test_a_later_run_leaves_nothing_of_killed_writers(root: Path) -> None:  # noqa: F811
    nine_steps(root)
    announce(LocalStore(root), 1, 0, 2**22 + 1)  # above all process numbers
    with checkpointer(root, new()) as ckpt:
        assert ckpt.restore() == 9
        ckpt.save(10).wait()
    assert not list(root.rglob("*.writing"))
