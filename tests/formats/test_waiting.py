"""`holdfast.wait_newer`: a reader that waits for the next step of a training."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import Deadline, Unavailable, UsageError
from holdfast.store import MemoryStore, register
from holdfast.testing import Faulty


def state() -> dict[str, Any]:
    return {"x": torch.ones(3)}


def test_what_is_newer_already_is_told_at_once(tmp_path: Path) -> None:
    for step in (10, 20):
        holdfast.save(tmp_path, state(), step=step)
    assert holdfast.wait_newer(tmp_path, timeout=0) == 20
    assert holdfast.wait_newer(tmp_path, 10, timeout=0) == 20
    assert (
        holdfast.wait_newer(tmp_path, than=15, timeout=0) == 20
    )  # which is deleted, if it ever was
    for than in (20, 30):
        with pytest.raises(Deadline, match=f"no step newer than {than} in .* after 0 s") as caught:
            holdfast.wait_newer(tmp_path, than, timeout=0)
        assert caught.value.hint == "steps there: 10, 20"
        assert isinstance(caught.value, TimeoutError)


def test_a_step_that_comes_later_ends_the_wait(tmp_path: Path) -> None:
    root, begun = tmp_path / "not yet", threading.Event()

    def train() -> None:
        begun.wait(60)
        for step in (1, 2):
            holdfast.save(root, state(), step=step)

    training = threading.Thread(target=train)
    training.start()
    begun.set()
    first = holdfast.wait_newer(root, timeout=60, poll_s=0.01)
    assert first in (1, 2)
    assert holdfast.wait_newer(root, 1, timeout=60, poll_s=0.01) == 2
    training.join()


def test_a_lower_number_of_a_later_run_is_newer(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, state()) as ckpt:
        for step in (50, 80):
            ckpt.save(step).wait(60)
    with holdfast.Checkpointer(tmp_path, state()) as ckpt:
        ckpt.restore(50)
        with pytest.raises(Deadline):
            holdfast.wait_newer(tmp_path, 80, timeout=0)
        ckpt.save(60).wait(60)
    assert holdfast.wait_newer(tmp_path, 80, timeout=0) == 60
    with pytest.raises(Deadline):
        holdfast.wait_newer(tmp_path, 60, timeout=0)


def test_storage_that_does_not_answer_for_a_while_is_asked_again() -> None:
    inner, failures = MemoryStore(uuid.uuid4().hex), [3]

    def fail(op: str, key: str) -> None:
        if op in ("list", "entries") and failures[0]:
            failures[0] -= 1
            raise Unavailable("the network is away")

    holdfast.save(inner.url, state(), step=1)
    store = Faulty(inner, fail)
    register("away", lambda url: store)
    assert holdfast.wait_newer("away://root", timeout=60, poll_s=0.001) == 1
    assert failures == [0]
    failures[0] = 10**6
    with pytest.raises(Deadline, match="no step in") as caught:
        holdfast.wait_newer("away://root", timeout=0)
    assert "the network is away" in str(caught.value)


def test_foreign_checkpoints_are_not_waited_for() -> None:
    with pytest.raises(UsageError, match="names a foreign checkpoint"):
        holdfast.wait_newer("dcp:runs/x")
