"""Records of a run that went back to an older step: what counts, what stays, what is shown."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import NotFound, UsageError
from holdfast.live.saving import steps as steps_of_root
from holdfast.store import open_store
from holdfast.tiers.memory.own_agent import OwnAgent
from holdfast.tiers.records.offline import replay_to
from tiers.memory.zygote import Lives

from .test_exact import Run, check_equal, equal, root  # noqa: F401
from .test_offline import Plain, call

pytestmark = pytest.mark.slow


def train(ckpt: holdfast.Checkpointer, run: Run, steps: Iterable[int], lr: float) -> dict[int, Any]:
    """What each step led to."""
    found = {}
    for step in steps:
        for group in run.optim.param_groups:
            group["lr"] = lr
        run.step(step)
        ckpt.step(step)
        ckpt.wait()
        found[step] = run.everything()
    return found


def went_back(root: Path, back: int, room: int = 0) -> dict[int, Any]:  # noqa: F811
    """Run 1 makes eight steps, and full saves of 1, 4 and 8; run 3 leads on from step `back` to 8 in
    another way, without a full save.  What its steps led to.  `room`: bound of the log, in records."""
    run, every = Plain(), holdfast.Every(durable=4, delta=1)
    with holdfast.Checkpointer(root, run.state, every=every, delta=holdfast.Delta()) as ckpt:
        train(ckpt, run, range(1, 9), 0.01)
    record = max(file.stat().st_size for file in root.glob("log/*/*/*.log"))
    run, every, delta = (
        Plain(),
        holdfast.Every(delta=1),
        holdfast.Delta(max_bytes=room * record or None),
    )
    with holdfast.Checkpointer(root, run.state, every=every, delta=delta) as ckpt:
        assert ckpt.restore(back) == back
        found = train(ckpt, run, range(back + 1, 9), 0.02)
    assert holdfast.steps(root) == [1, 4, 8]
    return found


def restored(root: Path, step: int | None = None) -> dict[str, Any]:  # noqa: F811
    """From a copy: who goes back leaves something behind."""
    with tempfile.TemporaryDirectory(dir=root.parent) as folder:
        copied, run = shutil.copytree(root, Path(folder) / "root"), Plain()
        with holdfast.Checkpointer(copied, run.state, delta=holdfast.Delta()) as ckpt:
            ckpt.restore(step)
        return run.everything()


@pytest.mark.soak_except("4", "8")
@pytest.mark.parametrize("step", [3, 4, 5, 8])
def test_a_step_that_both_runs_have(root: Path, step: int) -> None:  # noqa: F811
    """The later run's is meant, though the other's may be a full one."""
    expected = went_back(root, 2)[step]
    check_equal(restored(root, step), expected)
    state, base, _ = replay_to(open_store(str(root)), step)
    weights = {f"model.{name}": value for name, value in state["model"].state_dict().items()}
    assert base == 1
    assert [name for name, value in weights.items() if not equal(value, expected[name])] == []


def test_a_full_step_that_no_record_leads_to(root: Path) -> None:  # noqa: F811
    """It is the later run's, so records of the other's are not replayed in its place."""
    went_back(root, 2)
    run = Plain()
    with holdfast.Checkpointer(root, run.state, delta=holdfast.Delta()) as ckpt:
        assert ckpt.restore(2) == 2
        run.step(3)
        ckpt.save(3).wait()
    check_equal(restored(root, 3), run.everything())
    with pytest.raises(NotFound, match="lead to step 3"):
        replay_to(open_store(str(root)), 3)


def test_a_bound_spares_what_leads_to_the_newest_state(root: Path) -> None:  # noqa: F811
    """Though a full step of the run before is newer than those records."""
    expected = went_back(root, 6, room=10)[8]
    left = {(int(f.parts[-3]), int(f.parts[-2][:10])) for f in root.glob("log/*/*/*.log")}
    assert {(1, 5), (1, 6), (3, 7), (3, 8)} <= left and len(left) < 9
    check_equal(restored(root), expected)


def test_prune_spares_what_leads_to_the_newest_state(root: Path) -> None:  # noqa: F811
    expected = went_back(root, 6)[8]
    for more in ("--dry-run", "--json"):
        status, text = call("prune", root, "--keep-last", 1, "--json", more)
        assert (status, json.loads(text)["gone"]) == (0, [1])
    assert holdfast.steps(root) == [4, 8]
    check_equal(restored(root), expected)


def test_what_the_log_says_of_both_runs(root: Path) -> None:  # noqa: F811
    """What was given up is history, and no fault."""
    went_back(root, 6)
    status, text = call("log", root, "--json")
    found = [(r["run"], r["first"], r["last"], r["base"]) for r in json.loads(text)["records"]]
    assert (status, found) == (0, [(1, 2, 6, 4), (1, 7, 8, None), (3, 7, 8, 4)])
    assert "history" in call("log", root)[1]


def test_runs_without_their_claims(root: Path) -> None:  # noqa: F811
    """A number that is in the log is not given again, or what the next run does would count as older."""
    went_back(root, 6)
    shutil.rmtree(root / "claims")
    run = Plain()
    with holdfast.Checkpointer(
        root, run.state, every=holdfast.Every(delta=1), delta=holdfast.Delta()
    ) as ckpt:
        assert ckpt.restore(7) == 7
        expected = train(ckpt, run, [8], 0.04)[8]
    check_equal(restored(root), expected)


@pytest.mark.distributed
@pytest.mark.soak_except("tuned")
@pytest.mark.parametrize("case", ["tuned", "wished"])
def test_what_one_rank_has_said_before(lives: Lives, case: str) -> None:
    """Steps that come again find nothing of it."""
    told = lives.live(nodes=[0] * 2, case=f"tiers.records.back_cases:{case}")
    assert [t.status for t in told] == [0, 0], lives.errors()


def test_a_run_that_begins_anew_beside_later_steps(
    root: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its records stay while the full save that they lead on from is on its way."""
    every = holdfast.Every(durable=100, delta=1)
    run = Plain()
    with holdfast.Checkpointer(root, run.state, every=every, delta=holdfast.Delta()) as ckpt:
        train(ckpt, run, [100], 0.01)
    is_tidy, commit = threading.Event(), steps_of_root.commit

    def late(*args: Any) -> None:
        assert is_tidy.wait(300)
        commit(*args)

    monkeypatch.setattr(steps_of_root, "commit", late)
    run, delta = Plain(), holdfast.Delta()
    ckpt = holdfast.Checkpointer(root, run.state, every=every, delta=delta, anew=True)
    for step in range(1, 5):
        run.step(step)
        ckpt.step(step)
    found = run.everything()
    records = ckpt._tiers.get("delta")
    tidy_log = records._tidy_log
    monkeypatch.setattr(records, "_tidy_log", lambda *left: (tidy_log(*left), is_tidy.set()))
    ckpt.close()
    assert holdfast.steps(root) == [1, 100]
    check_equal(restored(root), found)


