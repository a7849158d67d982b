"""The beginning of a run in a root that has steps: restored from, begun anew, or refused; and which steps
it may delete."""

from __future__ import annotations

import os
import subprocess
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import holdfast
import holdfast.session.added_state
import zygote
from holdfast.errors import HoldfastWarning, NotFound, UsageError


class Run:
    """A small training."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.model = nn.Linear(4, 4)
        self.other: torch.optim.Optimizer | None = None
        """An optimizer that is not in the state."""
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state: dict[str, Any] = {"model": self.model, "optim": self.optim}
        self.ckpt = holdfast.Checkpointer(root, self.state, **options)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: Any) -> None:
        self.ckpt.__exit__(*error)

    def train(self) -> None:
        self.model(torch.ones(2, 4)).square().sum().backward()
        self.optim.step()
        self.optim.zero_grad()

    def save(self, *steps: int) -> None:
        for step in steps:
            self.train()
            self.ckpt.save(step).wait(60)


def told(ckpt: holdfast.Checkpointer, call: Any, *args: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call(*args)
        ckpt.wait()
    return [str(one.message) for one in found if isinstance(one.message, HoldfastWarning)]


SNAPSHOTS = """
import os, sys, torch, holdfast
root, restores, *steps = sys.argv[1:]
net = torch.nn.Linear(9, 9)
optim = torch.optim.AdamW(net.parameters())
with holdfast.Checkpointer(
    root, {"net": net, "optim": optim}, every=holdfast.Every(memory=1), memory=holdfast.Memory(),
    when_busy="queue", on_error="raise",
) as ckpt:
    if restores:
        print(int(ckpt.restore()))
    for step in map(int, steps):
        net(torch.randn(2, 9)).sum().backward()
        optim.step()
        ckpt.step(step)
    ckpt.wait()
    sys.stdout.flush()
    os._exit(0)  # killed
