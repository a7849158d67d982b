"""transformers' Trainer over holdfast: killed at any moment and started again, it ends as it would have.

Every loss that any of the processes logged, and the weights at the end, are compared bit for bit with those
of the Trainer's own run, which nobody has interrupted.
"""

from __future__ import annotations

import json
import random
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import holdfast
from integrations.trainers.forked import Ranks
from integrations.trainers.tiny import KILLED, OFFLINE, Data, Journal, Net, Stream, digest, run_of

BEST = {
    "eval_strategy": "steps",
    "eval_steps": 3,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "save_total_limit": 2,
}
EVERY_STEP = {"every": "holdfast.Every(delta=1)", "delta": "holdfast.Delta()"}
WORKERS = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
ALONE: dict[str, dict[str, Any]] = {
    "plain": {},
    "data drawn anew": {"noisy": True},
    "logged each four steps": {"args": {"logging_steps": 4}},
    "best model": {"args": BEST, "early": True},
    "at each epoch": {"args": {"save_strategy": "epoch", "eval_strategy": "epoch"}},
    "adapter": {"lora": True},
    "workers that stay": {"args": {**WORKERS, "eval_strategy": "steps", "eval_steps": 3}},
    "records": {"args": {"save_steps": 10}, "holdfast": EVERY_STEP},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "ddp": (2, {"args": {"per_device_train_batch_size": 2}}),
    "fsdp": (2, {"fsdp": True, "args": {"per_device_train_batch_size": 2}}),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    log = tmp_path_factory.mktemp("ranks") / "log"
    with Ranks("integrations.trainers.train_transformers", log, **OFFLINE) as found:
        yield found


def losses(rows: list[dict[str, Any]]) -> set[tuple[Any, ...]]:
    return {tuple(sorted(row.items())) for row in rows if "end" not in row}


def uninterrupted(ranks: Ranks, folder: Path, num: int, given: dict[str, Any]) -> Journal:
    """The Trainer's own run."""
    options, own = run_of(folder, "own", own=True, **given)
    assert ranks.run(options, num) == [0] * num
    return own


def compare(
    ranks: Ranks, folder: Path, own: Journal, num: int, given: dict[str, Any], die: int
) -> None:
    """Kill a run, let it end, and hold it against one that was not."""
    options, journal = run_of(folder, "killed", **given)
    ranks.die({**options, "die": die}, num)
    assert ranks.run(options, num) == [0] * num
    expected, seen = own.read(), journal.read()
    assert losses(seen) == losses(expected)
    assert seen[-1] == expected[-1]


@pytest.mark.soak
@pytest.mark.parametrize("name", ALONE)
def test_killed_alone(name: str, ranks: Ranks, tmp_path: Path) -> None:
    own = uninterrupted(ranks, tmp_path, 1, ALONE[name])
    compare(ranks, tmp_path, own, 1, ALONE[name], 40)


@pytest.mark.soak
@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_at_ten_random_moments(layout: str, ranks: Ranks, tmp_path: Path) -> None:
    num, given = LAYOUTS[layout]
    draw = random.Random(layout)
    own = uninterrupted(ranks, tmp_path, num, given)
    for number in range(10):
        (folder := tmp_path / str(number)).mkdir()
        compare(ranks, folder, own, num, given, draw.randint(1, 60))


@pytest.mark.soak
@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_two_ranks_and_then_one(layout: str, ranks: Ranks, tmp_path: Path) -> None:
    """The same samples in the same order; sums are added in another one."""
    num, given = LAYOUTS[layout]
    given = {**given, "drop": 0.0, "size": 48}
    own = uninterrupted(ranks, tmp_path, num, given)
    expected = {row["step"]: row["loss"] for row in own.read() if "end" not in row}
    draw = random.Random(layout)
    for number in range(3):
        (folder := tmp_path / str(number)).mkdir()
        options, journal = run_of(folder, "killed", **given)
        ranks.die({**options, "die": draw.randint(10, 50)}, num)
        alone = {**options, "fsdp": False, "args": {"per_device_train_batch_size": 4}}
        assert ranks.run(alone) == [0]
        steps = [row for row in journal.read() if "end" not in row]
        assert {row["step"] for row in steps} == set(expected)
        for row in steps:
            assert row["loss"] == pytest.approx(expected[row["step"]], rel=1e-4)


@pytest.mark.soak
@pytest.mark.parametrize("die", [15, 19, 22])
def test_workers_that_stay_are_not_seeded_anew(die: int, ranks: Ranks, tmp_path: Path) -> None:
    """Killed in the first epoch, about its end, and in the second one."""
    given = {"args": {**WORKERS, "save_steps": 1}}
    own = uninterrupted(ranks, tmp_path, 1, given)
    compare(ranks, tmp_path, own, 1, given, die)


@pytest.mark.soak
@pytest.mark.distributed
@pytest.mark.parametrize("batch", [2, 4])
def test_a_place_in_other_batches_is_told(batch: int, ranks: Ranks, tmp_path: Path) -> None:
    """From two ranks with batches of 2 to one: the place is the same in batches of 4 alone."""
    options, _ = run_of(tmp_path, "killed", args={"per_device_train_batch_size": 2})
    ranks.die({**options, "die": 16}, 2)
    before = len(ranks.log.read_text())
    assert ranks.run({**options, "args": {"per_device_train_batch_size": batch}}) == [0]
    told = "was saved over 8 samples for an update" in ranks.log.read_text()[before:]
    assert told == (batch == 2)


@pytest.mark.soak
@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sigterm(layout: str, ranks: Ranks, tmp_path: Path) -> None:
    """With the Trainer's own switch for it, all ranks save one step, whenever each of them is told."""
    num, given = LAYOUTS[layout]
    own = uninterrupted(ranks, tmp_path, num, given)
    given = {**given, "args": {**given.get("args", {}), "enable_jit_checkpoint": True}}
    given["args"]["save_steps"] = 1000
    options, journal = run_of(tmp_path, "stopped", **given)
    ended = ranks.run({**options, "die": 16, "by": signal.SIGTERM}, num)
    assert set(ended) <= {128 + signal.SIGTERM, KILLED} and 128 + signal.SIGTERM in ended
    assert holdfast.steps(tmp_path / "stopped" / "holdfast")[0] in (8, 9, 10)
    assert ranks.run(options, num) == [0] * num
    assert losses(journal.read()) == losses(own.read())
    assert journal.read()[-1] == own.read()[-1]


@pytest.mark.soak
def test_only_an_adapter_is_kept_and_its_config_beside_it(ranks: Ranks, tmp_path: Path) -> None:
    options, _ = run_of(tmp_path, "run", lora=True)
    assert ranks.run(options) == [0]
    with holdfast.open(tmp_path / "run" / "holdfast") as saved:
        weights = [name for name in saved.names() if name.startswith("model.")]
        assert weights and all("lora_" in name for name in weights)
        assert {"config.json", "adapter_config.json"} <= set(saved.files)


def damage_the_newest(root: Path) -> int:
    """Change one bit of the newest step's image; return the step."""
    newest = holdfast.steps(root)[-1]
    (image,) = (root / "steps" / f"{newest:010}").rglob("*.safetensors")
    content = bytearray(image.read_bytes())
    content[len(content) // 3] ^= 1
    image.write_bytes(content)
    return newest


@pytest.mark.soak
@pytest.mark.parametrize("hidden", [32, 4096], ids=["at first sight", "as it is restored"])
def test_a_damaged_step_is_passed_over(hidden: int, ranks: Ranks, tmp_path: Path) -> None:
    """A small image is read whole before the Trainer begins; of a large one, the weights are not."""
    options, journal = run_of(tmp_path, "killed", hidden=hidden)
    ranks.die({**options, "die": 40})
    first = journal.read()
    root = tmp_path / "killed" / "holdfast"
    newest = damage_the_newest(root)
    assert ranks.run(options) == [0]
    again = journal.read()[len(first) :]
    assert again[0]["step"] == holdfast.steps(root)[0] + 1 or again[0]["step"] <= newest
    assert losses(first) & losses(again) == {
        one for one in losses(first) if dict(one)["step"] >= again[0]["step"]
    }


STREAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "not dispatched": {"args": {"accelerator_config": {"dispatch_batches": False}}},
    "at each epoch": {"size": 48, "args": {"save_strategy": "epoch", "eval_strategy": "epoch"}},
    "whole passes": {"size": 48},
    "memory": {"holdfast": {"every": "holdfast.Every(memory=1)", "memory": "holdfast.Memory()"}},
    "memory, at each epoch": {
        "size": 48,
        "args": {"save_strategy": "epoch", "eval_strategy": "epoch"},
        "holdfast": {"every": "holdfast.Every(memory=1)", "memory": "holdfast.Memory()"},
    },
}


@pytest.mark.soak
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_without_length(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """A pass has 6 steps, and one batch more of which the Trainer keeps the gradients for the next; each
    pass has an order of its own."""
    given = {"streams": True, "noisy": True, **STREAMS[name]}
    own = uninterrupted(ranks, tmp_path, 1, given)
    for moment in (11, 14, 15, 16, 17, 18, 29, 31, 33, 40):
        folder = tmp_path / str(moment)
        folder.mkdir()
        compare(ranks, folder, own, 1, given, moment)


@pytest.mark.soak
@pytest.mark.distributed
def test_a_stream_on_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """The first one reads it for both; where each does, it is told that samples at random may be others."""
    own_args = {"per_device_train_batch_size": 2}
    given = {"streams": True, "noisy": True, "args": own_args}
    own = uninterrupted(ranks, tmp_path, 2, given)
    for moment in (11, 16, 29):
        folder = tmp_path / str(moment)
        folder.mkdir()
        compare(ranks, folder, own, 2, given, moment)
    assert "each rank reads the stream" not in ranks.log.read_text()
    alone = {**given, "args": {**own_args, "accelerator_config": {"dispatch_batches": False}}}
    options, _ = run_of(tmp_path, "alone", **alone)
    assert ranks.run(options, 2) == [0, 0]
    assert "each rank reads the stream" in ranks.log.read_text()


@pytest.mark.soak
def test_a_stream_is_killed_twice_at_one_place(ranks: Ranks, tmp_path: Path) -> None:
    """What a restart saves at once, as it was in memory alone, leads on as well."""
    given = {"streams": True, "noisy": True, **STREAMS["memory"]}
    own = uninterrupted(ranks, tmp_path, 1, given)
    options, journal = run_of(tmp_path, "killed", **given)
    for die in (35, 1, 1):
        ranks.die({**options, "die": die}, 1)
    assert ranks.run(options) == [0]
    assert losses(journal.read()) == losses(own.read())
    assert journal.read()[-1] == own.read()[-1]


@pytest.mark.soak
def test_a_stream_is_saved_at_the_end_of_each_epoch(ranks: Ranks, tmp_path: Path) -> None:
    options, _ = run_of(tmp_path, "run", streams=True, size=48, args={"save_strategy": "epoch"})
    assert ranks.run(options) == [0]
    assert holdfast.steps(tmp_path / "run" / "holdfast") == [6, 12, 18, 24, 26]


def trained(folder: Path, data: Any, *callbacks: Any, **given: Any) -> Any:
    """A training in this process."""
    transformers = pytest.importorskip("transformers")
    from holdfast.integrations.transformers import with_holdfast

    args = transformers.TrainingArguments(str(folder), report_to=[], use_cpu=True, **given)
    trainer = with_holdfast(transformers.Trainer)(
        Net(), args, train_dataset=data, eval_dataset=Data(8), callbacks=list(callbacks)
    )
    return trainer.train(resume_from_checkpoint=True)


@pytest.mark.soak
@pytest.mark.parametrize("saves_at", ["epoch", "best"])
def test_a_trainer_that_saves_by_epochs_is_not_told_that_it_saves_nothing(
    saves_at: str, tmp_path: Path
) -> None:
    given = {"save_strategy": saves_at, "eval_strategy": "epoch", "metric_for_best_model": "loss"}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trained(tmp_path, Data(16), num_train_epochs=2, **given)
    assert not [one for one in told if "saves nothing" in str(one.message)]
    assert holdfast.steps(tmp_path / "holdfast")[0] == 2


@pytest.mark.soak
def test_a_folder_of_the_trainers_own_that_is_newer_is_told(tmp_path: Path) -> None:
    given = {"save_steps": 1, "max_steps": 2}
    trained(tmp_path, Data(16), **given)
    (tmp_path / "checkpoint-7").mkdir()
    with pytest.warns(holdfast.HoldfastWarning, match=r"step 2 .*checkpoint-7, .*\[newer-native\]"):
        trained(tmp_path, Data(16), **given)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("extras", "error", "text"),
    [
        (
            {},
            holdfast.errors.UsageError,
            "step 2 was not saved by the Trainer: there is no 'trainer'",
        ),
        ({"trainer": 3}, holdfast.errors.UsageError, "step 2 was not saved by the Trainer"),
        ({"trainer": {}}, holdfast.errors.FormatError, "state is damaged: KeyError"),
        ({"trainer": {"json": "{"}}, holdfast.errors.FormatError, "state is damaged: JSON"),
        ({"trainer": {"json": "[1]"}}, holdfast.errors.FormatError, "state is damaged: Type"),
    ],
)
def test_a_root_of_something_else_is_refused(
    tmp_path: Path, extras: dict[str, Any], error: type[Exception], text: str
) -> None:
    holdfast.save(tmp_path / "holdfast", {"model": Net(), **extras}, step=2)
    with pytest.raises(error, match=text):
        trained(tmp_path, Data(16), max_steps=4)


@pytest.mark.soak
def test_gradients_that_a_pass_leaves_are_told(tmp_path: Path) -> None:
    given = {"save_strategy": "epoch", "max_steps": 3, "per_device_train_batch_size": 4}
    with pytest.warns(holdfast.HoldfastWarning, match="step 1 is saved while gradients are"):
        trained(tmp_path, Stream(Data(12)), gradient_accumulation_steps=2, **given)


@pytest.mark.soak
def test_a_run_that_a_callback_had_ended_is_told(tmp_path: Path) -> None:
    """The Trainer trains on, and its callbacks begin anew."""
    transformers = pytest.importorskip("transformers")

    class Ends(transformers.EarlyStoppingCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step == 4

    given = {"eval_strategy": "steps", "metric_for_best_model": "loss", "eval_steps": 100}
    given |= {"save_steps": 2, "max_steps": 8}
    assert trained(tmp_path, Data(64), Ends(1), **given).global_step == 4
    with pytest.warns(holdfast.HoldfastWarning) as told:
        assert trained(tmp_path, Data(64), Ends(1), **given).global_step == 8
    texts = [str(one.message) for one in told]
    assert any("had ended this run at step 4" in text for text in texts)
    assert any("begin anew, without their state of step 4: Ends" in text for text in texts)


@pytest.mark.soak
@pytest.mark.parametrize("are_stateful", [False, True])
def test_a_run_that_had_ended_takes_no_step_more(
    are_stateful: bool, ranks: Ranks, tmp_path: Path
) -> None:
    """And a pass over the same data after it is a new one, of data that keep their own position, too."""
    options, journal = run_of(tmp_path, "run", judge=True, are_stateful=are_stateful)
    assert ranks.run(options) == [0]
    before = journal.read()
    assert ranks.run(options) == [0]
    assert losses(journal.read()) == losses(before)
    assert journal.read()[-1] == before[-1]


@pytest.mark.soak
def test_the_best_step_stays(ranks: Ranks, tmp_path: Path) -> None:
    options, _ = run_of(tmp_path, "run", args={**BEST, "save_total_limit": 1}, early=True)
    assert ranks.run(options) == [0]
    assert len(holdfast.steps(tmp_path / "run" / "holdfast")) <= 2
    (
        folder := tmp_path / "run" / "checkpoint-1"
    ).mkdir()  # which the Trainer compares with the best
    assert ranks.run(options) == [0]
    assert folder.exists()


@pytest.mark.soak
@pytest.mark.distributed
def test_all_ranks_go_on_from_what_the_first_one_finds(ranks: Ranks, tmp_path: Path) -> None:
    """The Trainer makes output_dir for the first rank alone, where it is a folder of each node."""
    options, journal = run_of(tmp_path, "run", apart=True, args={"max_steps": 3})
    assert ranks.run(options, 2) == [0, 0]
    assert journal.read()[-1]["step"] == 3
    options, _ = run_of(tmp_path, "moved", apart=True, args={"max_steps": 3})
    (tmp_path / "moved-0" / "out" / "checkpoint-1").mkdir(parents=True)
    for resume in (True, "out/checkpoint-1"):
        before = ranks.log.stat().st_size
        ended = ranks.run({**options, "resume": resume}, 2)
        assert set(ended) <= {1, KILLED} and 1 in ended
        assert b"some ranks lack the folder" in ranks.log.read_bytes()[before:]


def saved_state(root: Path, step: int) -> dict[str, Any]:
    """What the Trainer keeps in trainer_state.json, of a step."""
    with holdfast.Checkpointer(root) as checkpointer:
        found = checkpointer.find(step)
    assert found is not None
    state: dict[str, Any] = json.loads(found.extras["trainer"]["json"])
    return state


@pytest.mark.soak
def test_a_smaller_batch_begins_a_log_of_its_own(ranks: Ranks, tmp_path: Path) -> None:
    args = {"auto_find_batch_size": True, "max_steps": 12, "save_steps": 11}
    options, journal = run_of(tmp_path, "run", args=args, full=11)
    assert ranks.run(options) == [0]
    logged = saved_state(tmp_path / "run" / "holdfast", 11)["log_history"]
    told = [row for row in journal.read() if "loss" in row][11:]  # by those of the smaller batch
    assert [entry["loss"] for entry in logged] == [row["loss"] for row in told[:11]]


@pytest.mark.soak
def test_an_evaluation_before_the_first_step_is_of_no_step(ranks: Ranks, tmp_path: Path) -> None:
    args = {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 2}
    options, _ = run_of(tmp_path, "run", args={**args, "save_steps": 1, "max_steps": 2})
    assert ranks.run(options) == [0]
    root = tmp_path / "run" / "holdfast"
    with holdfast.open(root, step=1) as first, holdfast.open(root, step=2) as second:
        assert not first.metrics and "eval_loss" in second.metrics


@pytest.mark.soak
def test_what_is_no_metric_does_not_end_the_training(tmp_path: Path) -> None:
    """Booleans and long names are left out of the step, which is told once."""
    transformers = pytest.importorskip("transformers")
    from holdfast.integrations.transformers import HoldfastTrainer

    given = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "max_steps": 2}
    args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, **given)
    found = {"ok": True, "of " + "x" * 100: 1.0, "sum": 2}
    data = {"train_dataset": Data(16), "eval_dataset": Data(8)}
    trainer = HoldfastTrainer(Net(), args, **data, compute_metrics=lambda _: dict(found))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.train()
    texts = [
        str(one.message)
        for one in told
        if "values of its evaluation that are no metrics" in str(one.message)
    ]
    assert len(texts) == 1 and "'eval_ok', 'eval_of xxx" in texts[0]
    for step in (1, 2):
        with holdfast.open(tmp_path / "holdfast", step=step) as saved:
            assert saved.metrics["eval_sum"] == 2.0 and "eval_loss" in saved.metrics
            assert not {name for name in saved.metrics if name.startswith("eval_o")}