# -- what is damaged, or overlooked ---------------------------------------------------------------


def went_back_alone(root: Path, back: int, last: int) -> dict[int, Any]:  # noqa: F811
    """Run 1 makes eight steps, with a full save of the first; run 3 leads on from step `back` to `last`."""
    run, every = Plain(), holdfast.Every(durable=100, delta=1)
    with holdfast.Checkpointer(root, run.state, every=every, delta=holdfast.Delta()) as ckpt:
        found = train(ckpt, run, range(1, 9), 0.01)
    run = Plain()
    with holdfast.Checkpointer(root, run.state, every=every, delta=holdfast.Delta()) as ckpt:
        assert ckpt.restore(back) == back
        found |= train(ckpt, run, range(back + 1, last + 1), 0.02)
    return found


@pytest.mark.parametrize("fault", ["header", "plan"])
def test_a_damaged_record_does_not_bring_back_what_was_given_up(root: Path, fault: str) -> None:  # noqa: F811
    expected = went_back_alone(root, 4, 7)[4]
    (first,) = root.glob("log/*3/0000000005-*/r00000.log")
    (plan,) = root.glob("log/*3/plan-*")
    damage(plan if fault == "plan" else first)
    run = Plain()
    with holdfast.Checkpointer(root, run.state, delta=holdfast.Delta()) as ckpt:
        with pytest.warns(
            holdfast.HoldfastWarning, match="records up to step 7 are there and cannot"
        ):
            found = ckpt.find()
        assert found is not None and found.step == 4
        with pytest.warns(
            holdfast.HoldfastWarning, match="records up to step 7 are there and cannot"
        ):
            assert ckpt.restore() == 4
    check_equal(run.everything(), expected)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[40] ^= 16
    path.write_bytes(data)


def test_a_run_that_left_no_base_gives_nothing_up(root: Path) -> None:  # noqa: F811
    """It began anew in the root of another one, and ended before its first full save was there."""
    run, every = Plain(), holdfast.Every(durable=100, delta=1)
    with holdfast.Checkpointer(root, run.state, every=every, delta=holdfast.Delta()) as ckpt:
        expected = train(ckpt, run, range(5, 9), 0.01)[8]
    run, delta = Plain(), holdfast.Delta()
    with holdfast.Checkpointer(root, run.state, every=every, delta=delta, anew=True) as ckpt:
        train(ckpt, run, range(1, 4), 0.02)
    shutil.rmtree(root / "steps/0000000001")
    run = Plain()
    with (
        holdfast.Checkpointer(root, run.state, delta=holdfast.Delta()) as ckpt,
        pytest.warns(holdfast.HoldfastWarning, match="full save of step 1 by run 2"),
    ):
        assert ckpt.restore() == 8
    check_equal(run.everything(), expected)


