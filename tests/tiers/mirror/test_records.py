"""Records behind the root: when the root is lost, what lies behind is replayed, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
import zygote
from holdfast import Delta, Every
from holdfast.core.checkpoint.names import read_manifest
from holdfast.core.checkpoint.notes import read_notes
from holdfast.core.checkpoint.recorded import parse_segment
from holdfast.core.store.contract import reads_of
from holdfast.core.store.views import JoinedStore
from holdfast.errors import NotFound
from holdfast.store import LocalStore, MemoryStore
from holdfast.tiers.mirror.behind import HomeBehind
from holdfast.tiers.mirror.records import RecordUpload
from holdfast.tiers.records.log import LogStore
from soaking import cases_of
from tiers.mirror.homes import until
from tiers.mirror.train_recorded import digest_of
from tiers.records.test_exact import check_equal
from tiers.records.test_going_back import train
from tiers.records.test_offline import Plain

TESTS = Path(__file__).parents[2]


def told(place: Path) -> list[dict[str, Any]]:
    path = place / "told.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def recorded_behind(place: Path) -> list[int]:
    """The steps whose records lie behind the root, by the names of files."""
    found = [parse_segment(key) for key in LocalStore(place / "behind").list("log/")]
    return sorted({s for one in found if one for s in range(one[1], one[2] + 1)})


def begin(place: Path, *args: object) -> zygote.Program:
    place.mkdir(exist_ok=True)
    env = os.environ | {"PYTHONPATH": str(TESTS)}
    return zygote.start(["-m", "tiers.mirror.train_recorded", place, *args], env=env)


def lose_the_node(place: Path, training: zygote.Program) -> None:
    """Kill the training, and the process that writes its records, and take the root away."""
    training.kill()
    training.wait()
    for mark in (place / "root").glob("log/*/*.writing"):
        with suppress(ProcessLookupError):
            os.kill(int(mark.stem.partition("-")[2]), signal.SIGKILL)
    (place / "root").rename(place / "lost")


@pytest.mark.soak_except("steps-are-held-up")
@pytest.mark.parametrize("held", [False, True], ids=["steps-are-uploaded", "steps-are-held-up"])
def test_a_root_that_is_lost_is_replayed_from_behind(tmp_path: Path, held: bool) -> None:
    """The steps recorded behind are reached, whether the full step before them is there yet or not."""
    place = tmp_path / "run"
    training = begin(place, 100_000, 10, 0.05, *["hold"] * held)
    try:
        until(lambda: (recorded_behind(place) or [0])[-1] > 35)
    finally:
        lose_the_node(place, training)
    steps, full = recorded_behind(place), holdfast.steps(place / "behind")
    last = max(full)
    while last + 1 in steps:
        last += 1
    assert last > 35
    assert not held or max(full) == 10
    digests = {line["step"]: line["digest"] for line in told(place) if "step" in line}
    assert begin(place, last + 3, 10, 0.05).wait() == 0
    restored = next(line for line in reversed(told(place)) if "restored" in line)
    assert restored["restored"] == last
    assert restored["tier"] == "upload"
    assert restored["replayed"] == last - max(full)
    assert restored["digest"] == digests[last]
    after = [line["step"] for line in told(place)[-3:]]
    assert after == [last + 1, last + 2, last + 3]


def test_a_run_that_goes_back_saves_what_the_home_behind_has_not(tmp_path: Path) -> None:
    """Its records would lead on from nothing there."""
    root, behind = tmp_path / "root", tmp_path / "behind"

    def begin(run: Plain, every: Every) -> holdfast.Checkpointer:
        delta = Delta(upload_every_s=0.05)
        keep = {"upload": behind, "upload_keep": holdfast.Keep(last=1)}
        return holdfast.Checkpointer(root, run.state, every=every, delta=delta, **keep)

    run = Plain()
    with begin(run, Every(durable=10, delta=1)) as ckpt:
        train(ckpt, run, range(1, 21), 0.01)
    run = Plain()
    with begin(run, Every(durable=100, delta=1)) as ckpt:
        assert ckpt.restore(10) == 10
        expected = train(ckpt, run, range(11, 16), 0.02)[15]
    root.rename(tmp_path / "lost")
    run = Plain()
    with begin(run, Every(durable=100, delta=1)) as ckpt:
        assert ckpt.restore() == 15
    check_equal(run.everything(), expected)


def test_a_step_that_was_given_up_takes_no_place_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is uploaded after the run went back: what the new records lead on from stays there."""
    gate, copy = threading.Event(), HomeBehind.copy

    def held(home: HomeBehind, manifest: Any, wanted: Any, **more: Any) -> int:
        assert manifest.step != 20 or gate.wait(300)
        return copy(home, manifest, wanted, **more)

    monkeypatch.setattr(HomeBehind, "copy", held)
    root, behind = tmp_path / "root", tmp_path / "behind"

    def begin(run: Plain) -> holdfast.Checkpointer:
        every, delta = Every(durable=10, delta=1), Delta(upload_every_s=0.05)
        keep = {"upload": behind, "upload_keep": holdfast.Keep(last=1)}
        return holdfast.Checkpointer(root, run.state, every=every, delta=delta, **keep)

    run = Plain()
    with begin(run) as ckpt:
        train(ckpt, run, range(1, 11), 0.01)
        until(lambda: holdfast.steps(behind) == [10])
        train(ckpt, run, range(11, 21), 0.01)
        ckpt.wait()
        assert ckpt.restore(10) == 10
        gate.set()
        expected = train(ckpt, run, range(11, 16), 0.02)[15]
    assert holdfast.steps(behind) == [10, 20]
    root.rename(tmp_path / "lost")
    run = Plain()
    with begin(run) as ckpt:
        assert ckpt.restore() == 15
    check_equal(run.everything(), expected)


