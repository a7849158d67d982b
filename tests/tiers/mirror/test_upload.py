"""A home behind the root: what is committed in the one comes to lie in the other, and is found there."""

from __future__ import annotations

import threading
import time

import pytest

import holdfast
from holdfast import Keep, events
from holdfast.core.checkpoint.names import manifest_key, read_manifest, step_prefix
from holdfast.core.checkpoint.notes import read_notes
from holdfast.core.checkpoint.pruning import delete_step
from holdfast.errors import NotFound, StoreError, Unavailable, UsageError
from holdfast.store import LocalStore, open_store
from holdfast.testing import Faulty, Slow
from holdfast.testing.wrappers import Operation, Wrapper
from holdfast.tiers.mirror import upload as uploading
from system.crash.single import contents, leftovers, state_of
from tiers.mirror.homes import Homes, store_like, until


def images_of(store, step):
    manifest = read_manifest(store, step)
    return [step_prefix(step) + f.path for f in manifest.files]


# -- what comes to lie behind --------------------------------------------------------------------


def test_both_homes_have_the_same_bytes(monkeypatch) -> None:
    homes = Homes()
    with homes.run(monkeypatch) as run:
        for step in (1, 2):
            run.save_and_upload(step)
    keys = homes.root.list("steps/")
    assert keys == homes.behind.list("steps/") and len(keys) == 4
    assert all(homes.root.get(key) == homes.behind.get(key) for key in keys)
    assert contents(homes.behind) == {1: 1.0, 2: 2.0}
    assert homes.told == []


def test_each_home_keeps_what_its_own_keep_says(monkeypatch) -> None:
    homes = Homes()
    with homes.run(monkeypatch, keep=Keep(last=1), upload_keep=Keep(last=2, every=3)) as run:
        for step in range(1, 8):
            run.save_and_upload(step)
    assert contents(homes.root) == {7: 7.0}
    assert contents(homes.behind) == {3: 3.0, 6: 6.0, 7: 7.0}


def test_a_step_that_is_saved_anew_is_replaced_behind(monkeypatch) -> None:
    homes = Homes()
    with homes.run(monkeypatch) as run:
        run.save_and_upload(5)
        run.save_and_upload(5, 50.0)
    assert contents(homes.behind) == {5: 50.0}
    assert leftovers(homes.behind) == []


def test_a_directory_behind_a_bucket(monkeypatch, tmp_path) -> None:
    """Which of the two is which is for the user to say."""
    homes = Homes(behind=LocalStore(tmp_path / "copy"))
    with homes.run(monkeypatch) as run:
        run.save_and_upload(1)
    assert contents(homes.behind) == {1: 1.0}


def test_close_waits_for_the_newest_step(monkeypatch) -> None:
    homes = Homes(behind=Slow(store_like(), 0.05))
    with homes.run(monkeypatch) as run:
        save = run.save(1)
        assert not save.uploaded
    assert save.uploaded
    assert contents(homes.behind.inner) == {1: 1.0}


def test_neither_the_call_nor_wait_waits_for_the_upload(monkeypatch) -> None:
    gate = threading.Event()
    homes = Homes(behind=Held(store_like(), gate))
    with homes.run(monkeypatch) as run:
        save = run.save(1)
        run.ckpt.wait()
        run.save(2)
        assert not save.uploaded
        gate.set()
    assert 2 in contents(homes.behind.inner)


def test_what_waits_is_the_newest_alone(monkeypatch) -> None:
    gate = threading.Event()
    homes, skipped = Homes(behind=Held(store_like(), gate)), []
    with (
        events.listen(lambda e: skipped.append(e.fields["step"]) if "skipped" in e.name else None),
        homes.run(monkeypatch, keep=Keep(last=2)) as run,
    ):
        run.save(1)
        until(lambda: homes.behind.is_held)
        for step in (2, 3, 4, 5):
            run.save(step)
        gate.set()
    found = contents(homes.behind.inner)
    assert set(found) == {1, 5}  # step 1 stays in the root until it is uploaded
    assert set(contents(homes.root)) == {4, 5}
    assert skipped == [2, 3, 4]
    assert len([text for text in homes.told if "when a newer one came" in text]) == 1


