"""Weights that a script edits while a save copies them: the step holds all of an edit, or none of it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import events
from holdfast.state import snapshot, window
from state.test_window import WAIT_S, Run, different, saved


class Copier:
    """Holds copies until they are to `go`; tells when one was looked at, and when it is taken again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.copied, self.retaken = (threading.Event() for _ in range(3))
        original, versions, made = snapshot.Copies.run, snapshot.versions, threading.Event()

        def run(*args: Any) -> None:
            if self.copied.is_set():
                self.retaken.set()
            assert self.go.wait(WAIT_S)
            original(*args)
            made.set()

        def looked(live: Any) -> list[int]:
            found = versions(live)
            if made.is_set():
                self.copied.set()
            return found

        monkeypatch.setattr(snapshot.Copies, "run", run)
        monkeypatch.setattr(snapshot, "versions", looked)

    def copy(self) -> None:
        self.go.set()
        assert self.copied.wait(WAIT_S)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    run.train()
    yield run
    run.ckpt.close()


@pytest.fixture
def copier(run: Run, monkeypatch: pytest.MonkeyPatch) -> Copier:
    """The training thread is in one long call, until it comes to rest."""
    monkeypatch.setattr(snapshot, "PAUSE_S", 60.0)
    return Copier(monkeypatch)


RESTS: dict[str, Callable[[Run, holdfast.Save], Any]] = {
    "save.wait": lambda run, save: save.wait(WAIT_S),
    "wait": lambda run, save: run.ckpt.wait(),
    "step": lambda run, save: run.ckpt.step(2),
    "save": lambda run, save: run.ckpt.save(2),
    "optimizer": lambda run, save: run.optimizer.step(),
    "a load": lambda run, save: window.wait_for_copies(),
    "close": lambda run, save: run.ckpt.close(),
}
"""Where a training thread is at rest."""


def check(run: Run, root: Path, save: holdfast.Save, rest: str) -> None:
    """Step 1 is what is there when the training thread comes to rest, whatever it does afterwards."""
    expected = run.copy()
    RESTS[rest](run, save)
    with torch.no_grad():
        for p in run.net.parameters():
            p.add_(1)
    save.wait(WAIT_S)
    assert different(saved(root, 1), expected) == []


@pytest.mark.parametrize("rest", RESTS)
def test_an_edit_of_many_operations_is_saved_whole(
    run: Run, tmp_path: Path, copier: Copier, rest: str
) -> None:
    """The copy ends amid the edit: it is not taken again before the edit can be over."""
    save = run.ckpt.save(1)
    params = list(run.net.parameters())
    with torch.no_grad():
        for p in params[:3]:
            p.mul_(2)
        copier.copy()
        assert not copier.retaken.wait(0.3)
        for p in params[3:]:
            p.mul_(2)
    check(run, tmp_path, save, rest)
    assert copier.retaken.is_set()


@pytest.mark.parametrize("rest", RESTS)
def test_a_write_under_way_when_the_copy_ends_is_seen(
    run: Run, tmp_path: Path, copier: Copier, rest: str
) -> None:
    """It is counted when it is over: half of a tensor was written when that was copied."""
    save = run.ckpt.save(1)
    weight = run.net.body[0].weight
    weight.data[:100].mul_(2)
    copier.copy()
    weight.data[100:].mul_(2)
    torch.autograd.graph.increment_version(weight)
    check(run, tmp_path, save, rest)
    assert copier.retaken.is_set()


@pytest.mark.parametrize("rest", RESTS)
def test_a_copy_that_nobody_has_disturbed_is_final_at_rest(
    run: Run, tmp_path: Path, copier: Copier, rest: str
) -> None:
    """Nobody waits for the pause to end, and an optimizer's step is no edit."""
    seen: list[events.Event] = []
    save = run.ckpt.save(1)
    copier.copy()
    with events.listen(seen.append):
        expected = run.copy()
        RESTS[rest](run, save)
        save.wait(WAIT_S)
    assert "snapshot.retaken" not in [e.name for e in seen]
    assert different(saved(tmp_path, 1), expected) == []


