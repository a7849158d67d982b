"""Readers while saves commit and prune: each read is one version, wholly, or a clear error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

import holdfast
import holdfast.live.step_loading
from holdfast.errors import HoldfastError, NotFound, NotRecoverable
from holdfast.store import LocalStore, Store
from system.crash.single import SIZES, WAIT_S, leftovers, memory, state_of


def read_once(store: Store, step: int | None) -> float:
    """The one value that everything in a step has."""
    with holdfast.open(store.url, step=step) as c:
        values = {
            float(x) for n in SIZES for x in (c.read(f"data.{n}").min(), c.read(f"data.{n}").max())
        }
        values.add(c.extras["data"]["value"])
    assert len(values) == 1, f"mixed: {values}"
    return values.pop()


def watch(look: Callable[[], float], done: threading.Event, seen: list, wrong: list) -> None:
    while not done.is_set():
        try:
            seen.append(look())
        except (NotFound, NotRecoverable):
            seen.append(None)  # replaced or pruned under our hands
        except BaseException as error:
            wrong.append(error)
            return


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_repeated_and_pruned_steps(kind, tmp_path) -> None:
    store = memory() if kind == "memory" else LocalStore(tmp_path)
    state = state_of(0.0)
    done, wrong = threading.Event(), []
    seen: list[list] = [[], []]
    looks = [lambda: read_once(store, None), lambda: read_once(store, 1_000)]
    threads = [
        threading.Thread(target=watch, args=(look, done, some, wrong))
        for look, some in zip(looks, seen)
    ]
    with holdfast.Checkpointer(store.url, state, keep=holdfast.Keep(last=1, every=1_000)) as ckpt:
        for thread in threads:
            thread.start()
        for value in range(1, 26):
            state["data"].update(state_of(value)["data"])
            ckpt.save(1_000 if value % 2 else value).wait(WAIT_S)
            if value in (1, 25):  # the first and the last are seen, on a busy machine too
                until = time.monotonic() + WAIT_S
                while not all(some and some[-1] == value for some in seen):
                    assert time.monotonic() < until and wrong == [], (seen, wrong)
                    time.sleep(0.005)
        done.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert wrong == []
    for some in seen:
        values = [v for v in some if v is not None]
        assert len(set(values)) > 1, "the reader saw no change: it proved nothing"
    repeated = [v for v in seen[1] if v is not None]
    assert repeated == sorted(repeated)  # never back to an older version


def test_a_restore_reads_again_what_was_replaced(monkeypatch) -> None:
    """The step is saved anew between reading its manifest and its data: the new one is loaded."""
    store = memory()
    writer_state = state_of(1.0)
    writer = holdfast.Checkpointer(store.url, writer_state)
    writer.save(5).wait(WAIT_S)
    real = holdfast.live.step_loading.restore
    turns = []

    def late(*args):
        if not turns:
            writer_state["data"].update(state_of(2.0)["data"])
            writer.save(5).wait(WAIT_S)
            until = time.monotonic() + WAIT_S
            while leftovers(store):  # tidied up in the background
                assert time.monotonic() < until
                time.sleep(0.005)
        turns.append(None)
        return real(*args)

    monkeypatch.setattr(holdfast.live.step_loading, "restore", late)
    state = state_of(0.0)
    assert holdfast.load(store.url, state) == 5
    assert len(turns) == 2
    assert state["data"]["value"] == 2.0
    assert all(float(state["data"][n].min()) == 2.0 for n in SIZES)
    writer.close()


def test_a_reader_of_a_pruned_step_is_told_so() -> None:
    store = memory()
    holdfast.save(store.url, state_of(1.0), step=1)
    c = holdfast.open(store.url, step=1)
    for key in store.list("steps/"):
        store.delete(key)
    with pytest.raises(HoldfastError) as caught:
        c.read("data.a")
    assert isinstance(caught.value, NotFound)
    assert caught.value.step == 1
