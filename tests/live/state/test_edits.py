"""Weights that a script writes while a save copies them: the save fails by name, and later ones do not."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.live.state import copy_timing, snapshot, window
from live.state.test_window import WAIT_S, Run, different, saved


class Copier:
    """Holds copies until they are to `go`; tells when one was looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.copied = threading.Event(), threading.Event()
        original, changed, made = snapshot.Copies.run, snapshot.Shot.changed, threading.Event()

        def run(*args: Any) -> None:
            assert self.go.wait(WAIT_S)
            original(*args)
            made.set()

        def looked(shot: snapshot.Shot) -> list[str]:
            found = changed(shot)
            if made.is_set():
                self.copied.set()
            return found

        monkeypatch.setattr(snapshot.Copies, "run", run)
        monkeypatch.setattr(snapshot.Shot, "changed", looked)

    def copy(self) -> None:
        self.go.set()
        assert self.copied.wait(WAIT_S)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A state that is copied in the window, after the first save."""
    monkeypatch.setattr(copy_timing, "COPIED_AT_CALL_BYTES", 0)
    run = Run(tmp_path)
    run.train()
    run.ckpt.save(0).wait(WAIT_S)
    run.train()
    yield run
    run.ckpt.close()


@pytest.fixture
def copier(run: Run, monkeypatch: pytest.MonkeyPatch) -> Copier:
    """The training thread is in one long call, until it comes to rest."""
    monkeypatch.setattr(snapshot, "SETTLE_S", 60.0)
    return Copier(monkeypatch)


def counted(p: torch.Tensor) -> None:
    with torch.no_grad():
        p.mul_(2)


def by_data(p: torch.Tensor) -> None:
    p.data.mul_(2)


def by_numpy(p: torch.Tensor) -> None:
    p.detach().numpy()[...] += 1


@pytest.mark.parametrize("write", [counted, by_data, by_numpy])
def test_a_write_in_the_window_fails_the_save_by_name_and_no_other(
    run: Run, tmp_path: Path, copier: Copier, write: Callable[[torch.Tensor], None]
) -> None:
    """Also one that no counter tells of: the image has other elements than there were at the call."""
    save, weight = run.ckpt.save(1), run.net.body[0].weight
    write(weight)
    copier.copy()
    with pytest.raises(
        holdfast.HoldfastError,
        match=r"outside optimizer\.step\(\).*: model\.body\.0\.weight \(step",
    ):
        save.wait(WAIT_S)
    assert holdfast.steps(tmp_path) == [0]
    run.train()
    for step in (2, 3):  # from now on it is copied at the call
        expected = run.copy()
        save = run.ckpt.save(step)
        write(weight)
        save.wait(WAIT_S)
        assert different(saved(tmp_path, step), expected) == []
        run.train()


@pytest.mark.parametrize("write", [counted, by_data, by_numpy])
def test_an_average_that_is_swapped_in_and_out_again_is_seen(
    run: Run, tmp_path: Path, copier: Copier, write: Callable[[torch.Tensor], None]
) -> None:
    """What counts is what was copied: when it is looked at, the weights are back."""
    save, weight = run.ckpt.save(1), run.net.body[2].weight
    kept = weight.detach().clone()
    write(weight)
    copier.copy()
    weight.data.copy_(kept)
    with pytest.raises(holdfast.HoldfastError, match=r"model\.body\.2\.weight"):
        save.wait(WAIT_S)


RESTS: dict[str, Callable[[Run, holdfast.Save], Any]] = {
    "save.wait": lambda run, save: save.wait(WAIT_S),
    "wait": lambda run, save: run.ckpt.wait(),
    "step": lambda run, save: run.ckpt.step(2),
    "save": lambda run, save: run.ckpt.save(2).wait(WAIT_S),
    "optimizer": lambda run, save: run.optimizer.step(),
    "a load": lambda run, save: window.wait_for_copies(),
    "close": lambda run, save: run.ckpt.close(),
}
"""Where a training thread is at rest."""


@pytest.mark.filterwarnings("ignore::holdfast.HoldfastWarning")
@pytest.mark.parametrize("rest", RESTS)
def test_a_write_under_way_when_the_copy_ends_is_seen(
    run: Run, tmp_path: Path, copier: Copier, rest: str
) -> None:
    """It is counted when it is over: half of a tensor was written when that was copied."""
    save = run.ckpt.save(1)
    weight = run.net.body[0].weight
    weight.data[3:5].mul_(2)
    copier.copy()
    weight.data[5:7].mul_(2)
    torch.autograd.graph.increment_version(weight)
    try:
        RESTS[rest](run, save)
    except holdfast.HoldfastError:
        assert rest == "save.wait"
    with pytest.raises(holdfast.HoldfastError, match=r"model\.body\.0\.weight"):
        save.wait(WAIT_S)
    assert 1 not in holdfast.steps(tmp_path)


@pytest.mark.parametrize("rest", RESTS)
def test_a_copy_that_nobody_has_disturbed_is_final_at_rest(
    run: Run, tmp_path: Path, copier: Copier, rest: str
) -> None:
    """Nobody waits for the pause to end, and an optimizer's step is no edit."""
    save = run.ckpt.save(1)
    copier.copy()
    expected = run.copy()
    RESTS[rest](run, save)
    with torch.no_grad():
        for p in run.net.parameters():
            p.add_(1)
    save.wait(WAIT_S)
    assert different(saved(tmp_path, 1), expected) == []


