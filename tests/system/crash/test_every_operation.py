"""Death at every store operation of a save, a repeated save and a prune: no step is ever damaged."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import holdfast.live.roots
import holdfast.session.planned_saves
from capabilities import ALONE
from holdfast import Keep
from holdfast.checkpoint import notes
from holdfast.core.checkpoint.opened import Checkpoint
from holdfast.errors import HoldfastError
from holdfast.session.attempts import under_way
from holdfast.store import LocalStore, Store
from holdfast.testing import Stopped
from system.crash.single import contents, each_death, leftovers, life, memory, state_of


def recovers(monkeypatch, store: Store, before: dict[int, float], **options) -> None:
    """The next run saves as if nothing had happened, and sweeps what the dead one left."""
    life(monkeypatch, store, [(9, 9.0)], **options)
    assert contents(store) == {**before, 9: 9.0}
    assert leftovers(store) == []


def test_a_save(monkeypatch) -> None:
    base = memory()
    life(monkeypatch, base, [(1, 1.0), (2, 2.0)])
    outcomes = set()
    for when, store in each_death(base, lambda s: life(monkeypatch, s, [(3, 3.0)])):
        found = contents(store)
        assert found in ({1: 1.0, 2: 2.0}, {1: 1.0, 2: 2.0, 3: 3.0}), when
        outcomes.add(3 in found)
        recovers(monkeypatch, store, found)
    assert outcomes == {True, False}


def test_a_repeated_save(monkeypatch) -> None:
    base = memory()
    life(monkeypatch, base, [(1, 1.0), (2, 2.0)])
    outcomes = set()
    for when, store in each_death(base, lambda s: life(monkeypatch, s, [(2, 20.0)], anew=True)):
        found = contents(store)
        assert found in ({1: 1.0, 2: 2.0}, {1: 1.0, 2: 20.0}), when
        outcomes.add(found[2])
        recovers(monkeypatch, store, found)
    assert outcomes == {2.0, 20.0}


def test_a_repeated_save_in_the_same_run(monkeypatch) -> None:
    saves = [(2, 2.0), (2, 20.0), (2, 200.0)]
    order = [None, 2.0, 20.0, 200.0]
    told: list[list[float]] = []
    deaths = each_death(memory(), lambda s: told.append(life(monkeypatch, s, saves)))
    outcomes = set()
    for (when, store), committed in zip(deaths, told, strict=True):
        found = contents(store)
        assert set(found) <= {2}
        outcomes.add(found.get(2))
        last = max(map(order.index, committed), default=0)
        assert order.index(found.get(2)) >= last, (
            when
        )  # what was committed is not lost by dying later
        recovers(monkeypatch, store, found)
    assert outcomes == set(order)


def test_a_save_that_prunes(monkeypatch) -> None:
    base = memory()
    life(monkeypatch, base, [(s, float(s)) for s in (1, 2, 3, 4)])
    outcomes = set()
    keep = Keep(last=1)
    for when, store in each_death(base, lambda s: life(monkeypatch, s, [(5, 5.0)], keep=keep)):
        found = contents(store)
        assert found, when
        assert max(found) in (4, 5), when
        if 5 not in found:
            assert set(found) == {1, 2, 3, 4}, f"pruned before the commit, {when}"
        outcomes.add(tuple(found))
        life(monkeypatch, store, [(9, 9.0)], keep=keep)
        assert contents(store) == {9: 9.0}
        assert leftovers(store) == []
    assert {(1, 2, 3, 4), (1, 2, 3, 4, 5), (5,)} <= outcomes


@pytest.mark.parametrize("torn", [False, True])
def test_a_repeated_save_in_a_directory(monkeypatch, tmp_path, torn) -> None:
    base = LocalStore(tmp_path / "base")
    life(monkeypatch, base, [(2, 2.0)])

    def clone(store: LocalStore) -> LocalStore:
        place = tempfile.mkdtemp(dir=tmp_path)
        shutil.copytree(store.root, place, dirs_exist_ok=True)
        return LocalStore(place)

    deaths = each_death(base, lambda s: life(monkeypatch, s, [(2, 20.0)], anew=True), clone)
    for when, store in deaths[1 + torn :: 2]:
        found = contents(store)
        assert found in ({2: 2.0}, {2: 20.0}), when
        recovers(monkeypatch, store, found)


def files_of(value: float) -> dict[str, bytes]:
    return {"config.json": str(value).encode(), "tokenizer/vocab.txt": b"%d\n" % value * 1000}


def test_a_save_with_files(monkeypatch) -> None:
    """Files are there with their step, all of them and whole, or there is none."""

    def live(store: Store, step: int) -> None:
        life(monkeypatch, store, [(step, float(step))], files=files_of(step))

    base = memory()
    live(base, 1)
    outcomes = set()
    for when, store in each_death(base, lambda s: live(s, 2)):
        found = contents(store)
        assert found in ({1: 1.0}, {1: 1.0, 2: 2.0}), when
        for step in found:
            assert dict(Checkpoint.open(store.url, step).files) == files_of(step), when
        outcomes.add(2 in found)
        recovers(monkeypatch, store, found)
    assert outcomes == {True, False}


def test_a_pin_and_a_prune(monkeypatch) -> None:
    """A step that was pinned is there, whenever the process that prunes dies."""
    base = memory()
    life(monkeypatch, base, [(s, float(s)) for s in (1, 2, 3)])
    notes.pin(base, 1, "best")
    keep = Keep(last=1)
    for when, store in each_death(base, lambda s: life(monkeypatch, s, [(4, 4.0)], keep=keep)):
        assert 1 in contents(store), when
        life(monkeypatch, store, [(9, 9.0)], keep=keep)
        assert contents(store) == {1: 1.0, 9: 9.0}
        assert leftovers(store) == [notes.NOTES_KEY]


def labelled_life(monkeypatch, store: Store) -> None:
    """A process that labels a save under way, and saves on, until its store is dead."""
    monkeypatch.setattr(holdfast.live.roots, "open_store", lambda url: store)
    with suppress(Stopped, HoldfastError):
        ckpt = holdfast.Checkpointer(store.url, state_of(0), keep=Keep(last=1), deadline_s=300)
        try:
            ckpt.restore()
            save = ckpt.save(3)
            ckpt.pin(3, "best")
            save.wait(300)
            ckpt.save(4).wait(300)
        finally:
            with suppress(Stopped, HoldfastError):
                ckpt.close()


def test_a_label_of_a_save_under_way(monkeypatch) -> None:
    """Whenever the process dies, the label names the step before or the new one, which is there, and
    stays."""
    base, outcomes = memory(), set()
    life(monkeypatch, base, [(1, 1.0), (2, 2.0)])
    notes.pin(base, 1, "best")
    for when, store in each_death(base, lambda s: labelled_life(monkeypatch, s)):
        labels = notes.read_notes(store).labels
        assert labels in ({"best": 1}, {"best": 3}), when
        for step in (9, 10):
            assert labels["best"] in contents(store), (when, labels)
            life(monkeypatch, store, [(step, float(step))], keep=Keep(last=1))
        assert notes.read_notes(store).labels == labels, when
        outcomes.add(labels["best"])
    assert outcomes == {1, 3}


def dcp_life(monkeypatch, store: Store, step: int, value: float, **options) -> None:
    """A process that goes on from the newest step and saves by DCP's own call, until its store is dead."""
    monkeypatch.setattr(holdfast.session.planned_saves, "open_store", lambda url: store)
    monkeypatch.setattr(holdfast.live.roots, "open_store", lambda url: store)
    under_way.cache_clear()  # a new process has no saves of the one before
    with suppress(Stopped, CheckpointException):
        if contents(store):
            dcp.load(state_of(0.0), storage_reader=holdfast.dcp.Reader(store.url), **ALONE)
        writer = holdfast.dcp.Writer(store.url, **options)
        dcp.save(state_of(value), storage_writer=writer, checkpoint_id=str(step), **ALONE)
        writer.wait()


@pytest.mark.parametrize("step", [2, 3], ids=["again", "new"])
def test_a_save_by_dcp(monkeypatch, step: int) -> None:
    """The step is what it was, or the new one whole, and the next save is as ever.

    What the dead one wrote stays here: it is swept when its process is gone, and here that lives on.
    """
    base, before = memory(), {1: 1.0, 2: 2.0}
    for number, value in before.items():
        dcp_life(monkeypatch, base, number, value)
    assert contents(base) == before
    outcomes = set()
    for when, store in each_death(base, lambda s: dcp_life(monkeypatch, s, step, 20.0), least=5):
        found = contents(store)
        assert found in (before, {**before, step: 20.0}), when
        outcomes.add(found.get(step))
        dcp_life(monkeypatch, store, 9, 9.0, keep=Keep(last=1))
        assert contents(store) == {9: 9.0}, when
    assert outcomes == {before.get(step), 20.0}
