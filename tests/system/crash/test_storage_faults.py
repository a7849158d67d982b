"""Storage that is full, broken, read-only or slow: the save fails, training and older steps do not."""

from __future__ import annotations

import os
import subprocess
import threading
import time

import pytest
import torch

import holdfast
import holdfast.live.roots
import holdfast.session.checkpointer
from holdfast.errors import Deadline, HoldfastError, RankErrors, Unavailable
from holdfast.store import LocalStore
from holdfast.testing import Faulty
from holdfast.testing.wrappers import Wrapper
from system.crash.single import WAIT_S, contents, leftovers, memory, state_of, value_of


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 4 MiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small tmpfs: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def training(root, size: int, **options):
    """A Checkpointer over a tensor of `size` floats, with everything of one value."""
    state = {"data": {"w": torch.zeros(size), "value": 0.0}}
    return state, holdfast.Checkpointer(root, state, deadline_s=WAIT_S, **options)


def set_value(state, value: float) -> None:
    state["data"]["w"].fill_(value)
    state["data"]["value"] = value


def saved(root, step: int) -> set[float]:
    with holdfast.open(root, step=step) as c:
        return {
            float(c.read("data.w").min()),
            float(c.read("data.w").max()),
            c.extras["data"]["value"],
        }


def ended(save: holdfast.Save) -> None:
    """Wait without asking how it went, so that nobody has been told."""
    until = time.monotonic() + WAIT_S
    while not save.done():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_disk_full(small_disk) -> None:
    root = small_disk / "root"
    state, ckpt = training(root, 400_000)  # 1.6 MB: two fit, three do not
    set_value(state, 1.0)
    ckpt.save(1).wait(WAIT_S)
    (small_disk / "filler").write_bytes(bytes(2_000_000))
    set_value(state, 2.0)
    failing = ckpt.save(2)
    with pytest.raises(RankErrors, match="OutOfSpace") as caught:
        failing.wait(WAIT_S)
    assert caught.value.step == 2
    set_value(state, 2.5)
    failing = ckpt.save(3)
    ended(failing)
    with pytest.warns(holdfast.HoldfastWarning, match="OutOfSpace"):
        ckpt.step(4)  # training goes on, and is told
    assert holdfast.steps(root) == [1]
    assert saved(root, 1) == {1.0}
    files = [f for _, _, names in os.walk(root / "steps") for f in names]
    assert len(files) == 2, files  # nothing half-written stays to fill the disk
    (small_disk / "filler").unlink()
    set_value(state, 3.0)
    ckpt.save(5).wait(WAIT_S)
    ckpt.close()
    assert {s: saved(root, s) for s in holdfast.steps(root)} == {1: {1.0}, 5: {3.0}}


@pytest.mark.parametrize("more", [0, 70_000], ids=["as large as before", "larger"])
def test_what_keep_lets_go_goes_before_a_save_that_does_not_fit(small_disk, more: int) -> None:
    """A save is taken to be as large as the newest step; of a larger one the first fails."""
    root = small_disk / "root"
    for step in (1, 2, 3):
        holdfast.save(root, {"data": {"w": torch.zeros(250_000)}}, step=step)
    if not more:
        (small_disk / "filler").write_bytes(bytes(300_000))
    state = {"data": {"w": torch.zeros(250_000), "v": torch.zeros(more)}}
    with holdfast.Checkpointer(root, state, keep=holdfast.Keep(last=2)) as ckpt:
        assert ckpt.restore(strict=False) == 3
        if more:
            with pytest.raises(RankErrors, match="OutOfSpace"):
                ckpt.save(4).wait(WAIT_S)
        for step in (5, 6):
            ckpt.save(step).wait(WAIT_S)
    assert holdfast.steps(root) == [5, 6]


def test_disk_full_is_raised_where_asked_for(small_disk) -> None:
    _, ckpt = training(small_disk / "root", 2_000_000, on_error="raise")
    ended(ckpt.save(2))
    with pytest.raises(RankErrors, match="OutOfSpace"):
        ckpt.step(3)
    ckpt.close()


def faulty_run(monkeypatch, fail, inner=None):
    store = inner or memory()
    monkeypatch.setattr(holdfast.live.roots, "open_store", lambda url: Faulty(store, fail))
    return store, state_of(1.0)


@pytest.mark.parametrize("broken", ["create", "write", "finish", "put"])
def test_input_output_errors(monkeypatch, broken) -> None:
    """At any operation of a save: it fails as a whole, and the next one works."""
    on = {"now": False}

    def fail(op: str, key: str):
        bad = on["now"] and op == broken and key.startswith("steps/")
        return Unavailable(f"cannot {op}: EIO", key=key) if bad else None

    store, state = faulty_run(monkeypatch, fail)
    ckpt = holdfast.Checkpointer(store.url, state, deadline_s=WAIT_S)
    ckpt.save(1).wait(WAIT_S)
    on["now"] = True
    state["data"].update(state_of(2.0)["data"])
    failing = ckpt.save(2)
    with pytest.raises(RankErrors, match="EIO"):
        failing.wait(WAIT_S)
    on["now"] = False
    assert contents(store) == {1: 1.0}
    if (
        broken != "put"
    ):  # there the manifest may still appear, so its files stay until the next save
        assert leftovers(store) == []
    state["data"].update(state_of(3.0)["data"])
    ckpt.save(2).wait(WAIT_S)
    ckpt.close()
    assert contents(store) == {1: 1.0, 2: 3.0}
    assert leftovers(store) == []