def weights_of(root: Path, step: int) -> str:
    """A hash of the model that a step has."""
    model = Net()
    holdfast.load(root, {"model": model}, step=step)
    return digest(model)


@pytest.mark.soak
def test_the_best_step_stays_after_sigterm_in_its_evaluation(ranks: Ranks, tmp_path: Path) -> None:
    args = {**BEST, "max_steps": 15, "enable_jit_checkpoint": True}
    losses = {"3": 0.9, "6": 0.1, "9": 0.5, "12": 0.5, "15": 0.5}
    options, journal = run_of(tmp_path, "run", args=args, losses=losses)
    assert ranks.run({**options, "stop": 6}) == [128 + signal.SIGTERM]
    assert ranks.run(options) == [0]
    root = tmp_path / "run" / "holdfast"
    assert 6 in holdfast.steps(root)
    assert journal.read()[-1]["end"] == weights_of(root, 6)


@pytest.mark.soak
def test_the_best_of_the_steps_that_were_saved_is_loaded(ranks: Ranks, tmp_path: Path) -> None:
    """As by the Trainer itself, which evaluates more often than it saves; resumed, too."""
    losses = {"3": 0.9, "6": 0.3, "9": 0.1, "12": 0.5}
    args = {**BEST, "save_steps": 6, "max_steps": 12}
    options, journal = run_of(tmp_path, "run", args=args, losses=losses)
    assert ranks.run(options) == [0]
    best = weights_of(tmp_path / "run" / "holdfast", 6)
    assert journal.read()[-1]["end"] == best
    assert ranks.run(options) == [0]
    assert journal.read()[-1]["end"] == best