def test_a_step_from_behind_keeps_its_metrics_and_files(tmp_path: Path) -> None:
    """The root has it no more: it is saved anew there, and uploaded again."""
    root, behind = tmp_path / "root", tmp_path / "behind"

    def begin(run: Plain) -> holdfast.Checkpointer:
        every, keep = Every(durable=100, delta=1), holdfast.Keep(last=1)
        return holdfast.Checkpointer(
            root, run.state, every=every, delta=Delta(), upload=behind, keep=keep
        )

    run = Plain()
    with begin(run) as ckpt:
        train(ckpt, run, range(1, 10), 0.01)
        run.step(10)
        ckpt.step(10)
        ckpt.save(10, metrics={"loss": 0.5}, files={"note.txt": b"good"})
        ckpt.wait()
        until(lambda: 10 in holdfast.steps(behind))
        ckpt.metrics(10, accuracy=0.9)
        train(ckpt, run, range(11, 21), 0.01)
        ckpt.save(20)
    run = Plain()
    with begin(run) as ckpt:
        restored = ckpt.restore(10)
        assert restored == 10 and restored.tier == "upload"
        train(ckpt, run, range(11, 14), 0.01)
    for home in (root, behind):
        step = holdfast.open(home, step=10)
        assert step.metrics == {"loss": 0.5, "accuracy": 0.9}
        assert dict(step.files) == {"note.txt": b"good"}


def test_a_step_that_has_metrics_is_not_saved_anew(tmp_path: Path) -> None:
    """They would go: what the home behind lacks is told instead."""
    root, behind = tmp_path / "root", tmp_path / "behind"

    def begin(run: Plain) -> holdfast.Checkpointer:
        every, keep = Every(durable=10, delta=1), holdfast.Keep(last=1)
        return holdfast.Checkpointer(
            root, run.state, every=every, delta=Delta(), upload=behind, upload_keep=keep
        )

    run = Plain()
    with begin(run) as ckpt:
        train(ckpt, run, range(1, 21), 0.01)
        ckpt.metrics(10, loss=0.5)
    run = Plain()
    with begin(run) as ckpt:
        with pytest.warns(holdfast.HoldfastWarning, match="records lead on from step 10, which"):
            assert ckpt.restore(10) == 10
        expected = train(ckpt, run, range(11, 16), 0.02)[15]
    assert read_manifest(LocalStore(root), 10).run == 1
    assert read_notes(LocalStore(root)).values(1, 10) == {"loss": 0.5}
    run = Plain()
    with begin(run) as ckpt:
        assert ckpt.restore() == 15
    check_equal(run.everything(), expected)