"""


def test_a_start_that_forgets_the_snapshots_is_refused(tmp_path: Path, lives: Any) -> None:
    """Memory alone has steps of the run that was killed."""
    environment = os.environ | {"HOLDFAST_MEMORY_DIR": str(tmp_path / "node0")}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return zygote.run(["-c", SNAPSHOTS, tmp_path / "root", *arguments], env=environment)

    assert not run("", "100", "101").returncode
    refused = run("", "1")
    assert (
        refused.returncode and "(step 101 in host memory), and none was restored" in refused.stderr
    )
    assert run("yes", "102").stdout == "101\n"


# -- a root that has steps ------------------------------------------------------------------------


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_start_that_forgets_to_restore_is_refused(tmp_path: Path, on_error: Any) -> None:
    keep = holdfast.Keep(last=3)
    with Run(tmp_path, keep=keep) as run:
        run.save(700, 800, 900, 1000)
    with Run(tmp_path, keep=keep, every=1000, on_error=on_error) as run:
        for call in (run.ckpt.step, run.ckpt.save):
            with pytest.raises(UsageError, match=r"800, 900, 1000.* and none was restored"):
                call(1)  # also where nothing is due
    assert holdfast.steps(tmp_path) == [800, 900, 1000]


def test_a_run_that_begins_anew_deletes_nothing_of_others(tmp_path: Path) -> None:
    keep = holdfast.Keep(last=2)
    with Run(tmp_path, keep=keep) as run:
        run.save(800, 900, 1000)
    with Run(tmp_path, keep=keep, anew=True) as run:
        run.save(1, 2, 3, 4)
    assert holdfast.steps(tmp_path) == [3, 4, 900, 1000]
    with Run(tmp_path, keep=keep) as run:  # nor does one that goes on from it
        assert run.ckpt.restore() == 4
        run.save(5, 6)
    assert holdfast.steps(tmp_path) == [5, 6, 900, 1000]


def test_a_run_that_begins_anew_tells_of_the_steps_that_it_replaces(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.save(2, 3, 4)
    with Run(tmp_path, anew=True) as run:
        texts = told(run.ckpt, run.save, 1, 2, 3, 3)
        assert len(texts) == 1 and texts[0].startswith(
            "step 2 of run 1 is replaced by step 2 of this"
        )
        assert texts[0].endswith("[other-run]")
    with Run(tmp_path) as run:  # back on purpose
        assert run.ckpt.restore(step=2) == 2
        assert not told(run.ckpt, run.save, 3, 4)


def test_a_run_deletes_what_it_has_gone_on_from(tmp_path: Path) -> None:
    """Over several starts, the first of which has no step left; not what lies beyond where it went back."""
    keep = holdfast.Keep(last=2)
    for steps in ((1, 2, 3), (4,), (5, 6)):
        with Run(tmp_path, keep=keep) as run:
            assert run.ckpt.restore() == steps[0] - 1
            run.save(*steps)
    assert holdfast.steps(tmp_path) == [5, 6]
    with Run(tmp_path, keep=keep) as run:
        assert run.ckpt.restore(step=5) == 5
        run.save(7, 8, 9)
    assert holdfast.steps(tmp_path) == [6, 8, 9]


# -- which step is the newest ---------------------------------------------------------------------


def test_a_step_at_or_below_the_restored_one_is_refused(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.save(49, 50)
    for looks in (False, True):
        with Run(tmp_path, every=1) as run:
            assert run.ckpt.restore(run.ckpt.find() if looks else None) == 50
            for step in (0, 49):
                with pytest.raises(UsageError, match=rf"step {step} is not saved: step 50 of"):
                    run.ckpt.save(step)
            with pytest.raises(UsageError, match="step 10 is not saved"):
                run.ckpt.step(10)
            run.ckpt.save(50).wait(60)  # the very same state
            run.train()
            with pytest.raises(UsageError, match=r"step 50 .*has been trained on since"):
                run.ckpt.step(50)
            run.ckpt.step(51)
        with Run(tmp_path) as run:
            assert run.ckpt.restore() == 51
            run.ckpt.restore(step=50)
            run.train()
            run.ckpt.save(50).wait(60)
    with Run(tmp_path, anew=True) as run:
        run.ckpt.restore()
        run.ckpt.save(3).wait(60)


def test_a_run_that_begins_with_another_root_counts_as_it_likes(tmp_path: Path) -> None:
    with Run(tmp_path / "base") as run:
        run.save(1000)
    with Run(tmp_path / "tuned") as run:
        assert run.ckpt.restore(source=tmp_path / "base") == 1000
        run.save(1)
    with Run(tmp_path / "kept") as run:  # which is its own step 1000 now
        run.ckpt.restore(source=tmp_path / "base", keep_source=True)
        with pytest.raises(UsageError, match="step 1 is not saved"):
            run.save(1)


def swapped(run: Run) -> None:
    """Put averaged weights in for an evaluation, and back."""
    with torch.no_grad():
        for p in run.model.parameters():
            before = p.clone()
            p.mul_(0.5)
            p.copy_(before)


def counted_on(run: Run) -> None:
    run.state["metric"]["sum"].add_(1)


def probed(run: Run) -> None:
    """Train something else on top of it."""
    probe = nn.Linear(4, 2)
    probe(run.model(torch.ones(2, 4)).detach()).sum().backward()
    run.other = torch.optim.SGD(probe.parameters(), lr=0.1)
    run.other.step()


def trained_by_another(run: Run) -> None:
    run.model(torch.ones(2, 4)).sum().backward()
    run.other = torch.optim.Adam(run.model.parameters())
    run.other.step()
    run.ckpt.save(6).wait(60)  # which forgets the counts of those before it


@pytest.mark.parametrize(
    ("then", "trains"),
    [(swapped, 0), (counted_on, 0), (probed, 0), (Run.train, 1), (trained_by_another, 1)],
)
def test_only_steps_of_optimizers_are_training(tmp_path: Path, then: Any, trains: int) -> None:
    for _ in range(2):
        with Run(tmp_path, every=5) as run:
            run.state["metric"] = {"sum": torch.zeros(3)}
            begin = run.ckpt.restore()
            for step in range(begin + 1, 6):
                run.train()
                run.ckpt.step(step)
            if not begin:
                continue
            then(run)
            if trains:
                with pytest.raises(UsageError, match="has been trained on since"):
                    run.ckpt.save(5)
            else:
                run.ckpt.save(5).wait(60)


def test_a_state_without_optimizers_may_be_saved_once_more(tmp_path: Path) -> None:
    for _ in range(2):
        model = nn.Linear(4, 4)
        with holdfast.Checkpointer(tmp_path, {"model": model}) as ckpt:
            ckpt.restore()
            torch.nn.init.ones_(model.weight)
            ckpt.save(5).wait(60)


def test_a_step_that_was_loaded_by_the_function_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.save(5)
    with Run(tmp_path) as run:
        holdfast.load(tmp_path, run.state)
        with pytest.raises(UsageError, match=r"after holdfast.load\(\.\.\.\) say anew=True"):
            run.save(6)
    with Run(tmp_path, anew=True) as run:
        holdfast.load(tmp_path, run.state)
        run.save(6)


# -- keys of the step that the state lacks --------------------------------------------------------


def averaged(root: Path, steps: range, **options: Any) -> tuple[int, list[str]]:
    """Train with an average that is made from the restored weights; return its count, and what was told."""
    with warnings.catch_warnings(record=True) as found, Run(root, every=1, **options) as run:
        warnings.simplefilter("always")
        run.ckpt.restore()
        average = run.state["average"] = AveragedModel(run.model)
        for step in steps:
            run.train()
            average.update_parameters(run.model)
            run.ckpt.step(step)
        run.ckpt.wait()
    return int(average.n_averaged), [str(one.message) for one in found]


def test_a_key_that_comes_after_the_restore_is_given_what_the_step_has(tmp_path: Path) -> None:
    assert averaged(tmp_path, range(1, 5)) == (4, [])
    count, texts = averaged(tmp_path, range(5, 7))
    assert count == 5  # 4 of the step; what was done before the first call is lost; 1
    assert len(texts) == 2 and all(text.endswith("[untaken-key]") for text in texts)
    assert "step 4 has 'average', and the state lacks it" in texts[0]
    assert "'average' came into the state after step 4 was restored: it was loaded" in texts[1]


def test_what_was_restored_and_is_exchanged_for_a_fresh_one_is_told(tmp_path: Path) -> None:
    """A wrapper of what was restored is none."""

    def run(exchange: Any) -> list[str]:
        model = nn.Linear(4, 4)
        state: dict[str, Any] = {"model": model, "average": AveragedModel(model)}
        with holdfast.Checkpointer(tmp_path, state, every=1) as ckpt:
            step = int(ckpt.restore()) + 1
            exchange(ckpt.state)
            return told(ckpt, ckpt.step, step)

    assert run(lambda state: None) == []
    (fresh,) = run(lambda state: state.update(average=AveragedModel(state["model"])))
    assert fresh.startswith("'average' was restored from step 1") and fresh.endswith("[exchanged]")
    assert run(lambda state: state.update(model=torch.compile(state["model"]))) == []


def test_a_key_that_begins_anew(tmp_path: Path) -> None:
    averaged(tmp_path, range(1, 5))
    count, texts = averaged(tmp_path, range(5, 7), anew=True)
    assert count == 2 and len(texts) == 1


def test_a_late_key_that_cannot_be_given_is_refused_by_name(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        run.save(1, 2)
    with holdfast.Checkpointer(tmp_path, {"model": nn.Linear(4, 4)}, every=1) as ckpt:
        assert len(told(ckpt, ckpt.restore)) == 1
        ckpt.state["optim"] = torch.optim.SGD(ckpt.state["model"].parameters(), lr=0.1)
        with pytest.raises(
            UsageError, match="'optim' came into the state after step 2 was restored"
        ):
            ckpt.step(3)
        ckpt.restore()  # once more, now that it is there
        ckpt.step(3)
    with holdfast.Checkpointer(tmp_path, {"model": nn.Linear(4, 4)}, anew=True) as ckpt:
        ckpt.save(9).wait(60)
    with Run(tmp_path) as run:
        run.ckpt.restore(step=3)


def test_a_late_key_of_a_step_that_is_gone_is_refused_by_name(tmp_path: Path) -> None:
    averaged(tmp_path, range(1, 3))
    with Run(tmp_path, keep=holdfast.Keep(last=1)) as run:
        run.ckpt.restore()
        run.save(3)
        run.ckpt._tiers.durable.settle(60)
        run.state["average"] = AveragedModel(run.model)
        with pytest.raises(UsageError, match=r"'average' .* can no longer be read"):
            run.ckpt.save(4)


LATE = [
    lambda n: n,
    lambda n: (n, 0),
    lambda n: [n],
    lambda n: {"n": n, "more": {"t": torch.tensor([n])}},
    np.float32,
    lambda n: np.array([n]),
    lambda n: torch.tensor([n]),
]
"""Values that a script sets, by a number."""


@pytest.mark.parametrize("value", LATE)
def test_a_late_value_is_saved_as_it_is_and_told(tmp_path: Path, value: Any) -> None:
    with holdfast.Checkpointer(tmp_path, {"model": nn.Linear(1, 1), "at": value(3)}) as ckpt:
        ckpt.save(1)
    with holdfast.Checkpointer(tmp_path, {"model": nn.Linear(1, 1)}) as ckpt:
        assert len(told(ckpt, ckpt.restore)) == 1
        mine = ckpt.state["at"] = value(5)
        (text,) = told(ckpt, ckpt.save, 2)
        assert ckpt.state["at"] is mine
    assert "'at' came into the state" in text and "is saved as it is now" in text
    state = {"at": value(0)}
    holdfast.load(tmp_path, state)
    assert repr(state["at"]) == repr(value(5))


def test_late_keys_are_looked_for_at_ten_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And at the first step; not at each step that is recorded, and not for ever."""
    averaged(tmp_path, range(1, 3))
    looks, give = [], holdfast.session.added_state.give

    def counted(*args: Any) -> Any:
        looks.append(0)
        return give(*args)

    monkeypatch.setattr(holdfast.session.added_state, "give", counted)
    every = holdfast.Every(durable=50, delta=1)
    with Run(tmp_path, every=every, delta=holdfast.Delta()) as run:
        assert len(told(run.ckpt, run.ckpt.restore)) == 1
        for step in range(3, 12):
            run.train()
            run.ckpt.step(step)
        assert 1 <= len(looks) <= 2  # the first step, and a save that records lead on from
    looks.clear()
    with Run(tmp_path, every=1) as run:
        run.ckpt.restore(step=2)
        for step in range(51, 61):
            run.save(step)
        assert len(looks) == 10
        mine = run.state["average"] = AveragedModel(run.model)
        run.save(61)
        assert len(looks) == 10 and mine.n_averaged == 0


