"""`Checkpointer.status`: what each tier has, what is under way there, and what went wrong; and how objects
show themselves in one line."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import holdfast
import zygote
from holdfast.errors import OutOfSpace, RankErrors
from holdfast.live.saving.progress import TierProgress, TierStatus
from holdfast.store import MemoryStore, register
from holdfast.testing import Faulty

WAIT_S = 60.0


def state_of(value: float = 0.0) -> dict[str, Any]:
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, value)
    return {"model": model}


def test_nothing_is_protected_before_the_first_save(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, state_of(), every=10) as ckpt:
        found = ckpt.status()
        assert (found.run, found.step, found.protected, found.by) == (1, None, None, ())
        assert dict(found.tiers) == {"durable": TierStatus()}
        ckpt.step(1)
        assert ckpt.status().step == 1 and ckpt.status().protected is None
        assert str(ckpt.status()).splitlines()[0].endswith("run 1, at step 1: nothing is saved yet")


def test_a_durable_save_is_told_with_its_time_and_bytes(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, state_of(), every=5) as ckpt:
        began = time.time()
        ckpt.step(5)
        ckpt.wait()
        ckpt.step(6)
        found = ckpt.status()
    image = next(tmp_path.glob("steps/*/*/r00000.safetensors"))
    durable = found.tiers["durable"]
    assert (durable.step, durable.bytes, durable.under_way) == (5, image.stat().st_size, ())
    assert durable.since is not None and began <= durable.since <= time.time()
    assert durable.seconds is not None and durable.seconds <= time.time() - began
    assert (found.protected, found.by, found.step, found.is_open) == (5, ("durable",), 6, True)
    assert not ckpt.status().is_open and ckpt.status().protected == 5
    first, second = str(found).splitlines()
    assert first == f"file://{tmp_path}, run 1, at step 6: protected up to step 5 (durable)"
    assert second.startswith("  durable  step 5, just now; last save ") and second.endswith(" s")


@pytest.fixture
def slow() -> Iterator[tuple[str, threading.Event]]:
    """The URL of a store whose images wait for an event."""
    inner, go = MemoryStore(f"slow{time.monotonic_ns()}"), threading.Event()

    def wait(op: str, key: str) -> None:
        if op == "create" and key.endswith("safetensors"):
            assert go.wait(WAIT_S)

    store = Faulty(inner, wait)
    register("slow", lambda url: store)
    yield "slow://root", go
    go.set()


def test_a_save_that_hangs_is_under_way_and_the_status_does_not_wait(
    slow: tuple[str, threading.Event],
) -> None:
    url, go = slow
    with holdfast.Checkpointer(url, state_of()) as ckpt:
        save = ckpt.save(7)
        found = ckpt.status()
        assert found.tiers["durable"].under_way == (7,) and found.protected is None
        assert repr(save) == "<Save: save of step 7, under way>"
        assert save.seconds is None
        assert "under way: 7" in str(found)
        go.set()
        save.wait(WAIT_S)
        assert ckpt.status().tiers["durable"].under_way == ()
        assert ckpt.status().protected == 7


def test_a_failure_stays_until_a_save_succeeds() -> None:
    inner, broken = MemoryStore(f"full{time.monotonic_ns()}"), [True]

    def full(op: str, key: str) -> None:
        if broken[0] and op == "create":
            raise OutOfSpace("the disk is full", key=key)

    store = Faulty(inner, full)
    register("full", lambda url: store)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with holdfast.Checkpointer("full://root", state_of()) as ckpt:
            save = ckpt.save(1)
            with pytest.raises(RankErrors):
                save.wait(WAIT_S)
            durable = ckpt.status().tiers["durable"]
            assert durable.step is None and durable.under_way == ()
            assert durable.error is not None
            assert "\n  rank 0: OutOfSpace: the disk is full" in durable.error
            failed = "RankErrors: save of step 1 failed on 1 rank(s) rank 0: OutOfSpace: the disk is full"
            assert f"the last one failed: {failed}" in str(ckpt.status())
            assert repr(save).startswith(f"<Save: save of step 1, failed with {failed}")
            broken[0] = False
            ckpt.save(2).wait(WAIT_S)
            assert ckpt.status().tiers["durable"].error is None
            assert ckpt.status().protected == 2


def test_a_restored_step_is_where_it_was_read(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, state_of(), every=1) as ckpt:
        ckpt.step(3)
    created = time.time()
    with holdfast.Checkpointer(tmp_path, state_of(), every=1) as ckpt:
        assert ckpt.status().protected is None
        ckpt.restore()
        durable = ckpt.status().tiers["durable"]
        assert (durable.step, durable.seconds, durable.bytes) == (3, None, None)
        assert durable.since is not None and created - WAIT_S < durable.since <= created
        assert ckpt.status().run == 2 and ckpt.status().by == ("durable",)


MEMORY = """
import sys, torch, holdfast
root, upload = sys.argv[1:]
net = torch.nn.Linear(9, 9)
optim = torch.optim.SGD(net.parameters(), lr=0.1)
with holdfast.Checkpointer(
    root, {"net": net, "optim": optim}, every=holdfast.Every(durable=4, memory=2, delta=1),
    memory=holdfast.Memory(), delta=holdfast.Delta(batch=1), upload=upload, when_busy="queue",
) as ckpt:
    ckpt.restore()
    for step in range(1, 8):
        net(torch.ones(1, 9)).sum().backward()
        optim.step()
        ckpt.step(step)
        ckpt.wait()
    ckpt._tiers.get("delta").way.flush(60)
    ckpt._tiers.get("upload")._worker.settle(60)
    found = ckpt.status()
    for name, tier in found.tiers.items():
        print(name, tier.step, tier.bytes > 0, tier.seconds > 0, tier.since > 0, tier.under_way, tier.error)
    print(found.protected, *found.by)
    print(found)
