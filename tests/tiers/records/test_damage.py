"""Logs that are torn, flipped or incomplete, writers that die, disks that are full or slow."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.base import background
from holdfast.errors import AgentError, Deadline, NotRecoverable, RankErrors
from holdfast.store import open_store
from holdfast.tiers.records.log import open_log

from .test_exact import (
    OPTIMIZERS,
    Run,
    check_equal,
    checkpointer,
    forget,
    recorded,
    root,  # noqa: F401
)

pytestmark = pytest.mark.slow

LAST = 5
BAD = 4


def new() -> Run:
    return Run(OPTIMIZERS["adamw"])


def at_step(step: int) -> dict[str, Any]:
    """The uninterrupted run's state after a step."""
    run = new()
    for number in range(1, step + 1):
        run.step(number)
    return run.everything()


def segment(root: Path, step: int) -> Path:  # noqa: F811
    return next((root / "log").glob(f"*/{step:010d}-{step:010d}/r00000.log"))


def places(root: Path, step: int) -> dict[str, int]:  # noqa: F811
    """Where in a segment of one record each kind of its bytes lies."""
    log, _ = open_log(open_store(str(root)))
    found, record = log.steps[1, step].records[0]
    body = int.from_bytes((root / found.key).read_bytes()[8:16], "little")
    at = found.start + record.at
    return {
        "magic": 2,
        "length": 9,
        "digest of the header": 17,
        "header": 40,
        "end of the header": 24 + body - 1,
        "image's header": at + 10,
        "first of the gradients": at + record.data,
        "gradients": at + (record.data + record.extras) // 2,
        "extras": at + record.extras + 100,
        "table of digests": at + record.table,
        "last byte": at + record.bytes - 1,
    }


PLACES = (
    "magic", "length", "digest of the header", "header", "end of the header", "image's header",
    "first of the gradients", "gradients", "extras", "table of digests", "last byte",
)  # fmt: skip


