"""What a writer does when its storage fails and the training process is gone."""

from __future__ import annotations

import errno
import gc
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import holdfast
from holdfast.core.codec.digest import CHUNK_BYTES, num_chunks
from holdfast.store import LocalStore
from holdfast.tiers.records import messages as w
from holdfast.tiers.records import queue as queues
from holdfast.tiers.records import writer
from holdfast.tiers.records.capture import RecordCapture
from holdfast.tiers.records.queue import Queue, WriterProcess, hang_up_former
from holdfast.tiers.records.ring import Ring
from holdfast.tiers.records.segment import Record, SegmentHeader, read_header, segment_key

DATA_BYTES = 1000
STEPS = range(4, 7)


def logs() -> int:
    """The number of descriptors of memory for records."""
    paths = Path("/proc/self/fd").iterdir()
    return sum("holdfast-log" in os.readlink(path) for path in paths if path.is_symlink())


def test_memory_goes_where_its_end_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is told of a lost one leaves wherever it is: here, waiting for the writer to end."""

    def interrupted(self: WriterProcess, limit_s: float | None = None) -> int:
        raise KeyboardInterrupt

    before, queue = logs(), Queue(LocalStore(tmp_path), 60.0)
    queue.open(SegmentHeader(5, 0, 1, "plan", {}), Ring(2, 4096), 1)
    writer = queue._writer
    assert writer is not None and logs() > before
    with monkeypatch.context() as patch:
        patch.setattr(WriterProcess, "status", interrupted)
        with pytest.raises(KeyboardInterrupt):
            queue.close(60.0)
    assert writer.status(60.0) == 0
    del queue, writer
    until = time.monotonic() + 60
    gc.collect()
    while logs() > before:  # its thread looks at the ring until it hears of that end
        assert time.monotonic() < until
        time.sleep(0.01)
        gc.collect()


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.soak)])
def test_its_end_is_interrupted_at_any_line(tmp_path: Path, every: int) -> None:
    """Whatever line that is, its next restore has the writer end, and waits for it."""
    at, was_interrupted = 1 - every, True
    ended_by_itself = 0
    while was_interrupted:
        at += every
        queue, was_interrupted = Queue(LocalStore(tmp_path), 60.0), False
        queue.open(SegmentHeader(5 + at, 0, 1, "plan", {}), Ring(2, 4096), 1)
        process = queue._writer
        assert process is not None
        num_lines = 0

        def interrupt(frame: FrameType, event: str, _: object) -> Any:
            nonlocal num_lines, was_interrupted
            if frame.f_code.co_filename != queues.__file__:
                return None
            num_lines += event == "line"
            if num_lines == at and not was_interrupted:
                was_interrupted = True
                raise KeyboardInterrupt
            return interrupt

        former = sys.gettrace()
        sys.settrace(interrupt)
        try:
            queue.close(60.0)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(former)
        ended_by_itself += queue._closing
        hang_up_former({process.pid})
        assert process.status(60.0) == 0
    assert ended_by_itself < at > 10


@pytest.mark.parametrize(
    "where", ["RecordCapture.drop", "RecordCapture.handed_over", "Queue.close"]
)
def test_a_restore_after_a_close_that_was_interrupted(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same process, as of a survivor: it waits for no writer that nobody ends."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def begin() -> tuple[holdfast.Checkpointer, int]:
        ckpt = holdfast.Checkpointer(
            tmp_path, state, every=holdfast.Every(durable=2, delta=1), delta=holdfast.Delta()
        )
        return ckpt, int(ckpt.restore())

    model = torch.nn.Linear(4, 4)
    state = {"model": model, "optim": torch.optim.SGD(model.parameters())}
    before = set(queues._queues)
    ckpt, _ = begin()
    for step in range(1, 4):
        model(torch.ones(1, 4)).sum().backward()
        state["optim"].step()
        state["optim"].zero_grad()
        ckpt.step(step)
    ckpt.wait()
    weights = model.weight.detach().clone()
    (pid,) = set(queues._queues) - before
    process = queues._queues[pid]._writer
    assert process is not None
    owner, name = where.split(".")
    with monkeypatch.context() as patch:
        patch.setattr({"Queue": Queue, "RecordCapture": RecordCapture}[owner], name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.close()
    assert (process._process.poll() is None) == (where == "Queue.close")
    torch.nn.init.zeros_(model.weight)
    ckpt, restored = begin()
    with ckpt:
        assert restored == 3
        assert torch.equal(model.weight, weights)


def orphan(store: LocalStore) -> tuple[writer.RecordWriter, socket.socket]:
    """A writer whose training process has handed over three records, and died."""
    parent = subprocess.Popen([sys.executable, "-c", ""])
    mine, theirs = socket.socketpair()
    table_bytes = 8 * num_chunks(DATA_BYTES, CHUNK_BYTES)
    ring = Ring(len(STEPS), 4096)
    order = w.Open(store.url, SegmentHeader(5, 0, 1, "plan", {}), ring.slots, 4096, 1)
    socket.send_fds(mine, [w.framed(order)], [ring.fd])
    for slot, step in enumerate(STEPS):
        ring.slot(slot)[:DATA_BYTES] = bytes([step]) * DATA_BYTES
        whole = DATA_BYTES + table_bytes
        record = Record(step, (5, step - 1), whole, 0, DATA_BYTES, DATA_BYTES, ())
        w.send(mine, w.Put(slot, record))
    ring.close()
    parent.wait()
    return writer.RecordWriter(theirs, parent.pid), mine


def failing(monkeypatch: pytest.MonkeyPatch, times: range) -> None:
    """Storage does not take these of the new names."""
    link, count = os.link, iter(range(1000))

    def tried(*args: Any, **kwargs: Any) -> None:
        if next(count) in times:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        link(*args, **kwargs)

    monkeypatch.setattr(os, "link", tried)
    monkeypatch.setattr(writer, "PAUSES_S", (0.01, 0.01, 0.01))


def steps_in(store: LocalStore) -> list[int]:
    found = []
    for step in STEPS:
        key = segment_key(5, step, step, 0)
        if key in store.list("log/"):
            header, at = read_header(store.open(key), key)
            data = bytearray(DATA_BYTES)
            store.read(key, at, memoryview(data))
            assert data == bytes([step]) * DATA_BYTES
            found += [record.step for record in header.records]
    return found


def test_storage_fails_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No record is left out: those after it would lead nowhere."""
    store = LocalStore(tmp_path)
    failing(monkeypatch, range(1, 4))
    left, _line = orphan(store)
    left.run()
    assert steps_in(store) == [4, 5, 6]


def test_storage_fails_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is lost is said; those after it may follow a later full save."""
    store = LocalStore(tmp_path)
    failing(monkeypatch, range(1, 5))
    left, _line = orphan(store)
    left.run()
    assert steps_in(store) == [4, 6]
    assert "the records of steps 5 to 5 are lost: cannot finish" in capfd.readouterr().err
