"""Accelerate's save_state and load_state over holdfast: killed and started again, every loss is the same.

Accelerate's own are not exact: generators are put back before loaders draw from them.
"""

from __future__ import annotations

import random
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from integrations.trainers.forked import Ranks
from integrations.trainers.tiny import KILLED, OFFLINE, Journal, run_of

ALONE: dict[str, dict[str, Any]] = {
    "plain": {},
    "data drawn anew": {"noisy": True},
    "seedable sampler": {"loader": {"use_seedable_sampler": True}},
    "stateful loader": {"loader": {"use_stateful_dataloader": True}},
    "a worker": {"workers": 1},
    "a worker that stays": {"workers": 1, "persistent": True},
    "a worker that stays, seedable": {
        "workers": 1,
        "persistent": True,
        "loader": {"use_seedable_sampler": True},
    },
    "seedable, another seed": {"again": 4, "loader": {"use_seedable_sampler": True}},
    "generator, another seed": {"again": 4, "generator": True},
    "another pass left": {"noisy": True, "accumulate": 1, "waits": True, "peek": 16},
    "another pass over the same data": {"accumulate": 1, "waits": True, "peek": 16, "same": True},
    "two passes at once": {"noisy": True, "accumulate": 1, "waits": True, "beside": True},
    "passes left": {"noisy": True, "waits": True, "leave": 10},
    "step": {"use": "step", "holdfast": {"every": "4"}},
    "records": {
        "use": "step",
        "accumulate": 1,
        "holdfast": {
            "every": "holdfast.Every(durable=10, delta=1)",
            "delta": "holdfast.Delta()",
        },
    },
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "ddp": (2, {"batch": 2, "noisy": True}),
    "fsdp": (2, {"batch": 2, "fsdp": True}),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    pytest.importorskip("accelerate")
    log = tmp_path_factory.mktemp("ranks") / "log"
    with Ranks("integrations.trainers.train_accelerate", log, **OFFLINE) as found:
        yield found


def rows_of(journal: Journal) -> dict[int, dict[str, Any]]:
    """What was written of each batch: it is the same as often as it was trained on."""
    found: dict[int, dict[str, Any]] = {}
    for row in journal.read():
        if "step" in row:
            assert found.setdefault(row["step"], row) == row
    return found


def uninterrupted(ranks: Ranks, folder: Path, num: int, given: dict[str, Any]) -> Journal:
    """Accelerate's own run."""
    if given.get("fsdp"):
        plugin = pytest.importorskip("accelerate").FullyShardedDataParallelPlugin
        if "fsdp_version" not in plugin.__dataclass_fields__:
            pytest.skip("this accelerate has no FSDP2")
    options, own = run_of(folder, "own", **{**given, "use": "own"})
    assert ranks.run(options, num) == [0] * num
    return own


def compare(
    ranks: Ranks, folder: Path, own: Journal, num: int, given: dict[str, Any], die: int
) -> None:
    """Kill a run, let it end, and hold it against one that was not."""
    options, journal = run_of(folder, "killed", **given)
    ranks.die({**options, "die": die}, num)
    assert ranks.run(options, num) == [0] * num
    assert rows_of(journal) == rows_of(own)
    assert journal.read()[-1] == own.read()[-1]


@pytest.mark.soak
@pytest.mark.parametrize("name", ALONE)
def test_killed_alone(name: str, ranks: Ranks, tmp_path: Path) -> None:
    own = uninterrupted(ranks, tmp_path, 1, ALONE[name])
    compare(ranks, tmp_path, own, 1, ALONE[name], 40)


EPOCHS: dict[str, dict[str, Any]] = {
    "plain": {},
    "generator": {"generator": True},
    "seedable": {"loader": {"use_seedable_sampler": True}},
    "seedable, dispatched": {"loader": {"use_seedable_sampler": True, "dispatch_batches": True}},
    "sampler": {"ordered": True},
    "stream": {"streams": True},
    "stream, not dispatched": {"streams": True, "loader": {"dispatch_batches": False}},
}


@pytest.mark.soak
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, "alone") for kind in EPOCHS if kind != "seedable, dispatched"]
    + [(kind, "ddp") for kind in ("plain", "generator", "seedable", "sampler")],
)
@pytest.mark.parametrize(
    ("step", "skips_all"), [(12, False), (13, False), (13, True), (26, False), (26, True)]
)
def test_killed_about_the_end_of_an_epoch(
    step: int, kind: str, layout: str, skips_all: bool, ranks: Ranks, tmp_path: Path
) -> None:
    """An epoch has 13 batches, and an order of its own, which follows from its number.  At step 26 the pass
    over the loader began where a killed run was, so it is one that skips batches."""
    num, given = LAYOUTS[layout]
    given = {**given, "accumulate": 1, "waits": True, "skips_all": skips_all, **EPOCHS[kind]}
    own = uninterrupted(ranks, tmp_path, num, given)
    options, journal = run_of(tmp_path, "killed", **given)
    for die in [28] * (step == 26) + [2 * (step - 14 * (step == 26)), 0]:
        (ranks.die if die else ranks.finish)({**options, "die": die}, num)
    restored = [row["restored"] for row in journal.read() if "restored" in row]
    assert restored[-1] == step
    assert rows_of(journal) == rows_of(own)
    assert journal.read()[-1] == own.read()[-1]