@pytest.mark.soak
def test_the_best_of_a_run_that_moved_over_is_loaded(ranks: Ranks, tmp_path: Path) -> None:
    """From the folder that the Trainer itself has written; resumed from a step of ours, too."""
    losses = {"3": 0.1, "6": 0.5, "9": 0.5, "12": 0.5}
    options, journal = run_of(tmp_path, "run", losses=losses)
    assert ranks.run({**options, "own": True, "args": {**BEST, "max_steps": 6}}) == [0]
    best = journal.read()[-1]["end"]
    for _ in range(2):
        assert ranks.run({**options, "args": {**BEST, "max_steps": 12}}) == [0]
        end = journal.read()[-1]
        assert end["step"] == 12 and end["end"] == best
    assert holdfast.steps(tmp_path / "run" / "holdfast") == [9, 12]


@pytest.mark.soak
def test_a_step_has_the_weights_that_were_evaluated(tmp_path: Path) -> None:
    """With an optimizer that exchanges weights for an evaluation, and back before the next step."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("schedulefree")
    from holdfast.integrations.transformers import HoldfastTrainer

    evaluated: dict[int, str] = {}

    class Evaluated(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            evaluated[state.global_step] = digest(more["model"])

    given: dict[str, Any] = {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"}
    given |= {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "learning_rate": 0.01}
    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=6, report_to=[], use_cpu=True, **given
    )
    model = Net(hidden=4096)
    trainer = HoldfastTrainer(
        model, args, train_dataset=Data(64), eval_dataset=Data(8), callbacks=[Evaluated()]
    )
    trainer.train()
    assert len(set(evaluated.values())) == 3
    for step in holdfast.steps(tmp_path / "holdfast"):
        saved = Net(hidden=4096)
        holdfast.load(tmp_path / "holdfast", {"model": saved}, step=step)
        assert digest(saved) == evaluated[step], step


@pytest.mark.soak
@pytest.mark.parametrize("root", ["out/holdfast", "out/a[1]/root", "out", "elsewhere"])
def test_a_push_to_the_hub_leaves_the_root_out(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    from holdfast.integrations.transformers import HoldfastTrainer

    pushed: list[str] = []

    def upload_folder(api: Any, *, folder_path: str, ignore_patterns: Any, **_: Any) -> None:
        files = [
            str(p.relative_to(folder_path)) for p in Path(folder_path).rglob("*") if p.is_file()
        ]
        pushed.extend(filter_repo_objects(files, ignore_patterns=ignore_patterns))

    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
    args = transformers.TrainingArguments(
        str(tmp_path / "out"), max_steps=2, save_steps=1, report_to=[], use_cpu=True
    )
    given = {} if root == "out/holdfast" else {"root": tmp_path / root}
    trainer = HoldfastTrainer(Net(), args, train_dataset=Data(16), holdfast=given)
    trainer.train()
    assert holdfast.steps(tmp_path / root) == [1, 2]
    trainer.hub_model_id = "me/net"
    monkeypatch.setattr(trainer, "create_model_card", lambda **_: None)
    for _ in range(2):  # what is there already is pushed once more
        pushed.clear()
        trainer.push_to_hub()
        assert sorted(pushed) == ["model.safetensors", "training_args.bin"]


@pytest.mark.soak
def test_a_callback_of_ones_own_with_a_known_name(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from holdfast.integrations.transformers import HoldfastTrainer

    class WandbCallback(transformers.TrainerCallback):  # type: ignore[misc]
        pass

    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, save_steps=1, report_to=[], use_cpu=True
    )
    trainer = HoldfastTrainer(Net(), args, train_dataset=Data(16), callbacks=[WandbCallback()])
    trainer.train()
    assert holdfast.steps(tmp_path / "holdfast") == [1, 2]


UPLOADS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "WandbCallback": ({"WANDB_LOG_MODEL": "checkpoint"}, {}),
    "MLflowCallback": (
        {"HF_MLFLOW_LOG_ARTIFACTS": "1"},
        {"_ml_flow": None, "_auto_end_run": False},
    ),
    "NeptuneCallback": ({}, {"_log_checkpoints": "last", "_run": None}),
    "ClearMLCallback": ({}, {}),
    "FlyteCallback": ({}, {"sync_checkpoints": True}),
    "DVCLiveCallback": ({}, {"_log_model": "all"}),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", UPLOADS)
def test_a_callback_that_uploads_checkpoints_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name and before anything is saved: it would not find the folder of the first one."""
    pytest.importorskip("transformers")
    from transformers.integrations import integration_utils

    variables, attributes = UPLOADS[name]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    kind = getattr(integration_utils, name)
    if name == "WandbCallback":
        pytest.importorskip("wandb")
        callback = kind()
    else:  # the packages are not installed
        callback = kind.__new__(kind)
    vars(callback).update(
        attributes, _clearml=SimpleNamespace(Task=SimpleNamespace(current_task=dict))
    )
    with pytest.raises(holdfast.errors.UsageError, match=f"{name} uploads the folder"):
        trained(tmp_path, Data(8), callback, max_steps=2, save_steps=1)
    assert not (tmp_path / "holdfast").exists()


