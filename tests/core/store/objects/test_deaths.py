"""Death at every change of a save, a repeated save, a prune and a claim, in a bucket of SeaweedFS.

As `crash/test_every_operation.py` in memory, whose rules these are: the newest committed step verifies,
nothing is mixed, and the next run goes on as if nothing had happened.  Each changing call of the store is
one request here; a bulk delete is taken apart, since a server may have done some of it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from core.store.objects.fixtures import fresh
from core.store.objects.servers import SeaweedFS
from holdfast import Keep
from holdfast.store import Store, open_store
from system.crash.single import contents, each_death, leftovers, life

Clone = Callable[..., Store]


@pytest.fixture
def clone(seaweed: SeaweedFS) -> Clone:
    """Makes a fresh store, with all that another one holds."""

    def make(copy_of: Store | None = None) -> Store:
        store = open_store(seaweed.url(fresh()))
        for key in copy_of.list() if copy_of else ():
            store.put(key, copy_of.get(key))
        return store

    return make


def recovers(monkeypatch: pytest.MonkeyPatch, store: Store, before: dict[int, float]) -> None:
    """The next run saves, and sweeps what the dead one left."""
    life(monkeypatch, store, [(9, 9.0)])
    assert contents(store) == {**before, 9: 9.0}
    assert leftovers(store) == []


@pytest.mark.soak
def test_a_save(monkeypatch: pytest.MonkeyPatch, clone: Clone) -> None:
    base = clone()
    life(monkeypatch, base, [(1, 1.0), (2, 2.0)])
    outcomes = set()
    for when, store in each_death(base, lambda s: life(monkeypatch, s, [(3, 3.0)]), clone):
        found = contents(store)
        assert found in ({1: 1.0, 2: 2.0}, {1: 1.0, 2: 2.0, 3: 3.0}), when
        outcomes.add(3 in found)
        recovers(monkeypatch, store, found)
    assert outcomes == {True, False}


@pytest.mark.soak
def test_a_repeated_save(monkeypatch: pytest.MonkeyPatch, clone: Clone) -> None:
    base = clone()
    life(monkeypatch, base, [(1, 1.0), (2, 2.0)])
    outcomes = set()

    def live(store: Store) -> None:
        life(monkeypatch, store, [(2, 20.0)], anew=True)

    for when, store in each_death(base, live, clone):
        found = contents(store)
        assert found in ({1: 1.0, 2: 2.0}, {1: 1.0, 2: 20.0}), when
        outcomes.add(found[2])
        recovers(monkeypatch, store, found)
    assert outcomes == {2.0, 20.0}


@pytest.mark.soak
def test_a_save_that_prunes(monkeypatch: pytest.MonkeyPatch, clone: Clone) -> None:
    base, keep = clone(), Keep(last=1)
    life(monkeypatch, base, [(s, float(s)) for s in (1, 2, 3)])
    outcomes = set()

    def live(store: Store) -> None:
        life(monkeypatch, store, [(5, 5.0)], keep=keep)

    for when, store in each_death(base, live, clone):
        found = contents(store)
        assert found and max(found) in (3, 5), when
        if 5 not in found:
            assert set(found) == {1, 2, 3}, f"pruned before the commit, {when}"
        outcomes.add(tuple(found))
        life(monkeypatch, store, [(9, 9.0)], keep=keep)
        assert contents(store) == {9: 9.0}
        assert leftovers(store) == []
    assert {(1, 2, 3), (1, 2, 3, 5), (5,)} <= outcomes


@pytest.mark.soak
def test_a_claim(monkeypatch: pytest.MonkeyPatch, clone: Clone) -> None:
    """A run that claims the root and ends: it changes no step, and numbers are never used twice."""
    base = clone()
    life(monkeypatch, base, [(1, 1.0)])
    lives = each_death(base, lambda s: life(monkeypatch, s, []), clone, least=3)
    for when, store in lives:
        assert contents(store) == {1: 1.0}, when
        recovers(monkeypatch, store, {1: 1.0})
        claim = max(store.list("claims/"))
        assert claim in ("claims/0000000002.json", "claims/0000000003.json"), when