def test_a_write_that_is_counted_in_the_pause_is_seen(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training thread comes to rest long after."""
    monkeypatch.setattr(snapshot, "SETTLE_S", 1e-9)
    monkeypatch.setattr(snapshot, "PAUSE_COPIES", 1e-9)
    looks, looked, changed = iter(range(9)), threading.Event(), snapshot.Shot.changed

    def written_after_the_first_look(shot: snapshot.Shot) -> list[str]:
        if next(looks) != 1:
            return changed(shot)
        with torch.no_grad():
            run.net.body[0].weight.mul_(2)
        looked.set()
        return changed(shot)

    monkeypatch.setattr(snapshot.Shot, "changed", written_after_the_first_look)
    save = run.ckpt.save(1)
    assert looked.wait(WAIT_S)
    with pytest.raises(holdfast.HoldfastError, match=r"model\.body\.0\.weight"):
        save.wait(WAIT_S)


def test_a_loop_over_the_parameters(tmp_path: Path) -> None:
    """As a script would write it, with whatever timing it has: it is learned from the first save."""
    net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
    with holdfast.Checkpointer(tmp_path, {"model": net}) as ckpt:
        for step in range(8):
            before = [p.detach().clone() for p in net.parameters()]
            save = ckpt.save(step)
            with torch.no_grad():
                for p in net.parameters():
                    p.mul_(2)
            save.wait(WAIT_S)
            now = saved(tmp_path, step)
            found = [torch.from_numpy(now[f"model.{name}"]) for name, _ in net.named_parameters()]
            assert all(map(torch.equal, found, before))
            with torch.no_grad():
                for p in net.parameters():
                    p.div_(2)


SCRIPT = """
    import sys, threading, torch, holdfast
    from holdfast.live.state import copy_timing, snapshot

    original, go, copied = snapshot.Copies.run, threading.Event(), threading.Event()

    def run(*args):
        assert go.wait(120)
        original(*args)
        copied.set()

    net = torch.nn.Linear(4, 4)
    optim = torch.optim.SGD(net.parameters())
    torch.nn.init.ones_(net.weight), torch.nn.init.ones_(net.bias)
    copy_timing.COPIED_AT_CALL_BYTES = 0
    ckpt = holdfast.Checkpointer(sys.argv[1], {"model": net, "optim": optim})
    ckpt.save(1).wait()
    snapshot.Copies.run, snapshot.SETTLE_S = run, 60.0
    ckpt.save(2)
    go.set()
    assert copied.wait(120)
"""


def test_a_script_that_ends_is_at_rest(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert (saved(tmp_path, 2)["model.weight"] == 1).all()