@pytest.mark.soak
@pytest.mark.parametrize("step", [12, 13])
def test_killed_where_a_loader_dispatches(step: int, ranks: Ranks, tmp_path: Path) -> None:
    """Alone.  Accelerate's own dispatcher fails where nothing is left after what is skipped."""
    given = {"accumulate": 1, "waits": True, **EPOCHS["seedable, dispatched"]}
    own = uninterrupted(ranks, tmp_path, 1, given)
    compare(ranks, tmp_path, own, 1, given, 2 * step)


@pytest.mark.soak
@pytest.mark.distributed
def test_data_that_may_be_others_are_told(ranks: Ranks, tmp_path: Path) -> None:
    """On two ranks, in the middle of an epoch."""
    given = {"accumulate": 1, **EPOCHS["seedable, dispatched"]}
    options, _ = run_of(tmp_path, "run", **given)
    before = len(ranks.log.read_text())
    ranks.finish(options, 2)
    assert "may get other data than the uninterrupted run" in ranks.log.read_text()[before:]


@pytest.mark.soak
@pytest.mark.parametrize("die", [16, 24, 26, 28, 56])
def test_a_worker_that_stays_is_not_seeded_anew(die: int, ranks: Ranks, tmp_path: Path) -> None:
    """Killed in each epoch, and about the end of one: a restart draws no seed for workers that stayed."""
    given = {"accumulate": 1, "waits": True, "workers": 1, "persistent": True}
    own = uninterrupted(ranks, tmp_path, 1, given)
    compare(ranks, tmp_path, own, 1, given, die)


@pytest.mark.soak
@pytest.mark.distributed
@pytest.mark.parametrize("batch", [2, 4])
def test_a_place_in_other_batches_is_told(batch: int, ranks: Ranks, tmp_path: Path) -> None:
    """From two ranks with batches of 2 to one: the place is the same in batches of 4 alone."""
    given = {"accumulate": 1, "waits": True, "batch": 2}
    options, _ = run_of(tmp_path, "killed", **given)
    ranks.die({**options, "die": 10}, 2)
    before = len(ranks.log.read_text())
    assert ranks.run({**options, "batch": batch}) == [0]
    told = (
        "'loader' in the data was saved over batches of 4 over all ranks"
        in (ranks.log.read_text()[before:])
    )
    assert told == (batch == 2)


@pytest.mark.soak
@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_at_ten_random_moments(layout: str, ranks: Ranks, tmp_path: Path) -> None:
    num, given = LAYOUTS[layout]
    draw = random.Random(layout)
    own = uninterrupted(ranks, tmp_path, num, given)
    for number in range(10):
        (folder := tmp_path / str(number)).mkdir()
        compare(ranks, folder, own, num, given, draw.randint(1, 78))


@pytest.mark.soak
@pytest.mark.distributed
@pytest.mark.parametrize(("layout", "dying"), [("alone", [0]), ("ddp", [1])])
def test_sigterm(layout: str, dying: list[int], ranks: Ranks, tmp_path: Path) -> None:
    """After the save of step 8: the next `save_state` is of step 10, and all ranks stop there."""
    num, given = LAYOUTS[layout]
    own = uninterrupted(ranks, tmp_path, num, given)
    options, journal = run_of(tmp_path, "stopped", **given, holdfast={"sigterm_s": "60"})
    ended = ranks.run({**options, "die": 16, "by": signal.SIGTERM, "dying": dying}, num)
    assert set(ended) <= {128 + signal.SIGTERM, KILLED} and 128 + signal.SIGTERM in ended
    assert holdfast.steps(tmp_path / "stopped" / "holdfast")[-1] == 10
    ranks.finish(options, num)
    assert rows_of(journal) == rows_of(own)
    assert journal.read()[-1] == own.read()[-1]