# -- a state that can never be saved --------------------------------------------------------------


@pytest.mark.parametrize("on_error", ["warn", "raise"])
@pytest.mark.parametrize("value", [torch.utils.data.DataLoader([1, 2]), lambda x: x, object()])
def test_a_state_that_can_never_be_saved_ends_the_first_step(
    tmp_path: Path, value: Any, on_error: Any
) -> None:
    with Run(tmp_path, every=1000, on_error=on_error) as run:
        run.state["odd"] = value
        assert not run.ckpt.restore().found
        run.train()
        with pytest.raises(UsageError, match=r"odd: .*cannot be saved"):
            run.ckpt.step(1)
        with pytest.raises(UsageError, match=r"odd: .*cannot be saved"):
            run.ckpt.save(1)
        del run.state["odd"]
        run.ckpt.save(1).wait(60)


# -- labels and metrics of steps that are not there -----------------------------------------------


def test_metrics_of_a_step_that_was_not_saved_end_nothing(tmp_path: Path) -> None:
    with Run(tmp_path, every=2) as run:
        run.ckpt.step(1)
        (text,) = told(run.ckpt, lambda: run.ckpt.metrics(1, loss=1.0))
        assert text.startswith("metrics of step 1 are not kept") and text.endswith("[unsaved-note]")
        run.ckpt.step(2, metrics={"loss": 0.5})
        run.ckpt.step(3)
        assert not told(run.ckpt, lambda: run.ckpt.metrics(3, loss=1.0))  # once is enough
        run.ckpt.metrics(2, accuracy=1.0)
        with pytest.raises(NotFound):
            run.ckpt.metrics(7, loss=1.0)  # where the run has not been
        with pytest.raises(UsageError):
            run.ckpt.metrics(2, loss="low")  # type: ignore[arg-type]
    assert holdfast.open(tmp_path).metrics == {"loss": 0.5, "accuracy": 1.0}


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_metrics_of_a_step_whose_save_has_failed(tmp_path: Path, on_error: Any) -> None:
    with Run(tmp_path, every=1, on_error=on_error) as run:
        run.ckpt.step(1)
        run.ckpt.wait()
        tmp_path.joinpath("steps", "0000000002").write_text("in the way")
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            errors = 0
            for call in (
                lambda: run.ckpt.step(2),
                run.ckpt.wait,
                lambda: run.ckpt.metrics(2, loss=1.0),
                lambda: run.ckpt.pin(2, "best"),
            ):
                try:
                    call()
                except holdfast.HoldfastError:
                    errors += 1
        texts = " ".join(str(one.message) for one in found)
        if on_error == "warn":
            assert not errors and "metrics of step 2 are not kept" in texts
            assert "the label 'best' names no step 2" in texts
        else:
            assert errors
        tmp_path.joinpath("steps", "0000000002").unlink()
        run.ckpt.step(3)