"""


def test_each_tier_tells_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Durable saves at 1 (the base of records) and 4, snapshots at 2, 4 and 6, a record at each step."""
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(tmp_path / "node"))
    done = zygote.run(
        ["-c", MEMORY, str(tmp_path / "root"), str(tmp_path / "behind")],
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:5] == [
        "upload 4 True True True () None",
        "durable 4 True True True () None",
        "memory 6 True True True () None",
        "delta 7 True True True () None",
        "7 delta",
    ]
    assert "run 1, at step 7: protected up to step 7 (delta)" in lines[5]


# -- one line each --------------------------------------------------------------------------------


def test_objects_show_themselves_in_one_line(tmp_path: Path) -> None:
    ckpt = holdfast.Checkpointer(tmp_path, state_of())
    assert repr(ckpt) == f"<Checkpointer of file://{tmp_path}, run 1: nothing is saved yet>"
    save = ckpt.save(4)
    save.wait(WAIT_S)
    assert repr(save).startswith("<Save: save of step 4, committed: ")
    assert repr(save).endswith(f" in {save.seconds:.3g} s>")
    ckpt.close()
    assert repr(ckpt) == (
        f"<Checkpointer of file://{tmp_path}, run 1, at step 4, closed: protected up to step 4 (durable)>"
    )
    with holdfast.Checkpointer(tmp_path, state_of()) as again:
        assert repr(again.restore()).startswith("Restored(step=4, tier='durable'")
    unmade = holdfast.Checkpointer.__new__(holdfast.Checkpointer)
    assert repr(unmade) == "<Checkpointer that is not made yet>"


def test_a_save_that_is_left_out_is_not_kept() -> None:
    progress, save = TierProgress(), holdfast.Save(3)
    progress.watch(save)
    assert progress.status.under_way == (3,)
    save.skipped = True
    save._conclude()
    assert progress.status == TierStatus()
    assert repr(save) == "<Save: save of step 3, left out>"


def test_a_step_that_is_saved_twice_at_once_is_under_way_twice() -> None:
    progress = TierProgress()
    for step in (3, 4, 3):
        progress.begin(step)
    progress.keep(3, 0.5, 10)
    assert progress.status.under_way == (4, 3) and progress.status.step == 3
    progress.fail(4, "no")
    assert (progress.status.under_way, progress.status.error) == ((3,), "no")
    progress.keep(3, 0.5, 10)
    assert (progress.status.under_way, progress.status.error) == ((), None)