@pytest.mark.soak
def test_names_of_a_trainer_class_are_its_own(tmp_path: Path) -> None:
    """TRL's Trainers keep what they log in `_metrics`, by mode."""
    transformers = pytest.importorskip("transformers")
    from holdfast.integrations.transformers import HoldfastTrainer, _Holdfast

    args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    ours, plain = (one(Net(), args) for one in (HoldfastTrainer, transformers.Trainer))
    assert vars(ours).keys() - vars(plain).keys() == {"_holdfast"}
    for name in vars(_Holdfast):
        own = name.startswith(("_holdfast_", "__"))
        assert own or hasattr(transformers.Trainer, name), name


@pytest.mark.soak
def test_a_trainer_class_with_metrics_of_its_own(tmp_path: Path) -> None:
    """It also writes more than the Trainer into a checkpoint's folder, which is told once."""
    transformers = pytest.importorskip("transformers")
    from holdfast.integrations.transformers import with_holdfast

    class Tuned(transformers.Trainer):  # type: ignore[misc, name-defined]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._metrics: dict[str, list[float]] = {"train": [], "eval": []}
            self._pass = self._options = self._root = self._draws = "mine"

        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, *args, **kwargs)
            self._metrics["train" if model.training else "eval"].append(1.0)
            return loss

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            raise AssertionError

    given = {"report_to": [], "use_cpu": True, "max_steps": 4, "save_steps": 2}
    args = transformers.TrainingArguments(str(tmp_path), eval_strategy="epoch", **given)
    kind = with_holdfast(Tuned)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = kind(Net(), args, train_dataset=Data(32), eval_dataset=Data(8))
        trainer.train()
    texts = [str(one.message) for one in told]
    assert len([t for t in texts if "Tuned._save_checkpoint() is not called" in t]) == 1
    assert len(trainer._metrics["train"]) == 4 and trainer._metrics["eval"]
    assert trainer._pass == trainer._options == trainer._root == trainer._draws == "mine"
    assert holdfast.steps(tmp_path / "holdfast") == [2, 4]


