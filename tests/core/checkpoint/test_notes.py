"""Labels and metrics of a root: who writes at once, what is damaged, and what stays because of them."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.checkpoint import notes
from holdfast.cli.main import run
from holdfast.core.checkpoint.names import manifest_key
from holdfast.core.checkpoint.pruning import delete_step, prunable, prune
from holdfast.errors import Corrupt, FormatError, HoldfastError, NotFound, StoreError, UsageError
from holdfast.live.saving.steps import RootSteps
from holdfast.store import LocalStore, MemoryStore, Store, open_store
from holdfast.testing import Faulty


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path) -> Store:
    if request.param == "local":
        return open_store(str(tmp_path / "run"))
    return open_store(f"memory://{uuid.uuid4().hex}")


def saved(store: Store, steps: range | list[int]) -> None:
    """By somebody who knows of no labels."""
    for step in steps:
        holdfast.save(store.url, {"x": torch.ones(3)}, step=step)


def losses(store: Store, values: dict[int, float]) -> None:
    for step, loss in values.items():
        notes.measure(store, step, notes.metrics_of({"loss": loss}, "test"), coming={})


# -- labels ---------------------------------------------------------------------------------------


def test_a_pinned_step_stays(root: Store) -> None:
    saved(root, range(1, 6))
    with holdfast.Checkpointer(root.url, {"x": torch.ones(3)}, keep=holdfast.Keep(last=1)) as ckpt:
        ckpt.restore()
        ckpt.pin(2, "best")
        ckpt.save(6).wait(300)
        ckpt._tiers.durable.settle(60)
        assert holdfast.steps(root.url) == [2, 6]
        ckpt.pin(6, "best")
        ckpt.save(7).wait(300)
        ckpt._tiers.durable.settle(60)
        assert holdfast.steps(root.url) == [6, 7]
        ckpt.unpin("best")
        ckpt.unpin("never was")
        ckpt.save(8)
    assert holdfast.steps(root.url) == [8]


def test_a_save_in_flight_is_pinned(tmp_path) -> None:
    url = str(tmp_path)
    with holdfast.Checkpointer(url, {"x": torch.ones(1 << 20)}, keep=holdfast.Keep(last=1)) as ckpt:
        for step in range(1, 6):
            ckpt.save(step)
            if step == 2:
                ckpt.pin(step, "best")
    assert holdfast.steps(url) == [2, 5]


class Held:
    """A store that lets the saves of some steps write only when they may."""

    def __init__(self, path, monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
        self.gates = {f"{step:010}": threading.Event() for step in steps}
        self.failing: set[int] = set()
        self.store = Faulty(open_store(str(path)), self._hold)
        monkeypatch.setattr("holdfast.live.roots.open_store", lambda url: self.store)

    def _hold(self, op: str, key: str) -> Exception | None:
        for step, gate in self.gates.items():
            if op == "create" and step in key:
                assert gate.wait(300)
                return StoreError("the disk is gone") if int(step) in self.failing else None
        return None

    def hold(self, step: int) -> None:
        self.gates[f"{step:010}"].clear()

    def let(self, step: int, *, fail: bool = False) -> None:
        if fail:
            self.failing.add(step)
        self.gates[f"{step:010}"].set()

    @property
    def labels(self) -> dict[str, int | None]:
        return notes.read_notes(self.store).labels


@pytest.mark.parametrize("fails", [True, False])
def test_a_label_of_a_save_in_flight_keeps_the_former_step(
    tmp_path, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The label moves when the save is committed; if that fails, it stays, and says so."""
    held = Held(tmp_path, monkeypatch, 200)
    keep = holdfast.Keep(last=1)
    with holdfast.Checkpointer(
        str(tmp_path), {"x": torch.ones(3)}, keep=keep, on_error="warn"
    ) as ckpt:
        ckpt.save(100).wait(300)
        ckpt.pin(100, "best")
        save = ckpt.save(200)
        ckpt.pin(200, "best")
        assert held.labels == {"best": 100}
        held.let(200, fail=fails)
        if fails:
            with pytest.raises(HoldfastError):
                save.wait(300)
            told = "the label 'best' does not move to step 200, whose save failed or was left out"
            with pytest.warns(holdfast.HoldfastWarning, match=told):
                ckpt.wait()
        else:
            save.wait(300)
        expected = 100 if fails else 200
        assert held.labels == {"best": expected}
        ckpt.save(300).wait(300)
        ckpt._tiers.durable.settle(60)
        assert holdfast.steps(str(tmp_path)) == [expected, 300]
        assert held.labels == {"best": expected}