def test_a_step_of_what_was_given_up_is_reached_from_its_own_base(root: Path) -> None:  # noqa: F811
    run, every = Plain(), holdfast.Every(durable=4, delta=1)
    with holdfast.Checkpointer(root, run.state, every=every, delta=holdfast.Delta()) as ckpt:
        expected = train(ckpt, run, range(1, 8), 0.01)[7]
    run, every = Plain(), holdfast.Every(delta=1)
    with holdfast.Checkpointer(root, run.state, every=every, delta=holdfast.Delta()) as ckpt:
        assert ckpt.restore(2) == 2
        train(ckpt, run, (3,), 0.02)
    check_equal(restored(root, 7), expected)
    holdfast.save(root, Plain().state, step=6)  # only what was given up leads on from there
    with pytest.raises(UsageError, match="lead on from its step 2"):
        holdfast.save(root, Plain().state, step=2)


def test_the_last_record_has_a_damaged_header(root: Path) -> None:  # noqa: F811
    """Nothing is behind it that would tell."""
    run, every = Plain(), holdfast.Every(durable=100, delta=1)
    with holdfast.Checkpointer(root, run.state, every=every, delta=holdfast.Delta()) as ckpt:
        train(ckpt, run, range(1, 6), 0.01)
    (last,) = root.glob("log/*/0000000005-*/r00000.log")
    damage(last)
    with (
        holdfast.Checkpointer(root, Plain().state, delta=holdfast.Delta()) as ckpt,
        pytest.warns(holdfast.HoldfastWarning, match="records up to step 5 are there and cannot"),
    ):
        assert ckpt.restore() == 4


@pytest.mark.parametrize("step", [5, 6])
def test_no_base_is_replaced_after_the_root_was_opened_again(root: Path, step: int) -> None:  # noqa: F811
    """Nor is a step saved between a base and what its records lead to."""
    run, every = Plain(), holdfast.Every(durable=5, delta=1)
    with holdfast.Checkpointer(root, run.state, every=every, delta=holdfast.Delta()) as ckpt:
        found = train(ckpt, run, range(1, 9), 0.01)
    with holdfast.Checkpointer(root, Plain().state, delta=holdfast.Delta()) as ckpt:
        ckpt.restore()
    with pytest.raises(UsageError, match=f"lead on from its step {step}"):
        holdfast.save(root, Plain().state, step=step)
    check_equal(restored(root), found[8])


def test_records_below_the_newest_full_step_are_not_overlooked(
    root: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    run, every = Plain(), holdfast.Every(durable=4, delta=1)
    with holdfast.Checkpointer(root, run.state, every=every, delta=holdfast.Delta()) as ckpt:
        train(ckpt, run, range(1, 9), 0.01)
    run, every = Plain(), holdfast.Every(delta=1)
    with holdfast.Checkpointer(root, run.state, every=every, delta=holdfast.Delta()) as ckpt:
        assert ckpt.restore(4) == 4
        expected = train(ckpt, run, (5, 6, 7), 0.02)[7]
    other, copied = tmp_path / "other", tmp_path / "copied"
    for source in (None, root):
        place = other if source else Path(shutil.copytree(root, tmp_path / "again"))
        with (
            holdfast.Checkpointer(place, Plain().state) as ckpt,
            pytest.warns(holdfast.HoldfastWarning, match="up to step 7"),
        ):
            assert ckpt.restore(source=source) == 8
    status, text = call("ls", root, "--json")
    assert (status, json.loads(text)["went_back_to"]) == (0, 4)
    assert "lead on from step 4: a run went back to it" in call("ls", root)[1]
    assert call("copy", root, copied, "--log")[0] == 0
    assert holdfast.steps(copied) == [4]
    check_equal(restored(copied), expected)


def test_agents_hear_of_it_last_and_hold_up_no_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent may take its time, or fail: the run and its records have gone on as another one then."""
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(tmp_path / "node"))
    run, seen = Plain(), list[tuple[bool, set[int]]]()
    with holdfast.Checkpointer(
        tmp_path / "root",
        run.state,
        every=holdfast.Every(durable=2, delta=1),
        delta=holdfast.Delta(),
        memory=holdfast.Memory("none"),
        upload=tmp_path / "home",
    ) as ckpt:
        train(ckpt, run, range(1, 5), 0.01)
        tiers, hello = ckpt._tiers, OwnAgent.hello

        def late(agent: OwnAgent) -> None:
            runs = {tiers.durable.run, tiers.get("delta")._capture._planner.run}
            committing = tiers.get("upload").home.committing
            if is_free := committing.acquire(timeout=60):  # an upload has it for a moment
                committing.release()
            seen.append((is_free, runs))
            hello(agent)

        monkeypatch.setattr(OwnAgent, "hello", late)
        assert ckpt.restore(2) == 2
        assert seen[-1] == (True, {tiers.run})
        train(ckpt, run, range(3, 5), 0.02)