@pytest.mark.soak
def test_methods_that_write_and_read_the_folder_are_told(tmp_path: Path) -> None:
    """By one warning.  What they keep is restored from where it says, and weights alone of a class that is
    known make no difference."""
    transformers = pytest.importorskip("transformers")
    from holdfast.integrations.transformers import HoldfastTrainer, with_holdfast

    class Two(transformers.Trainer):  # type: ignore[misc, name-defined]
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            self.second = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
            return super().create_optimizer(*args, **kwargs)

        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            raise AssertionError

        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            raise AssertionError

    class Kept(with_holdfast(Two)):  # type: ignore[misc]
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            made = super().create_optimizer(*args, **kwargs)
            self.accelerator.holdfast.state["second"] = self.second
            return made

    class Exported(HoldfastTrainer):
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)

    class Halves(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            trainer.second.param_groups[0]["lr"] /= 2

    modules = ("trl.trainer.ppo", "sentence_transformers.trainer")
    known = [
        type("Known", (transformers.Trainer,), {"save_model": None, "__module__": module})
        for module in modules
    ]

    def made(kind: Any, **given: Any) -> tuple[Any, list[str]]:
        given = {"report_to": [], "use_cpu": True, "save_steps": 1, **given}
        args = transformers.TrainingArguments(str(tmp_path), **given)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer = kind(Net(), args, train_dataset=Data(32))
        return trainer, [str(w.message) for w in told if " not called " in str(w.message)]

    trainer, texts = made(Kept, max_steps=1)
    saves, loads = (f"Two._{what}_optimizer_and_scheduler()" for what in ("save", "load"))
    assert len(texts) == 1 and texts[0].startswith(f"{saves}, {loads} are not called")
    assert made(Exported)[1][0].startswith("Exported._save() is not called")
    for kind in (HoldfastTrainer, *map(with_holdfast, known)):
        assert made(kind)[1] == []
    for max_steps in (1, 2):
        trainer, _ = made(Kept, max_steps=max_steps)
        trainer.add_callback(Halves)
        trainer.train(resume_from_checkpoint=True)
    assert trainer.second.param_groups[0]["lr"] == 0.125


@pytest.mark.soak
def test_what_cannot_be_done_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from holdfast.integrations import transformers as ours

    with pytest.raises(holdfast.errors.UsageError, match="HoldfastTrainer"):
        ours.HoldfastCallback("runs/x")
    with pytest.raises(holdfast.errors.UsageError, match="a class of transformers"):
        ours.with_holdfast(transformers.TrainerCallback)


@pytest.mark.soak
@pytest.mark.parametrize("holdfast_is", ["runs/steps", {"root": 5}])
def test_a_root_that_is_none_is_refused(holdfast_is: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from holdfast.integrations.transformers import HoldfastTrainer

    args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(holdfast.errors.UsageError, match=r"HoldfastTrainer\((holdfast|root)="):
        HoldfastTrainer(Net(), args, train_dataset=Data(16), holdfast=holdfast_is)


@pytest.mark.soak
def test_labels_and_metrics_that_cannot_be_written_do_not_end_the_training(tmp_path: Path) -> None:
    """Nor a resume, which labels the best step once more."""
    transformers = pytest.importorskip("transformers")

    class DamagesNotes(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:  # after two saves
                notes = Path(args.output_dir, "holdfast/steps/notes.json")
                notes.unlink()
                notes.mkdir()

    given = {
        "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True,
    }  # fmt: skip
    for last in (4, 6):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trained(tmp_path, Data(64), DamagesNotes(), max_steps=last, **given)
        texts = [str(one.message) for one in told]
        assert any("metrics of step" in text and "are not kept" in text for text in texts)
        assert holdfast.steps(tmp_path / "holdfast")[-1] == last