@pytest.mark.soak
@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_two_ranks_and_then_one(layout: str, ranks: Ranks, tmp_path: Path) -> None:
    """The same samples in the same order, without dropout; sums are added in another order.

    Accelerate steps a scheduler once for each rank, so one on fewer ranks is a slower one: it is left out.
    """
    num, given = LAYOUTS[layout]
    given = {**given, "drop": 0.0, "noisy": False, "noise": False, "size": 48}
    given["period"] = 10**6
    given["loader"] = {"use_seedable_sampler": True, "data_seed": 5}
    own = uninterrupted(ranks, tmp_path, num, given)
    expected = {step: row["loss"] for step, row in rows_of(own).items()}
    draw = random.Random(layout)
    for number in range(3):
        (folder := tmp_path / str(number)).mkdir()
        options, journal = run_of(folder, "killed", **given)
        ranks.die({**options, "die": draw.randint(10, 60)}, num)
        assert ranks.run({**options, "fsdp": False, "batch": 4}) == [0]
        steps = [row for row in journal.read() if "step" in row]
        assert {row["step"] for row in steps} == set(expected)
        for row in steps:
            assert row["loss"] == pytest.approx(expected[row["step"]], rel=1e-4)


@pytest.mark.soak
def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from holdfast.integrations.accelerate import attach

    with pytest.raises(holdfast.errors.UsageError, match="no project_dir"):
        attach(accelerate.Accelerator(cpu=True))
    accelerator = attach(accelerate.Accelerator(cpu=True), tmp_path / "run")
    with pytest.raises(holdfast.errors.UsageError, match="does not end with a step's number"):
        accelerator.save_state("checkpoint")
    accelerator.end_training()


