"""What a run remembers of a root may be old: it orders steps by it, and reads again what it deletes."""

from __future__ import annotations

import pytest

from holdfast import Keep
from holdfast.core.checkpoint.names import Known, RootKeys, Saved, manifest_key, read_manifest
from holdfast.core.checkpoint.pruning import prune
from holdfast.core.checkpoint.verifying import verify
from holdfast.store import Store
from holdfast.testing import Counting
from system.crash.single import memory
from system.crash.test_sweeping import put_image, step


def remembered(store: Store, *steps: int) -> Known:
    """What a run knows that has committed some steps, the last one last."""
    known = Known()
    for number in steps:
        step(store, number)
        known.begin(number)
        known.add(read_manifest(store, number))
    return known


def tidied(store: Store, known: Known, last: int = 1) -> list[int]:
    with RootKeys(store, known) as keys:
        return prune(store, Keep(last=last), keys=keys)


def images(store: Store, number: int) -> list[str]:
    return [key for key in store.list(f"steps/{number:010d}/") if not key.endswith("json")]


def test_what_is_known_is_not_read_again() -> None:
    store = Counting(memory())
    known = remembered(store, 1, 2, 3)
    store.calls.clear()
    assert tidied(store, known) == [1, 2]
    assert store.calls == {"list": 1, "get": 2, "delete": 2, "delete_many": 1}


@pytest.mark.parametrize("cut", [0, 20])
def test_a_manifest_that_was_damaged_since_stays(cut: int) -> None:
    store = memory()
    known = remembered(store, 1, 2, 3)
    store.put(manifest_key(2), store.get(manifest_key(2))[:cut])
    before = store.list("steps/0000000002/")
    assert tidied(store, known) == [1]
    assert store.list("steps/0000000002/") == before


def test_a_copied_folder_stays() -> None:
    """Its manifest is of another step, which the run has not known."""
    store = memory()
    known = remembered(store, 1, 2, 3)
    store.put(manifest_key(9), store.get(manifest_key(1)))
    assert tidied(store, known) == [1, 2]
    assert store.get(manifest_key(9))


def test_of_a_step_that_another_process_replaced_the_new_files_go() -> None:
    """Those that its manifest names now, and that it has put since the steps were listed."""
    store = memory()
    known = remembered(store, 1, 2)
    with RootKeys(store, known) as keys:
        old = images(store, 1)
        step(store, 1, value=2.0)
        new = sorted({*images(store, 1)} - {*old})
        assert new
        assert prune(store, Keep(last=1), keys=keys) == [1]
    assert images(store, 1) == old  # of an attempt that no manifest names: to be swept


def test_a_step_that_another_process_deleted_is_not_counted() -> None:
    store = memory()
    known = remembered(store, 1, 2, 3)
    store.delete(manifest_key(2))
    assert tidied(store, known, last=2) == []
    assert tidied(store, known) == [1]


def test_the_newest_good_step_stays_if_the_last_one_has_lost_its_files() -> None:
    store = memory()
    known = remembered(store, 1, 2, 3)
    for key in images(store, 3):
        store.delete(key)
    assert tidied(store, known) == [1]
    assert verify(store, 2).good


def test_a_step_is_not_known_while_its_commit_is_under_way() -> None:
    """Nor if nobody knows how it has ended: what was read meanwhile may be the manifest before."""
    store = memory()
    known = remembered(store, 1, 2)
    known.begin(1)
    known.learn([Saved(1, 1), Saved(1, 2)])
    assert known.among([1, 2]) == {2: Saved(1, 2)}
    assert [saved.step for saved in RootKeys(store, known).saved] == [1, 2]
    assert known.among([1, 2]) == {2: Saved(1, 2)}
    known.add(read_manifest(store, 1))
    assert known.among([1, 2]) == {1: Saved(1, 1), 2: Saved(1, 2)}


def test_what_was_deleted_is_forgotten() -> None:
    known = remembered(memory(), 1, 2)
    assert known.among([2]) == known.among([1, 2]) == {2: Saved(1, 2)}


def test_sweeping_takes_an_only_attempt_for_the_one_that_is_named() -> None:
    """And proves it where there is another one."""
    from holdfast.core.checkpoint.claiming import Claim
    from holdfast.core.checkpoint.tidying import sweep

    store = Counting(memory())
    step(store, 1)
    step(store, 2)
    mine = Claim(9, "", "", 0, "", "", "")
    left = put_image(store, 2, "0001-000099")
    store.calls.clear()
    assert sweep(store, mine, 99) == ["0001-000099"]
    assert left not in store.list("steps/")
    assert store.calls["get"] == 1 and store.calls["read"] == 0
    assert verify(store, 1).good and verify(store, 2).good