def flip_at(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


def flip(path: Path, where: float) -> None:
    """One bit, at a part of the file's length."""
    flip_at(path, min(int(where * path.stat().st_size), path.stat().st_size - 1))


def cut(path: Path, where: float) -> None:
    os.truncate(path, int(where * path.stat().st_size))


def lose(path: Path, _: float) -> None:
    path.unlink()


@pytest.fixture(scope="module")
def whole() -> Iterator[Path]:
    """A log of LAST steps, from the first one's full save."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="holdfast-test-") as folder:
        recorded(Path(folder), new, LAST)
        forget(Path(folder), BAD)
        yield Path(folder)


@pytest.mark.parametrize("damage", [flip_at, os.truncate], ids=["flip", "cut"])
@pytest.mark.parametrize("place", PLACES)
def test_replay_ends_before_a_damaged_record(
    whole: Path,
    root: Path,  # noqa: F811
    damage: Callable[[Path, int], None],
    place: str,
) -> None:
    """Exactly there, aloud, in the state of the step before."""
    shutil.copytree(whole, root, dirs_exist_ok=True)
    where = places(root, BAD)
    assert list(where) == list(PLACES)
    damage(segment(root, BAD), where[place])
    run = new()
    with checkpointer(root, run) as ckpt:
        with pytest.warns(holdfast.HoldfastWarning, match=f"after {BAD - 1} is missing or damaged"):
            assert ckpt.restore() == BAD - 1
        check_equal(run.everything(), at_step(BAD - 1))


@pytest.mark.soak_except("flip", "lose")
@pytest.mark.parametrize("damage", [flip, cut, lose])
def test_a_run_goes_on_from_before_a_damaged_record(
    root: Path,  # noqa: F811
    damage: Callable[[Path, float], None],
) -> None:
    """What it records from there on leads on; what lies behind the damage does not."""
    recorded(root, new, LAST)
    forget(root, BAD)
    damage(segment(root, BAD), 0.5)
    run = new()
    ckpt = checkpointer(root, run)
    with pytest.warns(holdfast.HoldfastWarning, match=f"after {BAD - 1} is missing or damaged"):
        assert ckpt.restore() == BAD - 1
    check_equal(run.everything(), at_step(BAD - 1))
    run.in_place = False
    for number in (BAD, BAD + 1):
        run.step(number)
        ckpt.step(number)
    expected = run.everything()
    ckpt.close()
    again = new()
    with checkpointer(root, again) as ckpt:
        assert ckpt.restore() == BAD + 1
        check_equal(again.everything(), expected)


@pytest.mark.parametrize(("damage", "where"), [(flip, 0.5), (cut, 0.5), (cut, 0.0), (lose, 0.0)])
def test_a_damaged_plan_costs_the_records_it_describes(
    root: Path,  # noqa: F811
    damage: Callable[[Path, float], None],
    where: float,
) -> None:
    """And not the full step that they lead on from."""
    recorded(root, new, LAST)
    (plan,) = (root / "log").glob("*/plan-*.json")
    damage(plan, where)
    run = new()
    with checkpointer(root, run) as ckpt:
        with pytest.warns(holdfast.HoldfastWarning, match="after 4 is missing or damaged"):
            assert ckpt.restore() == 4
        check_equal(run.everything(), at_step(4))
    _, damaged = open_log(open_store(str(root)))
    assert damaged == [str(plan.relative_to(root))]


def test_records_whose_full_save_failed_lead_nowhere(root: Path) -> None:  # noqa: F811
    """No record is missing: the next start says what is."""
    recorded(root, new, LAST)
    run = new()
    ckpt = checkpointer(root, run)
    assert ckpt.restore() == LAST
    blocks = [root / "steps" / f"{step:010d}" for step in (LAST, LAST + 1)]
    for block in blocks:
        block.write_text("no directory can be made here")
    save = ckpt.save(LAST)
    with pytest.raises(RankErrors, match=f"save of step {LAST} failed"):
        save.wait()
    run.step(LAST + 1)
    ckpt.step(LAST + 1)
    with pytest.raises(RankErrors, match=f"save of step {LAST + 1} failed"):
        ckpt.close()
    for block in blocks:
        block.unlink()
    again = new()
    with checkpointer(root, again) as ckpt:
        text = f"full save of step {LAST} by run 2, .* not there: records up to step {LAST + 1} "
        with pytest.warns(holdfast.HoldfastWarning, match=text):
            assert ckpt.restore() == LAST
        check_equal(again.everything(), at_step(LAST))


def test_a_step_behind_a_damaged_record_is_not_given_out(root: Path) -> None:  # noqa: F811
    """Who asks for a step gets it, or an error."""
    recorded(root, new, LAST)
    forget(root, 4)
    flip(segment(root, BAD), 0.6)
    with (
        checkpointer(root, new()) as ckpt,
        pytest.raises(NotRecoverable, match="after 3 is damaged"),
    ):
        ckpt.restore(5)


@pytest.mark.soak_except("6-flip", "7-cut")
@pytest.mark.parametrize("damage", [flip_at, os.truncate], ids=["flip", "cut"])
@pytest.mark.parametrize("bad", [6, 7, 8])
def test_a_record_among_others_of_a_segment(
    root: Path,  # noqa: F811
    bad: int,
    damage: Callable[[Path, int], None],
) -> None:
    """Those before it in the same file are sound."""
    recorded(root, new, 9, batch=4)
    log, _ = open_log(open_store(str(root)))
    found, record = log.steps[1, bad].records[0]
    assert len(found.header.records) > 1
    forget(root, 8)
    damage(root / found.key, found.start + record.at + record.data)
    run = new()
    with checkpointer(root, run) as ckpt:
        with pytest.warns(holdfast.HoldfastWarning, match="missing or damaged"):
            assert ckpt.restore() == bad - 1
        check_equal(run.everything(), at_step(bad - 1))


def writers() -> list[int]:
    """Writers of this process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if (
                parent == os.getpid()
                and b"holdfast.tiers.records.writer" in (folder / "cmdline").read_bytes()
            ):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def the_writer() -> int:
    """The one writer of this process; it is known by its arguments a moment after it was started."""
    until = time.monotonic() + 120
    while len(found := writers()) != 1:
        assert time.monotonic() < until, found
        time.sleep(0.005)
    return found[0]


def test_a_writer_that_is_killed_is_replaced(root: Path) -> None:  # noqa: F811
    """What it had not written is written by the next one."""
    run = new()
    with checkpointer(root, run, batch=2) as ckpt:
        for number in range(1, 9):
            run.step(number)
            ckpt.step(number)
            if number in (3, 6):
                os.kill(the_writer(), signal.SIGKILL)
        expected = run.everything()
    assert not writers()
    for base in (4, 8):
        forget(root, base)
    again = new()
    with checkpointer(root, again) as ckpt:
        assert ckpt.restore() == 8
        check_equal(again.everything(), expected)


def test_a_writer_that_dies_while_it_is_waited_for(root: Path) -> None:  # noqa: F811
    """With the order to write what is no whole batch: the next one is given it, too."""
    run = new()
    ckpt = checkpointer(root, run, batch=8)
    for number in range(1, 6):
        run.step(number)
        ckpt.step(number)
    ckpt.wait()
    pid = the_writer()
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    expected = run.everything()
    ckpt.close(timeout=120)
    forget(root, 4)
    again = new()
    with checkpointer(root, again) as ckpt:
        assert ckpt.restore() == 5
        check_equal(again.everything(), expected)


@pytest.mark.soak
def test_a_writer_that_stands_still_is_not_waited_for_for_ever(root: Path) -> None:  # noqa: F811
    """A step that finds no room says so after `deadline_s`; what was written is there."""
    run = new()
    ckpt = holdfast.Checkpointer(
        root,
        run.state,
        every=holdfast.Every(durable=BAD, delta=1),
        delta=holdfast.Delta(queue=2),
        on_error="raise",
        deadline_s=120,
    )
    capture = ckpt._tiers.get("delta")._capture

    def train() -> None:
        for number in range(1, 20):
            run.step(number)
            ckpt.step(number)
            if number == LAST:
                ckpt.wait()
                for pid in writers():
                    os.kill(pid, signal.SIGSTOP)
                capture._deadline_s = capture._queue.deadline_s = ckpt._tiers.group.deadline_s = 3.0
                began.append(time.monotonic())

    began: list[float] = []
    with pytest.raises(Deadline, match="storage took no record for 3 s"):
        train()
    assert 3 < time.monotonic() - began[0] < 300
    with pytest.raises(Deadline, match="still on their way"):
        ckpt.close()
    for pid in writers():
        os.kill(pid, signal.SIGKILL)
    forget(root, 8)
    again = new()
    with checkpointer(root, again) as other:
        step = other.restore()
        assert step >= BAD
        check_equal(again.everything(), at_step(step))


def test_a_writer_that_does_not_read_holds_nobody_up(root: Path) -> None:  # noqa: F811
    """A message may be larger than the socket takes: it names all parameters without a gradient.  When the
    writer goes on, it gets all, in order."""
    rest = {f"{'expert' * 15}{i}": nn.Parameter(torch.zeros(1)) for i in range(4000)}
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "rest": nn.ParameterDict(rest)})
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"model": model, "optim": optim}
    every, delta = holdfast.Every(durable=1000, delta=1), holdfast.Delta(queue=8, when_full="drop")

    def train(ckpt: holdfast.Checkpointer, steps: range) -> None:
        for number in steps:
            model["used"](torch.ones(2)).sum().backward()
            optim.step()
            optim.zero_grad()
            ckpt.step(number)

    with holdfast.Checkpointer(root, state, every=every, delta=delta) as ckpt:
        train(ckpt, range(1, 3))
        ckpt.wait()
        records = ckpt._tiers.get("delta")
        assert records is not None
        records.way.flush(60.0)
        pid = the_writer()
        os.kill(pid, signal.SIGSTOP)
        try:
            train(ckpt, range(3, 8))
            with pytest.raises(Deadline):  # what it has not taken is lost with this process
                records.wait(0.1)
            assert not records.way.queue.is_empty
        finally:
            os.kill(pid, signal.SIGCONT)
        records.way.flush(60.0)
        train(ckpt, range(8, 9))
        ckpt.wait()
        train(ckpt, range(9, 10))
        expected = model["used"].weight.detach().clone()
    nn.init.zeros_(model["used"].weight)
    with holdfast.Checkpointer(root, state, every=every, delta=delta) as ckpt:
        restored = ckpt.restore()
        assert (restored, restored.replayed) == (9, 1)
    assert torch.equal(model["used"].weight, expected)


