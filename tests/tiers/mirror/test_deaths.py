"""Death at every change of the home behind: what lies there is whole, and the next run completes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

import holdfast
from core.store.objects.fixtures import credentials, fresh, seaweed
from core.store.objects.servers import SeaweedFS
from holdfast import Keep
from holdfast.store import Store, open_store
from holdfast.testing import StopAfter, Stopped
from system.crash.single import contents, leftovers
from tiers.mirror.homes import Homes, store_like

__all__ = ["credentials", "seaweed"]

Saves = list[tuple[int, float]]


def life(monkeypatch, homes: Homes, saves: Saves, *, anew: bool = False, **options) -> None:
    """A run that goes on from the newest step, or begins anew, and makes the saves one after the other,
    each uploaded before the next unless the home behind has died; the process itself dies at the end of the
    last."""
    monkeypatch.setattr(holdfast.live.roots, "open_store", homes.open)
    with suppress(Stopped), homes.run(monkeypatch, anew=anew, **options) as run:
        if not anew:
            run.ckpt.restore()
        for step, value in saves:
            run.save(step, value)
            upload = run.ckpt._tiers.get("upload")
            assert upload is not None
            upload._worker.settle(60)


def each_death(
    monkeypatch, base: Homes, saves: Saves, like: Callable[[Store], Store] = store_like, **options
) -> Iterator[tuple[str, Homes, Store]]:
    """The homes that are left by a death at every change of the one behind, before and after it.

    `like` makes a store with what another one holds, of the kind that is wanted behind.
    """
    whole = StopAfter(like(base.behind), None)
    life(monkeypatch, Homes(store_like(base.root), whole), saves, **options)
    assert len(whole.operations) > 5
    for n in range(1, len(whole.operations) + 1):
        for torn in (False, True):
            dying = StopAfter(like(base.behind), n, torn=torn)
            homes = Homes(store_like(base.root), dying)
            life(monkeypatch, homes, saves, **options)
            when = f"{'after' if torn else 'before'} {whole.operations[n - 1]}"
            yield when, Homes(homes.root, dying.inner), dying.inner


CASES = pytest.mark.parametrize(
    ("saves", "options", "allowed"),
    [
        ([(3, 3.0)], {}, [{2: 2.0}, {2: 2.0, 3: 3.0}]),
        ([(2, 20.0)], {"anew": True}, [{2: 2.0}, {2: 20.0}]),
        ([(3, 3.0)], {"upload_keep": Keep(last=1)}, [{2: 2.0}, {2: 2.0, 3: 3.0}, {3: 3.0}]),
    ],
    ids=["an-upload", "a-repeated-one", "one-that-prunes"],
)


@CASES
def test_at_every_change(monkeypatch, saves, options, allowed) -> None:
    dies_at_every_change(monkeypatch, saves, options, allowed, store_like)


@pytest.mark.soak
@CASES
def test_at_every_change_of_a_bucket(
    monkeypatch, seaweed: SeaweedFS, credentials, saves, options, allowed
) -> None:
    def like(copy_of: Store) -> Store:
        store = open_store(seaweed.url(fresh()))
        for key in copy_of.list():
            store.put(key, copy_of.get(key))
        return store

    dies_at_every_change(monkeypatch, saves, options, allowed, like)


def dies_at_every_change(
    monkeypatch, saves: Saves, options, allowed, like: Callable[[Store], Store]
) -> None:
    base = Homes()
    life(monkeypatch, base, [(2, 2.0)])
    seen = []
    for when, homes, behind in each_death(monkeypatch, base, saves, like, **options):
        found = contents(behind)
        assert found in allowed, when
        seen.append(found)
        newest = contents(homes.root)
        options = {**options, "anew": False}
        life(monkeypatch, homes, [], **options)  # completes what is missing
        assert contents(behind)[max(newest)] == newest[max(newest)], when
        life(monkeypatch, homes, [(9, 9.0)], **options)
        assert contents(behind)[9] == 9.0, when
        assert leftovers(behind) == [], when
    assert all(one in seen for one in allowed)


def test_a_death_after_which_the_root_is_lost(monkeypatch) -> None:
    """At most what was not uploaded yet is lost."""
    base = Homes()
    life(monkeypatch, base, [(2, 2.0)])
    reached = set()
    for when, homes, behind in each_death(monkeypatch, base, [(3, 3.0)]):
        there = contents(behind)
        homes.root = store_like()
        with homes.run(monkeypatch) as run:
            step = run.ckpt.restore()
            assert (int(step), run.value) == (max(there), there[max(there)]), when
            reached.add(int(step))
    assert reached == {2, 3}