@pytest.mark.soak
@pytest.mark.parametrize(
    "register", ["register_save_state_pre_hook", "register_load_state_pre_hook"]
)
def test_hooks_of_checkpoints_are_refused(register: str, tmp_path: Path) -> None:
    """Whether they come before or after: no step would run them, whoever saves and restores it."""
    accelerate = pytest.importorskip("accelerate")
    from holdfast.integrations.accelerate import attach

    accelerator = attach(accelerate.Accelerator(cpu=True), tmp_path / "run")
    with pytest.raises(holdfast.errors.UsageError, match="register_for_checkpointing"):
        getattr(accelerator, register)(lambda *_: None)
    accelerator.end_training()
    with_one = accelerate.Accelerator(cpu=True)
    getattr(with_one, register)(lambda *_: None)
    with pytest.raises(holdfast.errors.UsageError, match="register_for_checkpointing"):
        attach(with_one, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.soak
@pytest.mark.parametrize(
    "name", ["prepare_model", "prepare_optimizer", "prepare_scheduler", "by hand"]
)
def test_what_is_prepared_by_itself_is_saved(name: str, tmp_path: Path) -> None:
    """Each of the objects is prepared after all the others once, by the method for its kind, and saved by
    `save_state` and by `step`."""
    from accelerate import Accelerator

    from holdfast.integrations.accelerate import attach

    def made() -> tuple[Any, list[Any]]:
        accelerator = attach(Accelerator(cpu=True), tmp_path / "root")
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        objects: dict[str, Any] = {"prepare_model": model, "prepare_optimizer": optimizer}
        objects["prepare_scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        last = objects.pop(name, None)
        prepared = [getattr(accelerator, method)(one) for method, one in objects.items()]
        if last is not None:
            prepared.append(getattr(accelerator, name)(last))
        else:
            accelerator._custom_objects.append(torch.optim.lr_scheduler.StepLR(optimizer, 3))
        return accelerator, prepared

    expected = {"model", "optimizer", "scheduler"} | ({"custom"} if name == "by hand" else set())
    accelerator, _ = made()
    accelerator.save_state("step_1")
    if name != "by hand":
        accelerator.holdfast.save(2)
    accelerator.end_training()
    for step in holdfast.steps(tmp_path / "root"):
        with holdfast.open(tmp_path / "root", step=step) as saved:
            parts = {part.partition(".")[0] for part in [*saved.names(), *saved.extras]}
        assert expected <= parts
    accelerator, _ = made()
    assert accelerator.load_state() == (1 if name == "by hand" else 2)
    accelerator.end_training()


def attached(folder: Path, *, attaches: bool = True) -> tuple[Any, torch.nn.Linear]:
    """An Accelerator that names its checkpoints itself."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from holdfast.integrations.accelerate import attach

    config = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=config)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    return attach(accelerator) if attaches else accelerator, model


@pytest.mark.soak
def test_a_run_that_moves_over_goes_on_from_the_newest_folder(tmp_path: Path) -> None:
    """Which Accelerate has named itself; as long as the root has no step."""
    pytest.importorskip("accelerate")
    accelerator, model = attached(tmp_path, attaches=False)
    accelerator.project_configuration.iteration = 9
    for value in (9.0, 10.0):
        torch.nn.init.constant_(model.weight, value)
        accelerator.save_state()
    (tmp_path / "checkpoints" / "of mine").mkdir()
    accelerator, model = attached(tmp_path)
    assert accelerator.load_state(map_location="cpu") is None
    assert model.weight.item() == 10.0
    torch.nn.init.constant_(model.weight, 11.0)
    accelerator.save_state()
    accelerator.end_training()
    assert holdfast.steps(tmp_path / "holdfast") == [11]
    accelerator, model = attached(tmp_path)
    assert accelerator.load_state() == 11 and model.weight.item() == 11.0
    accelerator.end_training()


def test_a_folder_of_accelerates_own_that_is_newer_is_told(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    accelerator, _ = attached(tmp_path)
    accelerator.save_state()
    accelerator.end_training()
    for number in (0, 7):
        (tmp_path / "checkpoints" / f"checkpoint_{number}").mkdir(parents=True)
        accelerator, _ = attached(tmp_path)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert accelerator.load_state() == 0
        texts = [str(one.message) for one in told if "newer-native" in str(one.message)]
        assert ["checkpoint_7" in text for text in texts] == [True] * (number == 7)
        accelerator.end_training()


@pytest.mark.soak
@pytest.mark.parametrize(
    "given", [{"load_module_only": True}, {"load_kwargs": {"pickle_module": None}}]
)
def test_arguments_for_files_are_refused_for_a_step(given: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    accelerator, _ = attached(tmp_path)
    accelerator.save_state()
    for folder in (None, "step_0"):
        with pytest.raises(holdfast.errors.UsageError, match=r"load_module|pickle_module"):
            accelerator.load_state(folder, map_location="cpu", **given)
    how = {"mmap": True, "weights_only": False, "map_location": "cpu"}
    for load_kwargs in ({}, how):
        assert accelerator.load_state("step_0", map_location="cpu", load_kwargs=load_kwargs) == 0
    accelerator.end_training()


@pytest.mark.soak
def test_without_a_project_dir_folders_of_the_working_directory_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from holdfast.integrations.accelerate import attach

    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints/checkpoint_3").mkdir(parents=True)
    config = ProjectConfiguration(automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=config)
    accelerator.prepare(torch.nn.Linear(1, 1))
    attach(accelerator, tmp_path / "root")
    assert accelerator.load_state() == 0
    accelerator.end_training()


@pytest.mark.soak
def test_a_stateful_loader_is_saved_again_before_it_goes_on(tmp_path: Path) -> None:
    """It is where it was."""
    pytest.importorskip("torchdata")
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from holdfast.integrations.accelerate import attach

    def run(*, loads: bool, num_batches: int) -> list[list[int]]:
        config = DataLoaderConfiguration(use_stateful_dataloader=True)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        model = torch.nn.Linear(1, 1)
        loader, model = accelerator.prepare(torch.utils.data.DataLoader(range(12)), model)
        attach(accelerator, tmp_path / "root")
        at = int(accelerator.load_state()) if loads else 0
        seen = [one.tolist() for _, one in zip(range(num_batches), loader)]
        accelerator.save_state(str(tmp_path / f"checkpoint-{at + 1}"))
        accelerator.end_training()
        return seen

    first = run(loads=False, num_batches=3)
    assert run(loads=True, num_batches=0) == []
    assert (first, run(loads=True, num_batches=2)) == ([[0], [1], [2]], [[3], [4]])