def test_a_writer_that_always_dies_is_given_up(
    root: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Aloud."""
    monkeypatch.setattr(background.sys, "executable", "/bin/false")
    run = new()
    ckpt = checkpointer(root, run)

    def train() -> None:
        for number in range(1, 20):
            run.step(number)
            ckpt.step(number)
            time.sleep(0.05)

    with pytest.raises(AgentError, match="has died"):
        train()
    ckpt.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    mounted = subprocess.run(command, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small tmpfs: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    """Records end aloud, training goes on, and what was recorded before is there.  With the next full save
    for which there is room, records begin again."""
    run = Run(OPTIMIZERS["sgd"])
    del run.model.large
    states = {}
    every = holdfast.Every(delta=1, durable=60)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ckpt = holdfast.Checkpointer(small_disk, run.state, every=every, delta=holdfast.Delta())
        filler = small_disk / "filler"
        for number in range(1, 67):
            run.step(number)
            ckpt.step(number)
            states[number] = run.everything()
            if number == 30:
                room = os.statvfs(small_disk)
                with suppress(OSError):  # records are written meanwhile
                    filler.write_bytes(bytes(room.f_bavail * room.f_frsize - 100_000))
            if number == 59:
                ckpt.wait()
                filler.unlink()
        ckpt.close()
    told = [str(w.message) for w in caught if isinstance(w.message, holdfast.HoldfastWarning)]
    assert [text for text in told if text.startswith("records end")], told
    forget(small_disk, 60)
    again = Run(OPTIMIZERS["sgd"])
    del again.model.large
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ckpt = checkpointer(small_disk, again)
        step = ckpt.restore()
        ckpt.close()
    assert 26 <= step < 60  # a few were still in memory
    check_equal(again.everything(), states[step])
