"""A survivor hears that a rank is lost while it closes its `Checkpointer`: nothing of it stays behind."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import holdfast
from holdfast.session import checkpointer, ending, tiers
from holdfast.tiers.memory import tier
from tiers.memory.agents import agent

pytestmark = pytest.mark.slow

FILES = {module.__file__ for module in (checkpointer, ending, tiers, tier)}


def threads() -> list[str]:
    """All but those that wait for a next call of storage, which are everybody's."""
    return sorted(t.name for t in threading.enumerate() if t.name != "holdfast-storage")


def held() -> dict[str, Any]:
    """What a closed `Checkpointer` may not keep, once what it had begun has ended."""
    gc.collect()
    links = [n for n in os.listdir("/proc/self/fd") if exists(n)]
    return {
        "threads": threads(),
        "descriptors": len(links),
        "maps": Path("/proc/self/maps").read_text().count("/jobs/"),
        "tiers": sum(isinstance(o, tier.MemoryTier) for o in gc.get_objects()),
    }


def exists(descriptor: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{descriptor}")


class Lost(BaseException):
    """As what tells a survivor that a rank is lost: no code below expects it."""


class Interrupter:
    """Interrupts this thread at the n-th line of `FILES` that it comes to."""

    def __init__(self, at: int) -> None:
        self.at, self.num_lines, self.where = at, 0, ""

    def __enter__(self) -> Interrupter:
        self._former = sys.gettrace()
        sys.settrace(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._former)

    def _see(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        self.num_lines += event == "line"
        if self.num_lines == self.at and not self.where:
            self.where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            raise Lost
        return self._see


def trained(root: Path) -> holdfast.Checkpointer:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = holdfast.Checkpointer(
        root,
        {"model": model, "optim": optimizer},
        every=holdfast.Every(durable=100, memory=1),
        memory=holdfast.Memory("none", budget="64MiB"),
    )
    restored = int(ckpt.restore())
    for step in (restored + 1, restored + 2):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        ckpt.step(step)
    return ckpt


def leave(ckpt: holdfast.Checkpointer, *, fails: bool) -> None:
    if fails:
        ckpt.__exit__(RuntimeError, RuntimeError("a collective has failed"), None)
    else:
        ckpt.close()


def train_and_leave(root: Path, interrupter: Interrupter, *, fails: bool) -> None:
    ckpt = trained(root)
    with interrupter:
        next(left(ckpt, fails=fails))


def left(ckpt: holdfast.Checkpointer, *, fails: bool) -> Iterator[None]:
    """Leave it in a generator, with which the exception that is being handled in it goes.

    Python 3.11 else keeps it for ever, with its frames, where a trace function raises as a handler begins.
    A signal is never looked at there.
    """
    yield leave(ckpt, fails=fails)


@pytest.mark.parametrize("where", ["MemoryTier.leave", "MemoryTier.settle", "Saves.wait"])
def test_while_it_waits(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an interrupt finds it mostly.  All of it is closed: nothing is left to Python's collector."""

    def interrupted(*_: object, **__: object) -> None:
        raise Lost

    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(tmp_path / "node"))
    owner, name = where.split(".")
    kind = {"MemoryTier": tier.MemoryTier, "Saves": ending.Saves}[owner]
    with agent(tmp_path / "node"):
        leave(trained(tmp_path / "root"), fails=False)
        before = Counter(held()["threads"])
        ckpt = trained(tmp_path / "root")
        ckpt.on_commit(print)
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, interrupted)
            with pytest.raises(Lost):
                leave(ckpt, fails=name == "leave")
        until = time.monotonic() + 120
        while (more := Counter(threads()) - before) and time.monotonic() < until:
            time.sleep(0.05)
        assert not more  # one of an earlier test may have ended meanwhile


def test_an_interrupt_is_told_and_not_the_failed_save_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher takes it for the loss of another rank, and not for a failure of this one."""
    wait = ending.Saves.wait

    def interrupted(self: ending.Saves, until: float) -> None:
        wait(self, until)
        raise Lost

    monkeypatch.setattr(ending.Saves, "wait", interrupted)
    state = {"model": torch.nn.Linear(4, 4)}
    files = {"config.json": tmp_path / "missing"}
    ckpt = holdfast.Checkpointer(tmp_path / "root", state, files=files, on_error="raise")
    ckpt.on_commit(print)
    ckpt.save(1)
    with pytest.warns(holdfast.errors.HoldfastWarning, match="config.json"), pytest.raises(Lost):
        ckpt.close()
    assert holdfast.steps(tmp_path / "root") == [1]


@pytest.mark.soak
@pytest.mark.parametrize("fails", [True, False])
def test_at_any_line(fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(tmp_path / "node"))
    with agent(tmp_path / "node"):
        train_and_leave(tmp_path / "root", Interrupter(-1), fails=fails)
        before, at = held(), 0
        while True:
            at += 1
            interrupter = Interrupter(at)
            try:
                train_and_leave(tmp_path / "root", interrupter, fails=fails)
            except Lost:
                pass
            until = time.monotonic() + 10
            while (now := held()) != before and time.monotonic() < until:
                time.sleep(0.05)
            print(at, interrupter.where)
            assert now == before, f"interrupted at {interrupter.where}: {now}, not {before}"
            if not interrupter.where:
                break
    assert at > 30