class Held(Wrapper):
    """A store whose images are created only after a gate has opened."""

    def __init__(self, inner, gate) -> None:
        super().__init__(inner)
        self.gate = gate
        self.is_held = False

    def around(self, operation: Operation, call):
        if operation.name == "create":
            self.is_held = True
            assert self.gate.wait(300)
        return call()


def test_memory_is_bounded_by_a_part(monkeypatch) -> None:
    """An image of many parts is never in memory as a whole: one part after the other."""
    monkeypatch.setattr("holdfast.core.checkpoint.transfer.COPY_PART_BYTES", 4096)
    homes = Homes(behind=Watched(store_like()))
    with homes.run(monkeypatch) as run:
        run.save_and_upload(1)
    image = images_of(homes.root, 1)[0]
    parts = [o for o in homes.behind.operations if o.name == "write" and o.key == image]
    assert len(parts) == -(-homes.root.size(image) // 4096) > 2
    assert max(o.num_bytes for o in parts) == 4096


class Watched(Wrapper):
    """A store that notes its operations."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.operations: list[Operation] = []

    def around(self, operation: Operation, call):
        self.operations.append(operation)
        return call()


# -- a restart -----------------------------------------------------------------------------------


def test_a_root_that_is_gone_is_restored_from_behind(monkeypatch) -> None:
    homes = Homes()
    with homes.run(monkeypatch) as run:
        run.save_and_upload(3)
    homes.root = store_like()
    with homes.run(monkeypatch) as run:
        restored = run.ckpt.restore()
        assert (restored, restored.tier, run.value) == (3, "upload", 3.0)
        run.save_and_upload(4)
    assert contents(homes.root) == {4: 4.0}
    assert contents(homes.behind) == {3: 3.0, 4: 4.0}
    assert read_manifest(homes.root, 4).run == 2  # a number above those of either home
    assert homes.told == []


def test_a_tuned_run_is_restored_from_behind(monkeypatch) -> None:
    """What that took is no cost of the root's."""
    homes = Homes()
    with homes.run(monkeypatch, every=holdfast.Auto()) as run:
        run.save_and_upload(3)
    homes.root = store_like()
    with homes.run(monkeypatch, every=holdfast.Auto()) as run:
        assert run.ckpt.restore().tier == "upload"
    assert homes.told == []


def test_the_root_comes_first_where_both_have_the_newest(monkeypatch) -> None:
    homes = Homes()
    with homes.run(monkeypatch) as run:
        run.save_and_upload(3)
    with homes.run(monkeypatch) as run:
        assert run.ckpt.restore().tier == "durable"


def test_the_newest_counts_wherever_it_lies(monkeypatch) -> None:
    homes = Homes()
    with homes.run(monkeypatch, upload_keep=Keep(last=1)) as run:
        run.save_and_upload(3)
        behind, old = store_like(homes.behind), store_like(homes.root)
        run.save_and_upload(4)
    newest = Homes(homes.root, behind)  # the upload of step 4 did not come to its end
    with newest.run(monkeypatch) as run:
        assert (run.ckpt.restore(), run.value) == (4, 4.0)
    old_root = Homes(old, homes.behind)  # a root that was put back from a backup
    with old_root.run(monkeypatch) as run:
        restored = run.ckpt.restore()
        assert (restored, restored.tier, run.value) == (4, "upload", 4.0)


@pytest.mark.parametrize("asked", [None, 3])
def test_of_a_damaged_step_the_copy_behind_is_taken(monkeypatch, asked) -> None:
    homes = Homes()
    with homes.run(monkeypatch) as run:
        run.save_and_upload(2)
        run.save_and_upload(3)
    image = images_of(homes.root, 3)[0]
    data = bytearray(homes.root.get(image))
    data[len(data) // 2] ^= 1
    homes.root.put(image, data)
    with homes.run(monkeypatch) as run:
        restored = run.ckpt.restore(asked)
        assert (restored, restored.tier, run.value) == (3, "upload", 3.0)
    assert [text for text in homes.told if text.startswith("step 3 cannot be used")]


def test_of_a_damaged_step_behind_the_older_one_in_the_root_is_taken(monkeypatch) -> None:
    homes = Homes()
    with homes.run(monkeypatch) as run:
        run.save_and_upload(2)
        run.save_and_upload(3)
    delete_step(homes.root, 3)
    homes.behind.put(images_of(homes.behind, 3)[0], b"damaged")
    with homes.run(monkeypatch) as run:
        restored = run.ckpt.restore()
        assert (restored, restored.tier, run.value) == (2, "durable", 2.0)
    assert [text for text in homes.told if f"step 3 in {homes.behind.url} cannot be" in text]


def test_a_step_that_is_nowhere_is_told_of_both_homes(monkeypatch) -> None:
    homes = Homes()
    with homes.run(monkeypatch) as run:
        run.save_and_upload(3)
    homes.root = store_like()
    with homes.run(monkeypatch) as run, pytest.raises(NotFound) as failed:
        run.ckpt.restore(7)
    assert f"steps there: none; in {homes.behind.url}: 3" in str(failed.value)


def test_what_the_run_before_left_is_uploaded(monkeypatch) -> None:
    """It has died, or had no home behind its root."""
    homes = Homes()
    with homes.run(monkeypatch, upload=None) as run:
        run.save(1)
        run.save(2)
    with homes.run(monkeypatch) as run:
        assert run.ckpt.restore() == 2
    assert contents(homes.behind) == {2: 2.0}


def test_two_empty_homes(monkeypatch) -> None:
    homes = Homes()
    with homes.run(monkeypatch) as run:
        assert not run.ckpt.restore().found
    assert homes.behind.list("steps/") == []


# -- what fails ----------------------------------------------------------------------------------


class Away(Wrapper):
    """A store that does not answer while it is away."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.is_away = False
        self.asked = 0

    def around(self, operation: Operation, call):
        if self.is_away:
            self.asked += 1
            raise Unavailable(f"{self.url} does not answer")
        return call()


def test_a_store_that_is_gone_and_comes_back(monkeypatch) -> None:
    monkeypatch.setattr(uploading, "PAUSE_S", 0.05)
    homes = Homes(behind=Away(store_like()))
    with homes.run(monkeypatch, keep=Keep(last=1)) as run:
        run.save_and_upload(1)
        homes.behind.is_away = True
        for step in (2, 3, 4):  # saves go on
            last = run.save(step)
        until(lambda: homes.behind.asked > 3)
        homes.behind.is_away = False
        until(lambda: last.uploaded)
    assert contents(homes.root) == {4: 4.0}
    assert contents(homes.behind.inner) == {1: 1.0, 4: 4.0}
    assert leftovers(homes.behind.inner) == []
    assert len([t for t in homes.told if "training and saves go on" in t]) == 1
    assert len([t for t in homes.told if "go on, after" in t and "step 4 lies there" in t]) == 1


def test_a_store_that_is_gone_at_the_end_is_told(monkeypatch) -> None:
    homes = Homes(behind=Away(store_like()))
    with homes.run(monkeypatch) as run:
        run.save_and_upload(1)
        homes.behind.is_away = True
        began = time.monotonic()
        run.save(2)
    assert time.monotonic() - began < 3000
    told = [t for t in homes.told if t.startswith("step 2 is not uploaded to")]
    assert len(told) == 1 and "does not answer" in told[0]
    homes.behind.is_away = False
    with homes.run(monkeypatch) as run:
        pass
    assert contents(homes.behind.inner) == {1: 1.0, 2: 2.0}


@pytest.mark.parametrize("comes_back", [False, True])
def test_metrics_that_are_noted_while_the_store_is_gone(comes_back: bool, monkeypatch) -> None:
    """They are there once it is back, at the latest when the run ends; or it is told."""
    homes = Homes(behind=Away(store_like()))
    with homes.run(monkeypatch) as run:
        run.save_and_upload(1)
        homes.behind.is_away = True
        run.ckpt.metrics(1, loss=0.5)
        until(lambda: homes.behind.asked)
        homes.behind.is_away = not comes_back
    homes.behind.is_away = False
    noted = read_notes(homes.behind).metrics
    assert (1 in noted) == comes_back
    told = [
        text for text in homes.told if "labels and metrics that changed last are not in" in text
    ]
    assert bool(told) != comes_back


def test_close_ends_within_its_time(monkeypatch) -> None:
    gate = threading.Event()
    homes = Homes(behind=Held(store_like(), gate))
    with homes.run(monkeypatch) as run:
        run.save(1)
        began = time.monotonic()
        run.ckpt.close(1.0)
        assert time.monotonic() - began < 300
    gate.set()
    assert [t for t in homes.told if "is not uploaded" in t and "took too long" in t]


def test_close_waits_for_no_upload_where_a_rank_is_lost(monkeypatch) -> None:
    """It could not be completed without that rank, and a launcher waits for the others to leave."""
    gate = threading.Event()
    homes = Homes(behind=Held(store_like(), gate))
    with homes.run(monkeypatch) as run:
        run.save(1)
        until(lambda: homes.behind.is_held)
        monkeypatch.setattr(run.ckpt._tiers.group, "lost", "rank 1 is lost")
        closing = threading.Thread(target=run.ckpt.close, daemon=True)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()
        gate.set()
    assert [t for t in homes.told if "is not uploaded" in t and ": rank 1 is lost; it lies in" in t]


def test_errors_of_the_upload_are_never_raised(monkeypatch) -> None:
    homes = Homes(behind=Away(store_like()))
    with homes.run(monkeypatch, on_error="raise") as run:
        homes.behind.is_away = True
        run.save(1)
        until(lambda: homes.behind.asked > 0)
        run.save(2)
    assert contents(homes.root) == {1: 1.0, 2: 2.0}


def test_what_is_damaged_in_the_root_never_comes_behind(monkeypatch) -> None:
    gate = threading.Event()
    homes = Homes(behind=Held(store_like(), gate))
    with homes.run(monkeypatch) as run:
        run.save(1)
        until(lambda: homes.behind.is_held)
        image = images_of(homes.root, 1)[0]
        data = bytearray(homes.root.get(image))
        data[len(data) // 2] ^= 1
        homes.root.put(image, data)
        gate.set()
        run.save_and_upload(2)
    assert contents(homes.behind.inner) == {2: 2.0}
    assert leftovers(homes.behind.inner) == []
    assert [t for t in homes.told if "step 1 was not uploaded" in t and "newer steps will be" in t]


def test_two_runs_on_one_home_behind_are_refused(monkeypatch) -> None:
    homes, others = Homes(), Homes()
    others.behind = homes.behind
    with homes.run(monkeypatch) as run:
        run.save_and_upload(1)
        alive = "holdfast.core.checkpoint.claiming.Claim.alive_elsewhere"
        monkeypatch.setattr(alive, lambda claim: claim.started != "closed")
        with pytest.raises(UsageError, match="in use by"), others.run(monkeypatch):
            pass
        monkeypatch.undo()
        monkeypatch.setattr(holdfast.live.roots, "open_store", homes.open)
        run.save_and_upload(2)
    assert others.root.list("claims/") == []


def test_who_loses_the_home_behind_uploads_no_more(monkeypatch) -> None:
    homes, others = Homes(), Homes()
    others.behind = homes.behind
    with homes.run(monkeypatch) as run:
        run.save_and_upload(1)
        with others.run(monkeypatch) as other:  # as from another host, whose life cannot be seen
            assert other.ckpt.restore() == 1
            other.save_and_upload(7)
        run.save(2)
        until(lambda: run.ckpt._tiers.get("upload")._has_ended)
        run.save(3)
    assert contents(homes.root) == {1: 1.0, 2: 2.0, 3: 3.0}
    assert contents(homes.behind) == {1: 1.0, 7: 7.0}
    assert [t for t in homes.told if "taken over by" in t and "uploads no more" in t]


def test_a_store_that_cannot_be_claimed_is_told_at_the_start(monkeypatch) -> None:
    homes = Homes(behind=Faulty(store_like(), lambda op, key: StoreError("forbidden")))
    with pytest.raises(StoreError), homes.run(monkeypatch):
        pass
    assert homes.root.list("claims/") == []


# -- arguments -----------------------------------------------------------------------------------


def test_the_home_behind_must_be_apart(tmp_path) -> None:
    for upload in (tmp_path / "run", tmp_path / "run" / "copy", tmp_path):
        with pytest.raises(UsageError, match="one inside the other, or are the same"):
            holdfast.Checkpointer(tmp_path / "run", {"a": 1}, upload=upload)
    with pytest.raises(UsageError, match="upload_keep"):
        holdfast.Checkpointer(tmp_path / "run", {"a": 1}, upload_keep=Keep(last=1))


def test_a_run_that_went_back_uploads_under_its_new_number(monkeypatch) -> None:
    homes = Homes()
    with homes.run(monkeypatch) as run:
        for step in (1, 2, 3):
            run.save_and_upload(step)
        run.ckpt.restore(1)
        run.save_and_upload(2, 20.0)
    assert contents(homes.behind) == {1: 1.0, 2: 20.0, 3: 3.0}
    with homes.run(monkeypatch) as run:
        assert (run.ckpt.restore(), run.value) == (2, 20.0)


def test_a_step_that_a_script_saved_anew_is_uploaded_by_the_next_run(monkeypatch) -> None:
    """It has the run and the number of the one behind."""
    homes = Homes()
    with homes.run(monkeypatch) as run:
        run.save_and_upload(20, 1.0)
        run.state["data"].update(state_of(2.0)["data"])
    holdfast.save(homes.root.url, run.state, step=20)
    assert (contents(homes.root), contents(homes.behind)) == ({20: 2.0}, {20: 1.0})
    with homes.run(monkeypatch) as run:
        assert run.ckpt.restore() == 20
    assert contents(homes.behind) == {20: 2.0}


def test_a_label_does_not_come_to_name_another_runs_step_behind(monkeypatch) -> None:
    gate = threading.Event()
    gate.set()
    homes = Homes(behind=Held(store_like(), gate))
    with homes.run(monkeypatch) as run:
        run.save_and_upload(10)
        run.save_and_upload(20)
        run.ckpt.pin(20, "tried")
        run.ckpt.restore(10)
        gate.clear()
        homes.behind.is_held = False
        run.save(15)
        until(lambda: homes.behind.is_held)
        run.save(20, 200.0)  # which is not uploaded: a newer one comes
        last = run.save(30)
        run.ckpt.pin(20, "best")
        gate.set()
        until(lambda: last.uploaded)
    assert contents(homes.behind.inner) == {10: 10.0, 15: 15.0, 20: 20.0, 30: 30.0}
    assert read_notes(homes.root).live_labels == {"best": 20}
    assert "best" not in read_notes(homes.behind).live_labels
    assert [text for text in homes.told if "had the label 'tried'" in text]


def test_a_run_that_goes_back_during_an_upload_uploads_on(monkeypatch) -> None:
    gate = threading.Event()
    gate.set()
    homes = Homes(behind=Held(store_like(), gate))
    with homes.run(monkeypatch) as run:
        for step in (1, 2):
            run.save_and_upload(step)
        gate.clear()
        homes.behind.is_held = False
        run.save(3)
        until(lambda: homes.behind.is_held)
        run.ckpt.restore(1)
        gate.set()
        run.save_and_upload(2, 20.0)
    assert contents(homes.behind.inner) == {1: 1.0, 2: 20.0, 3: 3.0}
    assert not [text for text in homes.told if "uploads no more" in text]


def test_a_script_that_only_ends_has_its_step_uploaded(tmp_path) -> None:
    """Python's end waits for what has begun."""
    import subprocess
    import sys

    code = (
        "import sys, torch, holdfast\n"
        "ckpt = holdfast.Checkpointer(sys.argv[1], {'t': {'a': torch.ones(9)}}, upload=sys.argv[2])\n"
        "ckpt.save(1)\n"
    )
    root, behind = tmp_path / "root", tmp_path / "behind"
    subprocess.run([sys.executable, "-c", code, str(root), str(behind)], check=True)
    assert holdfast.steps(behind) == [1]
    assert open_store(behind).get(manifest_key(1)) == open_store(root).get(manifest_key(1))
