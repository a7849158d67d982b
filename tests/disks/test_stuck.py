"""Storage that does not answer: every call ends within its deadline, and says what was not answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from disks.frozen import Frozen
from holdfast import patience, tiers
from holdfast.errors import Deadline, HoldfastError
from holdfast.store import LocalStore, be_patient
from holdfast.threads import in_threads

DEADLINE_S = 0.4
"""Of calls on storage that does not answer; what is to succeed has more."""
ENOUGH_S = 60.0
"""Far more than anything here may take; what hangs does so until the end of the test."""


def state(size: int = 8) -> dict[str, Any]:
    return {"data": {"w": torch.arange(float(size))}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """With step 1."""
    holdfast.save(tmp_path / "root", state(), step=1)
    return tmp_path / "root"


def ended(call: Callable[[], object], within_s: float = ENOUGH_S) -> BaseException | None:
    """How a call ends.  It is made in a thread, so that one that hangs fails its own test only."""
    how: list[BaseException | None] = []

    def make() -> None:
        try:
            call()
            how.append(None)
        except BaseException as error:
            how.append(error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(within_s)
    assert not thread.is_alive(), "it hangs"
    return how[0]


CALLS: dict[str, Callable[[Path], object]] = {
    "open": lambda root: holdfast.open(root),
    "steps": lambda root: holdfast.steps(root),
    "load": lambda root: holdfast.load(root, state(), deadline_s=DEADLINE_S),
    "save": lambda root: holdfast.save(root, state(), step=2, deadline_s=DEADLINE_S),
    "Checkpointer": lambda root: holdfast.Checkpointer(root, state(), deadline_s=DEADLINE_S),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_storage_that_does_not_answer_ends(name: str, root: Path) -> None:
    with Frozen(root, reads=True) as disk:

        def call() -> None:
            with patience.opening(DEADLINE_S):
                CALLS[name](root)

        error = ended(call)
        assert disk.num_waiting
    assert isinstance(error, Deadline), error
    assert "storage has not answered for" in str(error)
    assert str(root) in str(error)


@pytest.mark.parametrize("name", ["save", "Checkpointer"])
def test_so_does_one_that_writes_where_reads_are_answered(name: str, root: Path) -> None:
    with Frozen(root) as disk:
        error = ended(lambda: CALLS[name](root))
        assert disk.num_waiting
    assert isinstance(error, HoldfastError), error
    assert "put '" in str(error) or "create '" in str(error)
    assert "storage has not answered" in str(error)
    assert str(root) in str(error)


@pytest.fixture
def frozen_under_a_run(root: Path) -> Iterator[tuple[holdfast.Checkpointer, Frozen]]:
    """A run with step 2, the storage of which has stopped to answer."""
    ckpt = holdfast.Checkpointer(root, state(3_000_000), deadline_s=ENOUGH_S, on_error="raise")
    ckpt.save(2).wait()
    be_patient(ckpt._tiers.store, DEADLINE_S)
    with Frozen(root, reads=True) as disk:
        yield ckpt, disk


def test_a_save_fails_by_itself(
    frozen_under_a_run: tuple[holdfast.Checkpointer, Frozen], root: Path
) -> None:
    ckpt, disk = frozen_under_a_run
    save = ckpt.save(3)
    assert "is not done after 0.1 s" in str(ended(lambda: save.wait(0.1)))
    error = ended(save.wait)
    assert isinstance(error, HoldfastError)
    assert "storage has not answered" in str(error)
    assert str(root) in str(error)
    began = time.monotonic()
    again = ended(lambda: ckpt.save(4).wait())  # what does not answer is not asked again
    assert "storage has not answered" in str(again)
    assert time.monotonic() - began < ENOUGH_S / 2
    assert isinstance(ended(ckpt.restore), HoldfastError)
    ended(ckpt.close)
    disk.thaw()
    assert holdfast.steps(root) == [1, 2]


def test_it_is_asked_again_when_it_answers(root: Path) -> None:
    ckpt = holdfast.Checkpointer(root, state(), deadline_s=ENOUGH_S, on_error="raise")
    store = ckpt._tiers.store
    assert isinstance(store, LocalStore)
    be_patient(store, DEADLINE_S)
    with Frozen(root) as disk:
        save = ckpt.save(2)
        assert isinstance(ended(save.wait), HoldfastError)
        be_patient(store, ENOUGH_S)
        disk.thaw()
        until = time.monotonic() + ENOUGH_S
        while any(not one.is_over for one in store.patience._stuck):
            assert time.monotonic() < until
            time.sleep(0.01)
    ckpt.save(3).wait()
    ckpt.close()
    assert holdfast.steps(root) == [1, 3]


def test_close_ends_in_time_and_says_what_was_not_saved(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "RELEASE_S", 0.2)
    ckpt = holdfast.Checkpointer(root, state(), deadline_s=ENOUGH_S * 10)
    with Frozen(root, reads=True):
        ckpt.save(2)
        error = ended(lambda: ckpt.close(timeout=1.5))
    assert isinstance(error, Deadline)
    assert "when close() had waited 1.5 s" in str(error)
    assert "storage has not answered" in str(error)
    assert str(root) in str(error)


def test_wait_ends_in_time_with_records(root: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = holdfast.Checkpointer(
        root, {"m": model, "o": optimizer}, delta=holdfast.Delta(), every=holdfast.Every(delta=1)
    )
    for step in (2, 3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        ckpt.step(step)
    ckpt.wait()
    ckpt.wait(0.0)  # nothing is under way
    delta, stuck = ckpt._tiers.delta, threading.Event()
    assert delta is not None
    delta._capture._copier.submit(stuck.wait)
    error = ended(lambda: ckpt.wait(0.1))
    assert isinstance(error, Deadline), error
    assert "records were not all with their writer" in str(error)
    stuck.set()
    ckpt.close()


def test_threads_that_are_not_answered_are_left_behind(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.patience.limit_s = 0.2
    with Frozen(tmp_path):
        keys = [f"a{n}" for n in range(4)]
        error = ended(lambda: in_threads(lambda key: store.put(key, b"x"), keys, 2))
    assert isinstance(error, Deadline)
    assert f"put '{tmp_path}/a" in str(error)


def test_errors_and_results_come_through(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"x")
    assert store.get("a") == b"x"
    with pytest.raises(holdfast.errors.NotFound):
        store.get("b")
    with patience.within(5.0):
        assert store.list() == ["a"]
