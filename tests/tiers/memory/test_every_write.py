"""An agent that is killed before each call that writes: what it had answered for is there for the next one.

A forked process is the real agent (without its sockets) and takes snapshot after snapshot; it dies before
the n-th call that changes a file, for every third n; in the soak for every n.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.base.host import start_time
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node import segment as seg
from holdfast.tiers.memory.node import state_machine
from holdfast.tiers.memory.node.agent import Agent
from holdfast.tiers.memory.node.jobs import Job
from holdfast.tiers.memory.node.segment import Segments, mapped, with_table

JOB = "0123456789abcdef"
DATA = 300_000
SNAPSHOTS = 4


def snapshot_data(number: int) -> bytes:
    return bytes([number]) * DATA


async def life(root: Path, told: int) -> None:
    """Two jobs' worth of all that an agent writes; each commit that is answered is told through a pipe."""
    agent = Agent(Segments(root), "127.0.0.1", 1 << 30, stay=True)
    pid = os.getpid()

    async def ask(message: w.Message) -> Any:
        answer = msgspec.msgpack.decode(await agent.ask(message))
        assert "error" not in answer, answer
        return answer["ok"]

    await ask(w.Hello(JOB, "file:///x", 1, 0, pid, start_time(pid) or "0"))
    for number in range(1, SNAPSHOTS + 1):
        attempt = f"0001-{number:06d}"
        for kind in ("share", "guard"):
            size = with_table(DATA) + (number == 3) * 2_000_000  # the third needs other memory
            lease = await ask(w.Take(JOB, pid, kind, 0, attempt, number, size))
            with mapped(agent.segments.path(JOB, lease["name"]), size) as view:
                view[:DATA] = snapshot_data(number)
            await ask(w.Ready(JOB, lease["name"], attempt, DATA, size))
        cards = (w.Card("a", "b", "c"),)
        await ask(w.Commit(JOB, attempt, number, attempt.encode(), cards, 1))
        os.write(told, bytes([number]))
    await ask(w.Bye(JOB, pid, finished=False))


def killed_at(root: Path, number: int) -> tuple[int, bool]:
    """The last snapshot that was answered for, and whether the agent lived to its end."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            left = [number]

            def before(call: Callable[..., Any]) -> Callable[..., Any]:
                def counted(*args: Any, **kwargs: Any) -> Any:
                    left[0] -= 1
                    if left[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return call(*args, **kwargs)

                return counted

            for name in ("open", "replace", "posix_fallocate"):
                setattr(seg.os, name, before(getattr(os, name)))
            Path.unlink = before(Path.unlink)  # type: ignore[method-assign]
            seg.put_table = before(seg.put_table)
            asyncio.run(life(root, theirs))
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    os.close(theirs)
    _, status = os.waitpid(pid, 0)
    answered = os.read(ours, 100)
    os.close(ours)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return answered[-1] if answered else 0, status == 0


@pytest.mark.slow
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.soak)])
def test_what_was_answered_for_is_there(tmp_path: Path, every: int) -> None:
    """The newest commit with both its images, sound; whatever else is called ready is sound as well."""
    number, ended = 0, False
    while not ended:
        number += every
        assert number < 500
        root = tmp_path / str(number)
        answered, ended = killed_at(root, number)
        if not root.exists():
            continue
        segments = Segments(root)
        state = state_machine.adopted(1 << 30, segments.find(), time.time())
        job = state.jobs.get(JOB, Job(JOB))
        ready = [s for s in job.slots.values() if s.phase == "ready"]
        for slot in ready:
            assert segments.is_sound(JOB, slot), (number, slot)
            with mapped(segments.path(JOB, slot.name), slot.bytes) as view:
                assert view[:DATA] == snapshot_data(int(slot.attempt[-6:])), (number, slot)
        if answered:
            attempt, step = job.commits[-1]
            assert step in (answered, answered + 1), number  # told, or not yet
            assert {s.kind for s in ready if s.attempt == attempt} == {"share", "guard"}, number
            manifests = {a: path.read_bytes() for _, a, path in segments.manifests(JOB)}
            assert manifests[attempt] == attempt.encode()
        known = {p.name for s in job.slots.values() for p in (segments.path(JOB, s.name),)}
        there = {p.name for p in (root / "jobs" / JOB).glob("*") if "." not in p.name}
        assert {n for n in there if not n.startswith("manifest")} == known, number
    assert number > 40