def test_what_was_lost_with_the_root_is_told(tmp_path: Path) -> None:
    """Records of a later run than the newest full step's lead on from a step that is gone."""
    root, behind = tmp_path / "root", tmp_path / "behind"
    run, every = Plain(), Every(durable=10, delta=1)
    with holdfast.Checkpointer(root, run.state, every=every, delta=Delta()) as ckpt:
        train(ckpt, run, range(1, 21), 0.01)
    run = Plain()
    with holdfast.Checkpointer(root, run.state, every=Every(delta=1), delta=Delta()) as ckpt:
        assert ckpt.restore(10) == 10
        train(ckpt, run, range(11, 16), 0.02)
    shutil.copytree(root, behind)
    for step in (1, 10):
        shutil.rmtree(behind / f"steps/{step:010d}")
    with (
        holdfast.Checkpointer(behind, Plain().state, delta=Delta()) as ckpt,
        pytest.warns(holdfast.HoldfastWarning, match="step 10 by run 1.* up to step 15"),
    ):
        assert ckpt.restore() == 20


@pytest.mark.soak
def test_close_uploads_the_last_records(tmp_path: Path) -> None:
    """However seldom they are uploaded: the end of a run loses nothing."""
    place = tmp_path / "run"
    assert begin(place, 27, 10, 3600).wait() == 0
    assert recorded_behind(place)[-1] == 27
    (place / "root").rename(place / "lost")
    assert begin(place, 28, 10, 3600).wait() == 0
    restored = next(line for line in reversed(told(place)) if "restored" in line)
    assert (restored["restored"], restored["tier"]) == (27, "upload")
    assert restored["digest"] == told(place)[27]["digest"]


@pytest.fixture(scope="module")
def ended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, int, str]]:
    """By what befalls the home behind, the place of a script that only ends, its status, what it said."""
    env = os.environ | {"PYTHONPATH": str(TESTS)}
    begun = {}
    name = "test_the_last_records_of_a_script_that_only_ends"
    for what in cases_of(request, name, ["", "away", "hangs"]):
        place = tmp_path_factory.mktemp(f"ends{what}")
        command = [sys.executable, "-m", "tiers.mirror.ends_recorded", place, *[what] * bool(what)]
        begun[what] = place, subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    said = {what: one.communicate(timeout=300)[1] for what, (_, one) in begun.items()}
    return {what: (place, one.returncode, said[what]) for what, (place, one) in begun.items()}


@pytest.mark.soak_except("", "hangs")
@pytest.mark.parametrize("what", ["", "away", "hangs"])
def test_the_last_records_of_a_script_that_only_ends(
    ended: dict[str, tuple[Path, int, str]], what: str
) -> None:
    """They are uploaded when Python ends, or it is told that they are not."""
    place, status, said = ended[what]
    assert status == 0, said
    assert recorded_behind(place) == ([] if what else [2, 3, 4, 5])
    assert ("not all records are uploaded to" in said) == bool(what), said


def test_how_often_is_checked() -> None:
    assert Delta(upload_every_s=5).upload_every_s == 5.0
    assert Every(delta=1).delta == 1


def test_records_in_a_bucket_are_read_as_it_asks() -> None:
    """Of two homes, as the one asks that takes longer to begin to answer."""
    near, far = MemoryStore("near"), MemoryStore("far")
    far.read_bytes, far.read_threads = 4 << 20, 12  # type: ignore[attr-defined]
    both = JoinedStore(near, far)
    assert reads_of(LogStore(both, {})) == reads_of(LogStore(far, {})) == (4 << 20, 12)
    assert reads_of(LogStore(near, {})) == (0, 0)


def test_joined_stores() -> None:
    one, other = MemoryStore("joined-one"), MemoryStore("joined-other")
    one.put("a", b"1")
    one.put("b", b"2")
    other.put("b", b"3")
    other.put("c", b"4")
    both = JoinedStore(one, other)
    assert both.list() == ["a", "b", "c"]
    assert [both.get(key) for key in both.list()] == [b"1", b"2", b"4"]
    reader = both.open("b")
    one.delete("b")
    into = bytearray(1)
    reader.read(0, memoryview(into))
    assert into in (b"2", b"3")
    with pytest.raises(NotFound):
        both.get("d")