def test_a_write_that_is_counted_in_the_pause_is_seen(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training thread comes to rest long after."""
    monkeypatch.setattr(snapshot, "PAUSE_S", 0.0)
    monkeypatch.setattr(snapshot, "PAUSE_COPIES", 0.0)
    looks, looked, unchanged = iter(range(9)), threading.Event(), snapshot.Shot.unchanged

    def written_after_the_first_look(shot: snapshot.Shot, before: list[int]) -> bool:
        if next(looks) != 1:
            return unchanged(shot, before)
        with torch.no_grad():
            run.net.body[0].weight.mul_(2)
        looked.set()
        return unchanged(shot, before)

    monkeypatch.setattr(snapshot.Shot, "unchanged", written_after_the_first_look)
    save = run.ckpt.save(1)
    assert looked.wait(WAIT_S)
    check(run, tmp_path, save, "wait")


def test_a_save_that_is_only_asked_whether_it_is_done_fails_in_time(
    run: Run, tmp_path: Path, copier: Copier
) -> None:
    """The copy cannot be taken again: the training thread might write at any moment."""
    run.ckpt._tiers.saver.deadline_s = 0.2
    save = run.ckpt.save(1)
    with torch.no_grad():
        run.net.body[0].weight.mul_(2)
    copier.copy()
    until = time.monotonic() + WAIT_S
    while not save.done() and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(
        holdfast.HoldfastError, match=r"outside optimizer\.step\(\).*body\.0\.weight"
    ):
        save.wait(0)
    assert holdfast.steps(tmp_path) == []
    run.ckpt.save(2).wait(WAIT_S)
    assert different(saved(tmp_path, 2), run.copy()) == []


def test_another_thread_that_waits_is_not_the_training(
    run: Run, tmp_path: Path, copier: Copier
) -> None:
    save = run.ckpt.save(1)
    waiting = threading.Thread(target=save.wait, args=(WAIT_S,))
    waiting.start()
    with torch.no_grad():
        run.net.body[0].weight.mul_(2)
        copier.copy()
        assert not copier.retaken.wait(0.3)
        run.net.body[2].weight.mul_(2)
    check(run, tmp_path, save, "optimizer")
    waiting.join(WAIT_S)
    assert not waiting.is_alive()


def test_a_loop_over_the_parameters(tmp_path: Path) -> None:
    """As a script would write it, with whatever timing it has."""
    net = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    with holdfast.Checkpointer(tmp_path, {"model": net}) as ckpt:
        for step in range(20):
            before = [p.detach().clone() for p in net.parameters()]
            save = ckpt.save(step)
            with torch.no_grad():
                for p in net.parameters():
                    p.mul_(2)
            save.wait(WAIT_S)
            now = saved(tmp_path, step)
            found = [torch.from_numpy(now[f"model.{name}"]) for name, _ in net.named_parameters()]
            assert all(map(torch.equal, found, before)) or all(
                map(torch.equal, found, net.parameters())
            )
            with torch.no_grad():
                for p in net.parameters():
                    p.div_(2)


SCRIPT = """
    import sys, threading, torch, holdfast
    from holdfast.state import snapshot

    original, go, copied = snapshot.Copies.run, threading.Event(), threading.Event()

    def run(*args):
        assert go.wait(120)
        original(*args)
        copied.set()

    snapshot.Copies.run, snapshot.PAUSE_S = run, 60.0
    net = torch.nn.Linear(4, 4)
    torch.nn.init.ones_(net.weight), torch.nn.init.ones_(net.bias)
    ckpt = holdfast.Checkpointer(sys.argv[1], {"model": net})
    ckpt.save(1)
    with torch.no_grad():
        net.weight.mul_(2)
        go.set()
        assert copied.wait(120)
        net.bias.mul_(2)
"""


def test_a_script_that_ends_is_at_rest(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    found = saved(tmp_path, 1)
    assert (found["model.weight"] == 2).all() and (found["model.bias"] == 2).all()