@pytest.mark.parametrize("fails", [True, False])
def test_a_step_that_is_committed_has_its_label_though_it_is_being_saved_again(
    tmp_path, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The label is written at once, so it keeps the step whatever becomes of the second save."""
    held = Held(tmp_path, monkeypatch, 200)
    held.let(200)
    with holdfast.Checkpointer(
        str(tmp_path), {"x": torch.ones(3)}, keep=holdfast.Keep(last=1), on_error="warn"
    ) as ckpt:
        ckpt.save(200).wait(300)
        held.hold(200)
        again = ckpt.save(200)
        ckpt.pin(200, "best")
        assert held.labels == {"best": 200}
        held.let(200, fail=fails)
        with contextlib.suppress(HoldfastError):
            again.wait(300)
        ckpt.save(300).wait(300)
        ckpt._tiers.durable.settle(60)
        assert held.labels == {"best": 200}
        assert holdfast.steps(str(tmp_path)) == [200, 300]


def test_a_step_whose_handle_has_not_ended_has_its_label(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another save of it, which is left out, does not take the label away."""
    there, gate, commit = threading.Event(), threading.Event(), RootSteps.commit

    def held(self: RootSteps, op: Any, make: Any) -> Any:
        found = commit(self, op, make)
        there.set()
        gate.wait(300)
        return found

    monkeypatch.setattr(RootSteps, "commit", held)
    with holdfast.Checkpointer(
        str(tmp_path), {"x": torch.ones(3)}, every=100, when_busy="skip"
    ) as ckpt:
        ckpt.save(200)
        assert there.wait(300)
        ckpt.step(200)  # which is left out
        ckpt.pin(200, "best")
        ckpt._tiers.saver.settle(60)
        gate.set()
        ckpt.wait()
    assert notes.read_notes(open_store(str(tmp_path))).live_labels == {"best": 200}


def test_a_label_stays_where_another_save_of_its_step_is_left_out(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(tmp_path, monkeypatch, 200)
    state = {"x": torch.ones(3)}
    with holdfast.Checkpointer(str(tmp_path), state, every=100, when_busy="skip") as ckpt:
        ckpt.save(100).wait(300)
        ckpt.pin(100, "best")
        first = ckpt.save(200)
        ckpt.pin(200, "best")
        ckpt.step(200)  # which is left out
        ckpt._tiers.saver.settle(60)
        ckpt._tiers.durable.steps.worker.settle(60)
        held.let(200)
        first.wait(300)
        ckpt.wait()
        assert held.labels == {"best": 200}


@pytest.mark.parametrize("is_taken_away", [True, False])
def test_a_label_that_moves_or_goes_meanwhile(
    tmp_path, is_taken_away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(tmp_path, monkeypatch, 200)
    with holdfast.Checkpointer(str(tmp_path), {"x": torch.ones(3)}) as ckpt:
        for step in (100, 150):
            ckpt.save(step).wait(300)
        ckpt.pin(100, "best")
        ckpt.save(200)
        ckpt.pin(200, "best")
        if is_taken_away:
            ckpt.unpin("best")
        else:
            ckpt.pin(150, "best")
        held.let(200)
        ckpt.wait()
    assert held.labels == {"best": None if is_taken_away else 150}


def test_labels_are_written_with_the_commit(root: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written for a label before; several go in one write; one that cannot be is told."""
    writes = list[str]()

    def fail(op: str, key: str) -> Exception | None:
        if op == "put" and key.endswith(("manifest.json", "notes.json")):
            writes.append(key.rpartition("/")[2])
            if len(writes) == 4:
                return StoreError("the disk is gone")
        return None

    store = Faulty(root, fail)
    monkeypatch.setattr("holdfast.live.roots.open_store", lambda url: store)
    with holdfast.Checkpointer(root.url, {"x": torch.ones(1 << 20)}) as ckpt:
        steps = ckpt._tiers.durable.steps
        with steps.committing:
            save = ckpt.save(1)
            for label in ("best", "first"):
                ckpt.pin(1, label)
        save.wait(300)
        assert writes == ["manifest.json", "notes.json"]
        assert notes.read_notes(root).labels == {"best": 1, "first": 1}
        with steps.committing:
            save = ckpt.save(2)
            ckpt.pin(2, "best")
        save.wait(300)
        with pytest.warns(holdfast.HoldfastWarning, match="not labelled 'best': the disk"):
            ckpt.wait()
    assert notes.read_notes(root).labels == {"best": 1, "first": 1}
    assert holdfast.steps(root.url) == [1, 2]


def left_by_an_earlier_version(store: Store) -> None:
    """It gave a label to a save under way, and was killed."""
    notes.pin(store, 100, "best")
    early = {"best": 200, "best (before 200)": 100}
    notes.change(store, lambda n: notes.with_labels(n, early))


def test_a_label_that_an_earlier_version_gave_to_a_save_that_never_ended(
    root: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run's step of that number does not get it; one that is given to that meanwhile stays."""
    saved(root, [100, 150])
    left_by_an_earlier_version(root)

    def watch(op: str, key: str) -> None:
        """Pin the step from outside as soon as it is committed."""
        if op == "get" and key == notes.NOTES_KEY and 200 in holdfast.steps(root.url):
            if "seen" not in notes.read_notes(root).labels:
                notes.pin(root, 200, "seen")

    store = Faulty(root, watch)
    monkeypatch.setattr("holdfast.live.roots.open_store", lambda url: store)
    with holdfast.Checkpointer(root.url, {"x": torch.ones(3)}, keep=holdfast.Keep(last=1)) as ckpt:
        assert ckpt.restore() == 150
        ckpt.save(200).wait(300)
        with pytest.warns(holdfast.HoldfastWarning, match="step 200 had .*'best'.* is taken away"):
            ckpt.wait()
    assert notes.read_notes(root).live_labels == {"best (before 200)": 100, "seen": 200}
    assert {100, 200} <= set(holdfast.steps(root.url))


def test_a_label_that_an_earlier_version_did_not_come_to_write(root: Store) -> None:
    """It names the new step, and the second one keeps the step before until it is taken away."""
    saved(root, [100])
    left_by_an_earlier_version(root)
    saved(root, [200])
    with holdfast.Checkpointer(root.url, {"x": torch.ones(3)}, keep=holdfast.Keep(last=1)) as ckpt:
        assert ckpt.restore() == 200
        ckpt.save(300).wait(300)
        ckpt._tiers.durable.settle(60)
        assert holdfast.steps(root.url) == [100, 200, 300]
        assert notes.read_notes(root).pinned == {100: ["best (before 200)"], 200: ["best"]}
        ckpt.unpin("best (before 200)")
        ckpt.save(400).wait(300)
        ckpt._tiers.durable.settle(60)
        assert holdfast.steps(root.url) == [200, 400]


def test_what_is_not_there_is_not_pinned(root: Store) -> None:
    with holdfast.Checkpointer(root.url, {"x": torch.ones(3)}) as ckpt:
        ckpt.save(3).wait(300)
        with pytest.raises(NotFound, match=r"(?s)no step 4 .*steps there: 3"):
            ckpt.pin(4, "best")
        with pytest.raises(NotFound, match="no step 4"):
            ckpt.metrics(4, loss=1.0)
        for label in ("", "a\nb", "x" * 101, " ", 3, None):
            with pytest.raises(UsageError, match="label"):
                ckpt.pin(3, label)  # type: ignore[arg-type]
    assert notes.read_notes(root).pinned == {}


def test_two_writers_lose_no_label(root: Store) -> None:
    saved(root, range(1, 9))

    def write(step: int) -> None:
        for number in range(5):
            notes.pin(open_store(root.url), step, f"{step}-{number}")

    writers = [threading.Thread(target=write, args=(step,)) for step in range(1, 9)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(300)
    found = notes.read_notes(root)
    assert found.pinned == {s: [f"{s}-{n}" for n in range(5)] for s in range(1, 9)}


def test_damaged_notes_delete_nothing(root: Store) -> None:
    saved(root, [1, 2, 3])
    notes.pin(root, 1, "best")
    whole = root.get(notes.NOTES_KEY)
    changed = whole.replace(b'"best":1', b'"best":9')
    unknown = notes.encode_notes(notes.Notes()).replace(b'"labels"', b'"lables"')
    for data in (b"", whole[:-5], changed, unknown, whole + b"x", b"\xff" * 100):
        root.put(notes.NOTES_KEY, data)
        with pytest.raises(HoldfastError, match="notes"):
            prunable(root, holdfast.Keep(last=1))
        with pytest.raises(HoldfastError, match="notes"):
            prune(root, holdfast.Keep(last=1))
        with pytest.raises(HoldfastError, match="notes"):
            delete_step(root, 2)
        with pytest.raises(HoldfastError, match="notes"):
            notes.pin(root, 1, "best")
        assert run(["prune", root.url, "--keep-last", "1"]) == 1
        assert run(["ls", root.url]) == 1
    root.put(notes.NOTES_KEY, changed)
    ckpt = holdfast.Checkpointer(root.url, {"x": torch.ones(3)}, keep=holdfast.Keep(last=1))
    ckpt.restore()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in (4, 5, 6):
            ckpt.save(step).wait(300)
            ckpt._tiers.durable.settle(60)
        ckpt.close()
    assert sorted(str(one.message).partition(":")[0] for one in told) == [
        "no step is deleted",
        "step 4 is saved, and what its labels are is not known",
    ]
    assert holdfast.steps(root.url) == [1, 2, 3, 4, 5, 6]
    root.delete(notes.NOTES_KEY)
    assert prune(root, holdfast.Keep(last=1)) == [1, 2, 3, 4, 5]


def test_pinned_between_the_list_and_the_deletion(root: Store) -> None:
    """Whoever deletes asks once more, if there was anything to ask for."""
    saved(root, [1, 2, 3])
    notes.pin(root, 3, "last")
    due = prunable(root, holdfast.Keep(last=1))
    notes.pin(root, 1, "best")
    assert [delete_step(root, step) for step in due] == [False, True]
    assert holdfast.steps(root.url) == [1, 3]


# -- the best, and the newer ----------------------------------------------------------------------


def test_the_best_stay(root: Store) -> None:
    saved(root, range(1, 8))
    losses(root, {1: 0.5, 2: 0.1, 3: 0.5, 4: float("nan"), 5: 0.3})
    keep = holdfast.Keep
    assert prunable(root, keep(last=1, best=("loss", 1))) == [1, 3, 4, 5, 6]
    assert prunable(root, keep(last=1, best=("loss", 2, "min"))) == [1, 3, 4, 6]
    assert prunable(root, keep(last=1, best=["loss", 1, "max"])) == [1, 2, 4, 5, 6]  # 3: newer
    assert prunable(root, keep(best=("loss", 1))) == [1, 3, 4, 5]  # 6 has none, 7 is the newest
    assert prunable(root, keep(best=("loss", 1), every=6)) == [1, 3, 4, 5]
    assert prunable(root, keep(best=("accuracy", 1))) == []
    assert prunable(root, keep(last=2, best=("accuracy", 1))) == [1, 2, 3, 4, 5]


def test_metrics_of_another_runs_step_do_not_count(root: Store) -> None:
    saved(root, [1, 2])
    losses(root, {1: 0.1, 2: 0.2})
    with holdfast.Checkpointer(root.url, {"x": torch.ones(3)}, anew=True) as ckpt:
        ckpt.save(1).wait(300)  # step 1 is the newest now, and nobody has evaluated it
    assert prunable(root, holdfast.Keep(best=("loss", 1))) == []
    with holdfast.open(root.url, step=1) as one, holdfast.open(root.url, step=2) as two:
        assert one.metrics == {} and two.metrics == {"loss": 0.2}


def test_metrics_given_with_a_save_last(root: Store) -> None:
    with holdfast.Checkpointer(
        root.url, {"x": torch.ones(3)}, keep=holdfast.Keep(best=("loss", 1))
    ) as ckpt:
        ckpt.save(1, metrics={"loss": torch.tensor(0.5), "accuracy": np.float32(0.25)})
        ckpt.save(2, metrics={"loss": 0.1})
        ckpt.metrics(2, accuracy=1)
        ckpt.save(3, metrics={"loss": float("nan")}).wait(300)
    assert holdfast.steps(root.url) == [2, 3]
    with holdfast.open(root.url, step=2) as found:
        assert found.metrics == {"loss": 0.1, "accuracy": 1.0}
    with holdfast.Checkpointer(
        root.url, {"x": torch.ones(3)}, keep=holdfast.Keep(best=("loss", 1))
    ) as ckpt:
        ckpt.restore()
        ckpt.metrics(2, loss=0.9)
        ckpt.save(4, metrics={"loss": 0.3}).wait(300)
    assert holdfast.steps(root.url) == [4]
    assert np.isnan(list(holdfast.open(root.url).metrics.values())).sum() == 0


def test_what_is_newer_stays(root: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    for step, days in ((1, 5), (2, 3), (3, 1), (4, 0)):
        at = time.gmtime(now - days * 86400)
        with monkeypatch.context() as patch:
            patch.setattr("time.gmtime", lambda at=at: at)
            saved(root, [step])
    assert prunable(root, holdfast.Keep(newer="2d")) == [1, 2]
    assert prunable(root, holdfast.Keep(newer="96h")) == [1]
    assert prunable(root, holdfast.Keep(newer="1.5m", last=2)) == [1, 2]
    assert prunable(root, holdfast.Keep(newer="1s", every=2)) == [1, 3]


def test_a_step_that_a_rule_cannot_read_stays(root: Store) -> None:
    saved(root, [1, 2, 3])
    key = "steps/0000000001/manifest.json"
    data = bytearray(root.get(key))
    data[-60] ^= 1
    root.put(key, bytes(data))
    assert prunable(root, holdfast.Keep(newer="1s", last=1)) in ([], [2])
    assert 1 not in prunable(root, holdfast.Keep(best=("loss", 1), last=1))


@pytest.mark.parametrize(
    "rule",
    [
        {"best": "loss"}, {"best": ("loss",)}, {"best": ("loss", 0)}, {"best": ("loss", True)},
        {"best": ("", 1)}, {"best": ("loss", 1, "low")}, {"best": ("loss", 1, "min", 2)},
        {"newer": "2"}, {"newer": "2 days"}, {"newer": ""}, {"newer": 2}, {"newer": "-1d"},
        {"newer": "2w"}, {"best": 3},
    ],
)  # fmt: skip
def test_rules_that_cannot_be(rule) -> None:
    with pytest.raises(UsageError, match="Keep"):
        holdfast.Keep(**rule)


@pytest.mark.parametrize("given", [{}, {"loss": "low"}, {1: 2.0}, {"": 1.0}, [1], {"a": None}, 3])
def test_metrics_that_cannot_be(given, tmp_path) -> None:
    ckpt = holdfast.Checkpointer(str(tmp_path), {"x": torch.ones(3)})
    with pytest.raises(UsageError, match="metrics"):
        ckpt.save(1, metrics=given)
    ckpt.close()
    assert holdfast.steps(str(tmp_path)) == []


# -- commands -------------------------------------------------------------------------------------


def test_commands(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    url = str(tmp_path / "run")
    saved(LocalStore(url), range(1, 5))
    assert run(["pin", url, "2", "best"]) == 0
    assert run(["pin", url, "9", "best"]) == 1
    assert run(["pin", url, "best"]) == 2
    assert run(["pin", f"{url}@1", "2", "best"]) == 2
    losses(LocalStore(url), {1: 0.25, 2: 0.5})
    capsys.readouterr()
    assert run(["ls", url, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["steps"]
    assert [row["labels"] for row in rows] == [[], ["best"], [], []]
    assert [row["metrics"] for row in rows] == [{"loss": 0.25}, {"loss": 0.5}, {}, {}]
    assert run(["ls", url]) == 0
    shown = capsys.readouterr().out
    (row,) = [line.split() for line in shown.splitlines() if "[best]" in line]
    assert shown.splitlines()[1].split()[-2:] == ["loss", "state"]
    assert row[-3:] == ["0.5", "complete", "[best]"]
    assert run(["prune", url, "--keep-last", "1", "--keep-best", "loss:1"]) == 0
    assert holdfast.steps(url) == [1, 2, 4]
    assert run(["pin", url, "--remove", "best"]) == 0
    assert run(["pin", url, "--remove", "best"]) == 1
    assert run(["prune", url, "--keep-newer", "1h"]) == 0
    assert holdfast.steps(url) == [1, 2, 4]
    assert run(["prune", url, "--keep-best", "loss:1:max"]) == 0
    assert holdfast.steps(url) == [2, 4]
    assert run(["prune", url, "--keep-best", "loss"]) == 2
    assert run(["prune", url, "--keep-best", "loss:x"]) == 2


def test_a_copy_takes_notes_along(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    url, into = str(tmp_path / "run"), str(tmp_path / "copy")
    saved(LocalStore(url), [1, 2, 3])
    notes.pin(LocalStore(url), 2, "best")
    notes.pin(LocalStore(url), 1, "first")
    losses(LocalStore(url), {2: 0.5, 3: 0.75})
    assert run(["copy", f"{url}@2", into]) == 0
    assert notes.read_notes(LocalStore(into)).labels == {"best": 2}
    assert holdfast.open(into).metrics == {"loss": 0.5}
    notes.pin(LocalStore(url), 3, "best")
    capsys.readouterr()
    assert run(["copy", url, into, "--all"]) == 0
    assert "best" in capsys.readouterr().out  # stays where it is there, and that is said
    assert notes.read_notes(LocalStore(into)).labels == {"best": 2, "first": 1}


def test_notes_damaged_on_the_way_are_not_taken_for_none(root: Store) -> None:
    saved(root, [1])
    root.put(notes.NOTES_KEY, b"{}")
    with pytest.raises(Corrupt, match="notes"):
        _ = holdfast.open(root.url).metrics
    assert isinstance(root, (LocalStore, MemoryStore))


def test_steps_that_no_run_can_make_are_refused_in_notes() -> None:
    """Numbers of one hash, of which a dict of n takes n * n steps."""
    metrics = {n * ((1 << 61) - 1): notes.Measured(0, {}) for n in (1, 2)}
    with pytest.raises(FormatError, match="Expected `int` <= 9"):
        notes.decode_notes(notes.encode_notes(notes.Notes(metrics=metrics)))


def test_pin_takes_an_address_and_words(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    url = str(tmp_path / "run")
    saved(LocalStore(url), range(1, 5))
    assert run(["pin", f"{url}@2", "good"]) == 0
    assert run(["pin", url, "newest", "last"]) == 0
    assert run(["pin", f"{url}@good", "again"]) == 0
    assert notes.read_notes(LocalStore(url)).live_labels == {"good": 2, "last": 4, "again": 2}
    assert run(["pin", url, "god", "x"]) == 1
    assert "labels there: 'again' (step 2), 'good' (step 2)" in capsys.readouterr().err


def test_a_step_that_another_process_has_deleted_is_none_to_delete(root: Store) -> None:
    saved(root, [1, 2, 3, 4])
    due = prunable(root, holdfast.Keep(last=1))
    root.delete(manifest_key(2))
    assert [delete_step(root, step) for step in due] == [True, False, True]
    assert holdfast.steps(root.url) == [4]