# -- damage in the root ----------------------------------------------------------------------------


class Training:
    """A training of one process that records each step, with two homes."""

    def __init__(self, place: Path) -> None:
        self.root, self.behind = place / "root", place / "behind"
        torch.manual_seed(0)
        self.model = torch.nn.Linear(300, 300)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def checkpointer(self, **options: Any) -> holdfast.Checkpointer:
        return holdfast.Checkpointer(
            self.root,
            {"model": self.model, "optim": self.optimizer},
            every=holdfast.Every(durable=10, delta=1),
            delta=Delta(upload_every_s=0.05),
            upload=self.behind,
            **options,
        )

    def steps(self, ckpt: holdfast.Checkpointer, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.steps_alone(step, step)
            ckpt.step(step)

    def steps_alone(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            torch.manual_seed(step)
            self.model(torch.randn(4, 300)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def digest(self) -> str:
        return digest_of(self.model, self.optimizer)


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(data)


def damage(root: Path, what: str) -> None:
    """Of the record of step 12, or of the plan of all."""
    (record,) = root.glob("log/*/0000000012-0000000012/r00000.log")
    (plan,) = root.glob("log/*/plan-*.json")
    match what:
        case "header":
            flip(record, 40 / record.stat().st_size)
        case "gradient":
            flip(record, 0.5)
        case "cut":
            os.truncate(record, record.stat().st_size // 2)
        case "missing":
            record.unlink()
        case "plan":
            flip(plan, 0.5)


@pytest.mark.soak_except("gradient-None", "missing-None", "plan-None")
@pytest.mark.parametrize(
    ("what", "asked"),
    [(w, None) for w in ("header", "gradient", "cut", "missing", "plan")] + [("gradient", 13)],
)
def test_of_a_damaged_record_the_copy_behind_is_taken(
    tmp_path: Path, what: str, asked: int | None
) -> None:
    one = Training(tmp_path)
    with one.checkpointer() as ckpt:
        one.steps(ckpt, 1, 13)
    damage(one.root, what)
    again = Training(tmp_path)
    with again.checkpointer() as ckpt:
        text = "records in .* are damaged or missing, and their copies in .*behind were taken: log/"
        with pytest.warns(holdfast.HoldfastWarning, match=text):
            restored = ckpt.restore(asked)
        assert (restored, restored.replayed, restored.tier) == (13, 3, "durable")
        assert again.digest == one.digest
        again.steps(ckpt, 14, 15)
    one.steps_alone(14, 15)
    assert again.digest == one.digest


def test_a_record_that_is_damaged_in_both_homes_ends_the_replay(tmp_path: Path) -> None:
    one = Training(tmp_path)
    with one.checkpointer() as ckpt:
        one.steps(ckpt, 1, 13)
    for home in (one.root, one.behind):
        damage(home, "gradient")
    again = Training(tmp_path)
    with (
        again.checkpointer() as ckpt,
        pytest.warns(holdfast.HoldfastWarning, match="after 11 is missing or damaged"),
    ):
        assert ckpt.restore() == 11


@pytest.mark.parametrize("what", ["header", "gradient", "plan"])
def test_damage_in_the_root_is_not_copied_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It comes between the writing of a record and its upload."""
    gate, copies = threading.Event(), RecordUpload._pass
    monkeypatch.setattr(RecordUpload, "_pass", lambda one: gate.wait(300) and copies(one))
    one = Training(tmp_path)
    with warnings.catch_warnings(record=True) as caught, one.checkpointer() as ckpt:
        warnings.simplefilter("always")
        one.steps(ckpt, 1, 13)
        ckpt._tiers.get("delta").way.flush(60)
        damage(one.root, what)
        gate.set()
    behind, root = LocalStore(one.behind), LocalStore(one.root)
    missing = {*root.list("log/")} - {*behind.list("log/")}
    assert len(missing) == (13 if what == "plan" else 1), missing  # without it all are only bytes
    (text,) = {str(w.message) for w in caught}
    what = "the plan of records" if what == "plan" else "records of steps 12 to 12"
    assert what in text and "damaged in" in text and "not uploaded to" in text
