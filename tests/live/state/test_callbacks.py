"""What is called when a step was committed: which, when, and what becomes of its errors."""

from __future__ import annotations

import threading

import pytest
import torch

import holdfast
from holdfast.base.notices import Notices
from holdfast.core.checkpoint.notes import read_notes
from holdfast.core.group import meet
from holdfast.errors import HoldfastError, Unavailable, UsageError
from holdfast.live.saving import Save
from holdfast.session.ending import Saves
from holdfast.store import LocalStore
from holdfast.testing import Faulty


def test_every_commit_once_in_order_in_the_training_thread(tmp_path) -> None:
    told: list[tuple[int, str]] = []

    def call(step: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        assert step in holdfast.steps(str(tmp_path))
        told.append((step, "one"))

    with holdfast.Checkpointer(str(tmp_path), {"x": torch.ones(1 << 18)}, every=2) as ckpt:
        ckpt.on_commit(call)
        ckpt.on_commit(lambda step: told.append((step, "two")))
        for step in range(1, 7):
            ckpt.step(step)
        ckpt.wait()
        assert told == [(s, name) for s in (2, 4, 6) for name in ("one", "two")]
        ckpt.wait()
        ckpt.save(7)
    assert told[6:] == [(7, "one"), (7, "two")]


def test_a_save_that_ends_during_a_look_back_is_called_for_at_the_next() -> None:
    """Its thread ends it between two questions for it."""

    class EndsWhenAsked(Save):
        def done(self) -> bool:
            was_done = super().done()
            if not was_done:
                self._conclude()
            return was_done

    called: list[int] = []
    saves = Saves(meet(60.0, "test"), Notices("raise"))
    saves.calls.append(called.append)
    saves.untold.append(EndsWhenAsked(3))
    saves.look_back()
    assert not called
    saves.look_back()
    assert called == [3]


def test_close_calls_before_it_ends_anything(tmp_path) -> None:
    with holdfast.Checkpointer(str(tmp_path), {"x": torch.ones(3)}) as ckpt:
        ckpt.on_commit(lambda step: ckpt.pin(step, "last"))
        ckpt.save(1)
        ckpt.save(2)
    assert [*read_notes(LocalStore(str(tmp_path))).pinned] == [2]


def test_a_call_may_save_and_wait(tmp_path) -> None:
    told: list[int] = []
    with holdfast.Checkpointer(str(tmp_path), {"x": torch.ones(3)}) as ckpt:

        def call(step: int) -> None:
            told.append(step)
            if step < 3:
                ckpt.save(step + 1)
                ckpt.wait()

        ckpt.on_commit(call)
        ckpt.save(1)
        ckpt.wait()
    assert told == [1, 2, 3]


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_its_errors_are_told_and_lose_nothing(tmp_path, on_error) -> None:
    told: list[int] = []

    def fails(step: int) -> None:
        raise ValueError("no such bucket")

    ckpt = holdfast.Checkpointer(str(tmp_path), {"x": torch.ones(3)}, on_error=on_error)
    ckpt.on_commit(fails)
    ckpt.on_commit(told.append)
    ckpt.save(1)
    if on_error == "warn":
        with pytest.warns(holdfast.HoldfastWarning, match=r"failed at step 1, .*no such bucket"):
            ckpt.wait()
    else:
        with pytest.raises(ValueError, match="no such bucket"):
            ckpt.wait()
    assert told == [1] and holdfast.steps(str(tmp_path)) == [1]
    ckpt.save(2)
    if on_error == "warn":
        with pytest.warns(holdfast.HoldfastWarning, match="step 2"):
            ckpt.close()
    else:
        with pytest.raises(ValueError, match="no such bucket"):
            ckpt.close()
    assert told == [1, 2] and holdfast.steps(str(tmp_path)) == [1, 2]


def test_not_of_what_failed(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    failures = iter([Unavailable("the disk is away")])
    store = Faulty(
        LocalStore(str(tmp_path)), lambda op, key: next(failures, None) if op == "create" else None
    )
    monkeypatch.setattr("holdfast.live.roots.open_store", lambda url: store)
    with holdfast.Checkpointer(str(tmp_path), {"x": torch.ones(3)}, on_error="warn") as ckpt:
        ckpt.on_commit(told.append)
        save = ckpt.save(1)
        with pytest.raises(HoldfastError):
            save.wait(300)
        ckpt.save(2)
    assert told == [2]


def test_a_callback_of_one_save(tmp_path) -> None:
    ended = threading.Event()
    with holdfast.Checkpointer(str(tmp_path), {"x": torch.ones(3)}) as ckpt:
        save = ckpt.save(1)
        save.add_done_callback(lambda one: (one is save and one.done()) and ended.set())
        assert ended.wait(300)
        late: list[int] = []
        save.add_done_callback(lambda one: late.append(one.step))
        assert late == [1]


def test_what_cannot_be_called(tmp_path) -> None:
    with holdfast.Checkpointer(str(tmp_path), {"x": torch.ones(3)}) as ckpt:
        for call in (None, 3, "print", lambda: None, lambda a, b: None):
            with pytest.raises(UsageError, match="on_commit"):
                ckpt.on_commit(call)  # type: ignore[arg-type]