# -- numbers that stay as they are ----------------------------------------------------------------


def saves(root: Path, numbers: dict[str, Any], first: int, number: int, **at: Any) -> list[str]:
    """What a run tells that restores and saves, and sets numbers `at` its third save."""
    with Run(root) as run:
        run.state.update(numbers)
        texts = told(run.ckpt, run.ckpt.restore)
        for step in range(first, first + number):
            run.train()
            if step == first + 2:
                run.state.update(at)
            texts += told(run.ckpt, run.ckpt.save, step)
    return texts


def test_a_number_that_never_changes_is_told_once(tmp_path: Path) -> None:
    """Not one that changed once, in this run or in the one before, nor what a nested dict has."""
    numbers = {"epoch": 0, "loss": 0.5, "best": 9.5, "flag": True, "config": {"width": 4}}
    assert saves(tmp_path, numbers, 1, 12, best=0.25) == []
    (text,) = saves(tmp_path, numbers, 13, 13, loss=0.125)
    assert text.startswith(
        "'epoch' of the state was 0 when the run before was saved, and in each of"
    )


def test_numbers_that_rest_are_told_nothing(tmp_path: Path) -> None:
    """An epoch of many saves, and a loss that stays the best."""
    numbers = {"epoch": 0, "best": float("inf")}
    assert saves(tmp_path, numbers, 1, 25) == []
    assert saves(tmp_path, numbers, 26, 3, epoch=1, best=2.5) == []
    assert saves(tmp_path, numbers, 29, 25) == []
