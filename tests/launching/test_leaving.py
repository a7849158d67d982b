"""A worker leaves its recoverable function when it is told to: from wherever it is, and once."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from holdfast.launch import recovery
from holdfast.launch.channel import (
    Beat,
    Done,
    End,
    Enter,
    FromWorker,
    LauncherEnd,
    Leave,
    Left,
    Moved,
    Stuck,
    WorkerEnd,
)

pytestmark = [pytest.mark.distributed]

LIMIT_S = 60.0


class Forked:
    """A worker with this function, and the launcher's end of its channel."""

    def __init__(self, function: Callable[[], Any], printed: Path) -> None:
        self.end = LauncherEnd()
        self.printed = printed
        self.said: list[FromWorker] = []
        self.pid = os.fork()
        if self.pid == 0:
            status = 70
            try:
                fd = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(fd, 2)
                sys.stderr = os.fdopen(2, "w", buffering=1)
                recovery.events.last_step = 0  # other tests have taken steps in this process
                recovery.listen_to(WorkerEnd(self.end.other, is_spare=False))
                recovery.recoverable(function)()
                status = 0
            except SystemExit as error:
                status = int(error.code or 0)
            finally:
                os._exit(status)
        self.end.other.close()

    def hears(
        self,
        kind: type[Any] | tuple[type[Any], ...],
        that: Callable[[Any], object] = lambda message: True,
    ) -> Any:
        """Wait for a message of a kind, or of several; return the first `that` is so of."""
        until = time.monotonic() + LIMIT_S
        while not (found := [m for m in self.said if isinstance(m, kind) and that(m)]):
            assert time.monotonic() < until, (self.said, self.printed.read_text())
            select.select([self.end.fileno()], [], [], 0.1)
            self.said += self.end.heard()
        return found[0]

    def ends(self) -> int:
        """Wait until the process has ended; return its status."""
        self.end.say(End(False))
        until = time.monotonic() + LIMIT_S
        while os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            assert time.monotonic() < until, self.printed.read_text()
            time.sleep(0.01)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def forked(tmp_path: Path) -> Iterator[Callable[[Callable[[], Any]], Forked]]:
    begun: list[Forked] = []

    def fork(function: Callable[[], Any]) -> Forked:
        begun.append(Forked(function, tmp_path / "printed"))
        begun[-1].hears(Beat, lambda beat: beat.step > 0)  # it is in its function, and has counted
        return begun[-1]

    yield fork
    for one in begun:
        one.end.close()
        try:
            os.kill(one.pid, signal.SIGKILL)
            os.waitpid(one.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def goes_on() -> None:
    """Be at work, and say so."""
    recovery.events.last_step += 1
    while True:
        time.sleep(0.01)


def test_who_cleans_up_is_not_interrupted_again(
    forked: Callable[..., Forked], tmp_path: Path
) -> None:
    """A `finally` may take longer than a second: a checkpoint's `close`, say."""

    def function() -> None:
        try:
            goes_on()
        finally:
            until = time.monotonic() + recovery.UNASKED_S + 1.5 * recovery.REPEAT_S
            while time.monotonic() < until:
                time.sleep(0.01)
            (tmp_path / "cleaned").touch()

    worker = forked(function)
    worker.end.say(Leave(1, [], []))
    assert worker.hears(Left).kind.endswith("PeerLost: another rank is lost")
    assert (tmp_path / "cleaned").exists()
    assert worker.ends() == 1


def test_an_error_of_its_own_may_be_cleaned_up_after(
    forked: Callable[..., Forked], tmp_path: Path
) -> None:
    """A collective that failed by the cut leads out, too."""

    def function() -> None:
        try:
            recovery.events.last_step += 1
            while not (tmp_path / "told").exists():
                time.sleep(0.01)
            raise RuntimeError("a connection was closed")
        finally:
            time.sleep(recovery.UNASKED_S + 0.5 * recovery.REPEAT_S)
            (tmp_path / "cleaned").touch()

    worker = forked(function)
    (tmp_path / "told").touch()
    worker.end.say(Leave(1, [], []))
    assert "RuntimeError: a connection was closed" in worker.hears(Left).kind
    assert (tmp_path / "cleaned").exists()


def test_who_has_not_entered_yet_does_not(
    forked: Callable[..., Forked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank fails while another is still dropping what it held before."""
    drop = recovery.drop_groups

    def slowly() -> None:
        (tmp_path / "dropping").touch()
        while not (tmp_path / "told").exists():
            time.sleep(0.01)
        drop()

    monkeypatch.setattr(recovery, "drop_groups", slowly)

    def function() -> None:
        recovery.events.last_step += 1
        with (tmp_path / "entered").open("a") as file:
            file.write("x")
        time.sleep(2 * recovery.BEAT_S)

    worker = forked(function)
    worker.hears(Done)
    worker.end.say(Enter(2, {}))
    while not (tmp_path / "dropping").exists():
        time.sleep(0.01)
    worker.end.say(Leave(2, [], []))
    time.sleep(1.5 * recovery.UNASKED_S)
    (tmp_path / "told").touch()
    assert "before this one had entered" in worker.hears(Left).kind
    assert (tmp_path / "entered").read_text() == "x"


def test_an_interrupt_that_is_lost_comes_again(forked: Callable[..., Forked]) -> None:
    def function() -> None:
        with suppress(BaseException):
            goes_on()
        goes_on()

    worker = forked(function)
    worker.end.say(Leave(1, [], []))
    assert "PeerLost" in worker.hears(Left).kind


def test_who_waits_for_a_key_of_the_lost_rank(
    forked: Callable[..., Forked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait for torch's store is deaf to signals: its connection goes."""
    host = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_PORT", str(host.port))

    def function() -> None:
        store = dist.TCPStore("127.0.0.1", host.port, None, False)
        recovery.events.last_step += 1
        store.get("what the lost rank would have set")

    worker = forked(function)
    worker.end.say(Leave(1, [], []))
    assert worker.hears(Left).attempt == 1


def test_who_waits_to_be_connected_to_says_so(
    forked: Callable[..., Forked], tmp_path: Path
) -> None:
    """The other rank was killed before it could: there is no connection that could be cut."""

    def function() -> None:
        store = dist.FileStore(str(tmp_path / "store"), 2)
        recovery.events.last_step += 1
        dist.init_process_group("gloo", store=store, rank=0, world_size=2)

    worker = forked(function)
    worker.end.say(Leave(1, [], []))
    assert worker.hears(Stuck).attempt == 1


@pytest.mark.parametrize("call", ["all_reduce", "full_tensor"])
def test_who_waits_in_a_collective_that_nothing_ends_says_so(
    call: str, forked: Callable[..., Forked], tmp_path: Path
) -> None:
    """Also where it lies below frames of torch's own, as autograd's are under a DTensor."""

    def waits(rank: int) -> None:
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        mesh, part = init_device_mesh("cpu", (2,)), torch.ones(2, requires_grad=True)
        whole = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
        whole.full_tensor()  # which imports
        if rank:
            time.sleep(2 * LIMIT_S)
        recovery.events.last_step += 1
        if call == "all_reduce":
            dist.all_reduce(part.detach())
        else:
            whole.full_tensor()

    peer = os.fork()
    if peer == 0:
        try:
            waits(1)
        finally:
            os._exit(1)
    try:
        worker = forked(lambda: waits(0))
        worker.end.say(Leave(1, [], []))  # no connection is cut
        assert worker.hears((Stuck, Left)).attempt == 1
        assert any(isinstance(message, Stuck) for message in worker.said)
    finally:
        os.kill(peer, signal.SIGKILL)
        os.waitpid(peer, 0)


@pytest.mark.soak_except("heard")
@pytest.mark.parametrize("cleans", ["heard", "of its own"])
def test_who_cleans_up_in_a_call_is_not_stuck(cleans: str, forked: Callable[..., Forked]) -> None:
    """A write to slow storage is deaf and does not compute, too."""
    seconds = recovery.UNASKED_S + 2 * recovery.REPEAT_S + 4 * recovery.UNHEARD_S

    def function() -> None:
        try:
            recovery.events.last_step += 1
            time.sleep(recovery.UNASKED_S / 2 if cleans == "of its own" else LIMIT_S)
            raise RuntimeError("a connection was closed")
        finally:
            pid = os.posix_spawn("/bin/sleep", ["sleep", f"{seconds}"], {})
            signal.pthread_sigmask(signal.SIG_BLOCK, [recovery.INTERRUPT])
            os.waitpid(pid, 0)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [recovery.INTERRUPT])

    worker = forked(function)
    worker.end.say(Leave(1, [], []))
    worker.hears(Left)
    assert not any(isinstance(m, Stuck) for m in worker.said)


@pytest.mark.soak
def test_a_connection_that_ends_within_a_message(
    forked: Callable[..., Forked], tmp_path: Path
) -> None:
    """gloo has begun to read it, and wakes only those for whom it has not."""

    def exchange(rank: int, name: str) -> None:
        store = dist.FileStore(str(tmp_path / name), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        data = torch.ones(16 << 20)
        while True:
            if rank:
                dist.send(data, 0)
            else:
                dist.recv(data, 1)
                recovery.events.last_step = 1

    for number in range(10):
        peer = os.fork()
        if peer == 0:
            try:
                exchange(1, str(number))
            finally:
                os._exit(1)
        try:
            worker = forked(lambda: exchange(0, str(number)))
        finally:
            os.kill(peer, signal.SIGKILL)
            os.waitpid(peer, 0)
        worker.end.say(Leave(1, [peer], []))
        if isinstance(worker.hears((Stuck, Left)), Stuck):
            return
    pytest.skip("gloo has woken ten of ten, killed in the middle of a message: is 0166 still so?")


def test_who_cannot_drop_what_it_held_is_replaced(
    forked: Callable[..., Forked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "drop_groups", lambda: time.sleep(LIMIT_S))
    monkeypatch.setattr(recovery, "DROP_S", 0.2)

    def function() -> None:
        recovery.events.last_step += 1
        while not (tmp_path / "told").exists():
            time.sleep(0.01)
        raise ValueError("a fault")

    worker = forked(function)
    (tmp_path / "told").touch()
    assert worker.ends() == 1
    printed = worker.printed.read_text()
    assert "was not dropped within 0.2 s; the process ends" in printed
    assert "recovery.py" in printed  # the stacks


def test_who_does_no_step_says_that_it_moves(
    forked: Callable[..., Forked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation is none that hangs."""
    monkeypatch.setattr(recovery, "MOVES_S", 0.1)

    def function() -> None:
        recovery.events.last_step += 1
        while True:
            time.sleep(0.001)
            sum(range(1000))
            sorted(range(1000))

    forked(function).hears(Moved)


@pytest.mark.parametrize(("does", "moves"), [("pass", True), ("time.sleep(0.02)", False)])
def test_who_waits_for_a_process_moves_if_that_computes(
    does: str,
    moves: bool,
    forked: Callable[..., Forked],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A script may evaluate in one; idle workers of a DataLoader look now and then for work."""
    monkeypatch.setattr(recovery, "MOVES_S", 0.1)
    begun = tmp_path / "begun"
    script = (
        "import os, pathlib, time\n"
        f"parent = os.getppid(); pathlib.Path({str(begun)!r}).touch()\n"
        f"while os.getppid() == parent: {does}"
    )

    def function() -> None:
        recovery.events.last_step += 1
        os.waitpid(os.posix_spawn(sys.executable, [sys.executable, "-c", script], os.environ), 0)

    worker = forked(function)
    until = time.monotonic() + LIMIT_S
    while not begun.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    seen = [True]
    while seen[-1] and len(seen) < 4:  # it first looks at what the process took to begin
        worker.end.heard()
        worker.said.clear()
        time.sleep(4 * recovery.BEAT_S)
        worker.said += worker.end.heard()
        seen.append(any(isinstance(message, Moved) for message in worker.said))
    if moves:
        worker.hears(Moved)
    else:
        time.sleep(8 * recovery.BEAT_S)
        worker.said += worker.end.heard()
        assert not any(isinstance(message, Moved) for message in worker.said)