class LostAnswer(Wrapper):
    """The manifest is put, but the caller is told that it failed: as networks do."""

    def around(self, operation, call):
        result = call()
        if operation.name == "put" and operation.key.endswith("0000000002/manifest.json"):
            raise Unavailable("timed out", key=operation.key)
        return result


def test_a_commit_whose_answer_is_lost(monkeypatch) -> None:
    """The save is reported as failed; the step exists and is whole: it must not lose its files."""
    store, state = memory(), state_of(1.0)
    monkeypatch.setattr(holdfast.live.roots, "open_store", lambda url: LostAnswer(store))
    ckpt = holdfast.Checkpointer(store.url, state, deadline_s=WAIT_S)
    ckpt.save(1).wait(WAIT_S)
    for value in (2.0, 3.0):
        state["data"].update(state_of(value)["data"])
        with pytest.raises(RankErrors, match="timed out"):
            ckpt.save(2).wait(WAIT_S)
        assert contents(store) == {1: 1.0, 2: value}
    ckpt.save(3).wait(WAIT_S)
    ckpt.close()
    assert contents(store) == {1: 1.0, 2: 3.0, 3: 3.0}
    assert leftovers(store) == []


@pytest.mark.parametrize("broken", ["list", "delete"])
def test_tidying_that_fails_fails_no_save(monkeypatch, broken) -> None:
    on = {"now": False}

    def fail(op: str, key: str):
        bad = on["now"] and op == broken and key.startswith("steps/")
        return Unavailable(f"cannot {op}: EIO", key=key) if bad else None

    store, state = faulty_run(monkeypatch, fail)
    keep = holdfast.Keep(last=1)
    with holdfast.Checkpointer(store.url, state, keep=keep, deadline_s=WAIT_S) as ckpt:
        ckpt.save(1).wait(WAIT_S)
        on["now"] = True
        ckpt.save(2).wait(WAIT_S)
        assert value_of(store, 2) == 1.0
        on["now"] = False
        ckpt.save(3).wait(WAIT_S)
    assert contents(store) == {3: 1.0}
    assert leftovers(store) == []


def test_an_outage_while_restoring_is_no_reason_to_go_back(monkeypatch) -> None:
    store, state = faulty_run(monkeypatch, lambda op, key: None)
    with holdfast.Checkpointer(store.url, state) as ckpt:
        for step in (1, 2):
            ckpt.save(step).wait(WAIT_S)

    def fail(op: str, key: str):
        bad = op == "read" and key.startswith("steps/0000000002") and "manifest" not in key
        return Unavailable("EIO", key=key) if bad else None

    _, state = faulty_run(monkeypatch, fail, store)
    with holdfast.Checkpointer(store.url, state) as ckpt, pytest.raises(HoldfastError, match="EIO"):
        ckpt.restore()


def test_a_directory_that_is_read_only(tmp_path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,ro", "tmpfs", str(root)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a read-only tmpfs: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(HoldfastError, match=r"[Rr]ead-only"):
            holdfast.save(root, state_of(1.0), step=1)
        with pytest.raises(HoldfastError, match=r"[Rr]ead-only"):
            holdfast.Checkpointer(root, state_of(1.0))
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


def test_a_slow_store_holds_nobody(monkeypatch) -> None:
    """The call returns before the first operation is over."""
    store = memory()
    answered = threading.Event()
    answered.set()

    def wait(*_: str) -> None:
        assert answered.wait(WAIT_S)

    slow = Faulty(store, wait)
    monkeypatch.setattr(holdfast.live.roots, "open_store", lambda url: slow)
    ckpt = holdfast.Checkpointer(
        store.url, state_of(1.0), every=holdfast.Every(durable=1), deadline_s=WAIT_S
    )
    answered.clear()
    ckpt.step(1)
    with pytest.raises(Deadline, match="step 1"):
        ckpt._saves.untold[0].wait(0.01)
    answered.set()
    ckpt._saves.untold[0].wait(WAIT_S)
    ckpt.close()
    assert set(contents(store)) == {1}


def test_local_store_errors_are_translated(tmp_path) -> None:
    (tmp_path / "steps").write_text("a file where a directory must be")
    with pytest.raises(HoldfastError):
        holdfast.save(tmp_path, state_of(1.0), step=1)
    assert LocalStore(tmp_path).list() == ["steps"]
