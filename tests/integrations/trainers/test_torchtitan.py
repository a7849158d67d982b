"""torchtitan's checkpoint manager over holdfast, in real processes, with its real parts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torchtitan")

from torch import nn

import holdfast
from holdfast.errors import UsageError
from holdfast.integrations.torchtitan import HoldfastCheckpointManager
from integrations.trainers import titan
from integrations.trainers.forked import Ranks, losses, value
from integrations.trainers.weights import digest

pytestmark = [pytest.mark.soak, pytest.mark.distributed]

KINDS = {"single": 1, "ddp": 2, "fsdp2": 2}


def settings(tmp_path: Path, kind: str = "single", **options: Any) -> titan.Settings:
    own = {
        name: options.pop(name) for name in ("theirs", "steps", "seed", "single") if name in options
    }
    config = {"folder": str(tmp_path / "root"), "interval": 4, **options}
    return titan.Settings(kind=kind, config=config, **own)


@pytest.fixture(scope="module", autouse=True)
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    log = tmp_path_factory.mktemp("ranks") / "log"
    with Ranks("integrations.trainers.titan", log) as found:
        yield found


@pytest.mark.parametrize("kind", KINDS)
def test_killed_ten_times_it_is_the_uninterrupted_run(
    kind: str, tmp_path: Path, ranks: Ranks
) -> None:
    """Every loss, which dropout and the loader's position are in, and the final weights."""
    num, draw = KINDS[kind], random.Random(kind)
    theirs = settings(tmp_path, kind, folder=str(tmp_path / "own"), theirs=True, steps=40)
    own = ranks.printed(theirs.text(), num)
    kills, place, seen = ranks.num_kills, tmp_path / "0", list[str]()
    for attempt in range(30):
        has_all = ranks.num_kills == kills + 10
        made = settings(place, kind, steps=40).text()
        seen += ranks.printed(made, num, 0 if has_all else draw.randint(5, 8), seed=attempt)
        if any(line.startswith("END ") for line in seen):  # and another run from the beginning
            assert losses(seen) == losses(own)
            assert value(seen, "END") == value(own, "END")
            if has_all:
                return
            place, seen = tmp_path / str(attempt + 1), []
    raise AssertionError(f"{ranks.num_kills - kills} of 10 kills")


@pytest.mark.parametrize(
    "options", [{"memory_every": 1}, {"record_every_step": True}], ids=["memory", "records"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_memory_and_records_lose_no_step(
    kind: str, options: dict[str, Any], tmp_path: Path, ranks: Ranks
) -> None:
    """Nothing is whole in the root but what these lead on from."""
    num, more = KINDS[kind], {"interval": 1000, "last_save_model_only": False}
    given: dict[str, Any] = {"single": True, "steps": 40, **more}
    theirs = settings(tmp_path, kind, folder=str(tmp_path / "own"), theirs=True, **given)
    own = ranks.printed(theirs.text(), num)
    made = settings(tmp_path, kind, **given, **options).text()
    kills, seen = ranks.num_kills, list[str]()
    for attempt, num_lines in enumerate((6, 1, 8)):  # 1: it may go on from what a restore has saved
        seen += ranks.printed(made, num, num_lines, seed=attempt)
        begun = int(value(seen, "BEGIN").split()[1])
        assert begun > 0 or not attempt
    assert ranks.num_kills == kills + 3
    seen += ranks.printed(made, num)
    assert losses(seen) == losses(own)
    assert value(seen, "END") == value(own, "END")


def test_records_of_several_optimizers_are_refused_by_name(tmp_path: Path, ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match="delta= follows each optimizer by itself"):
        ranks.printed(settings(tmp_path, record_every_step=True).text())


def test_two_ranks_go_on_as_one(tmp_path: Path, ranks: Ranks) -> None:
    """The loader's position cannot be divided anew, as with torchtitan's own: that key is excluded."""
    made = settings(tmp_path, "fsdp2", steps=8, last_save_model_only=False)
    digests = value(ranks.printed(made.text(), 2), "END").split()[3:]
    made.kind, made.steps = "single", 12
    made.config["exclude_from_loading"] = ["dataloader"]
    found = ranks.printed(made.text())
    assert value(found, "BEGIN").split() == ["BEGIN", "8", "True", *digests]
    assert value(found, "END").split()[1] == "12"


def test_each_option(tmp_path: Path, ranks: Ranks) -> None:
    """One run for each option that changes what is saved or loaded."""
    made = settings(
        tmp_path, steps=9, keep_latest_k=2, enable_first_step_checkpoint=True, async_mode="disabled"
    )
    made.config["export_dtype"] = "bfloat16"
    ranks.printed(made.text())
    root = made.config["folder"]
    assert holdfast.steps(root) == [
        4,
        8,
    ]  # keep_latest_k; the last step is an export, of weights alone
    with holdfast.open(f"{root}-export") as export:
        assert export.step == 9
        assert {export.info(name).dtype for name in export.names()} == {"bfloat16"}
    assert (
        value(
            ranks.printed(settings(tmp_path, load_step=4, load_only=True, steps=9).text()), "BEGIN"
        )[:7]
        == "BEGIN 4"
    )
    assert holdfast.steps(root) == [4, 8]  # load_only saved nothing
    excluded = settings(tmp_path, load_only=True, exclude_from_loading=["optimizer", "train_state"])
    assert value(ranks.printed(excluded.text()), "BEGIN").split()[1:3] == ["0", "True"]

    other = settings(tmp_path / "other", initial_load_path=root, steps=1)
    first = value(ranks.printed(other.text()), "BEGIN").split()
    assert first[1:3] == ["0", "True"]
    earlier = settings(tmp_path / "earlier", initial_load_path=f"{root}@4", steps=1)
    found = value(ranks.printed(earlier.text()), "BEGIN").split()
    assert found[1:3] == ["0", "True"] and found[3:] != first[3:]
    with pytest.raises(AssertionError, match="no step 5"):
        ranks.printed(settings(tmp_path / "none", initial_load_path=f"{root}@5", steps=1).text())
    only = settings(tmp_path / "only", initial_load_path=root, load_only=True, steps=1)
    assert value(ranks.printed(only.text()), "BEGIN").split() == ["BEGIN", *first[1:]]
    assert not (tmp_path / "only").exists()  # nor need there have been a folder
    again = settings(tmp_path / "again", initial_load_path=root, initial_load_model_only=False)
    again.steps = 8
    assert value(ranks.printed(again.text()), "BEGIN").split()[1] == "8"
    assert value(ranks.printed(again.text()), "BEGIN").split()[3:] == first[3:]


def test_a_seed_is_weights_alone_at_step_0(tmp_path: Path, ranks: Ranks) -> None:
    made = settings(tmp_path, seed=True)
    ranks.printed(made.text())
    assert holdfast.steps(made.config["folder"]) == [0]
    found = ranks.printed(settings(tmp_path, "fsdp2", steps=2).text(), 2)
    assert value(found, "BEGIN").split()[1:3] == ["0", "True"]


def test_steps_of_torchtitans_own_are_read_without_it(tmp_path: Path, ranks: Ranks) -> None:
    """With the position in the data, which is bytes of a pickle."""
    theirs = settings(tmp_path, "fsdp2", theirs=True, steps=8, last_save_model_only=False)
    ends = value(ranks.printed(theirs.text(), 2), "END").split()
    with holdfast.open(tmp_path / "root" / "step-8") as saved:
        assert saved.extras["train_state"] == {"step": 8, "ntokens_seen": 64}
        assert {type(saved.extras["dataloader"][f"dp_rank_{rank}"]) for rank in (0, 1)} == {bytes}
    parts = titan.parts_of("single", None)
    model = nn.ModuleDict(
        {"layers": nn.ModuleDict({k: v for p in parts for k, v in p.layers.items()})}
    )
    assert holdfast.load(tmp_path / "root" / "step-8", {"model": model}) == 8
    for part, (number, layer) in zip(parts, model["layers"].items()):
        assert part.layers[number] is layer
    assert [digest(part) for part in parts] == ends[3:]


def test_steps_of_torchtitans_own_are_gone_on_from(tmp_path: Path, ranks: Ranks) -> None:
    theirs = settings(tmp_path, theirs=True, steps=8, last_save_model_only=False)
    ends = value(ranks.printed(theirs.text()), "END").split()
    found = ranks.printed(settings(tmp_path, steps=10).text())
    assert value(found, "BEGIN").split() == ["BEGIN", "8", "True", *ends[3:]]


def test_steps_of_torchtitans_own_come_before_what_a_run_begins_with(
    tmp_path: Path, ranks: Ranks
) -> None:
    """Whatever that is, and also where nothing is saved."""
    given = {"steps": 8, "last_save_model_only": False}
    theirs = settings(tmp_path, theirs=True, **given)
    ends = value(ranks.printed(theirs.text()), "END").split()
    other = settings(tmp_path, folder=str(tmp_path / "other"), **{**given, "steps": 4})
    ranks.printed(other.text())
    for begin in (tmp_path / "other", tmp_path / "root/step-4"):
        for is_whole in (False, True):
            run = settings(tmp_path, initial_load_path=str(begin), load_only=True, steps=8)
            run.config["initial_load_model_only"] = not is_whole
            found = ranks.printed(run.text())
            assert value(found, "BEGIN").split() == ["BEGIN", "8", "True", *ends[3:]]
    assert holdfast.steps(tmp_path / "root") == []


def test_a_step_that_both_have_is_holdfasts(tmp_path: Path, ranks: Ranks) -> None:
    given = {"steps": 8, "last_save_model_only": False}
    theirs = ranks.printed(settings(tmp_path, theirs=True, **given).text())
    own = ranks.printed(settings(tmp_path, load_step=4, **given).text())
    assert holdfast.steps(tmp_path / "root") == [8]
    ends = [value(found, "END").split()[3:] for found in (theirs, own)]
    assert ends[0] != ends[1]
    again = ranks.printed(settings(tmp_path, load_step=8, **given).text())
    assert value(again, "BEGIN").split()[3:] == ends[1]
    assert sum("loads holdfast's step 8 of" in line for line in again) == 1


@pytest.mark.parametrize("interval", [20, 1000])
def test_what_is_loaded_without_excluded_keys_is_a_full_step(
    interval: int, tmp_path: Path, ranks: Ranks
) -> None:
    """The steps in memory after it are given up, with a warning."""
    run = settings(tmp_path, interval=interval, memory_every=1, async_mode="disabled", steps=40)
    run.config["exclude_from_loading"] = ["dataloader"]
    kills = ranks.num_kills
    ranks.printed(run.text(), losses=24)
    assert ranks.num_kills == kills + 1
    saved = max(holdfast.steps(tmp_path / "root"), default=0)
    assert saved == (20 if interval == 20 else 0)
    again = ranks.printed(run.text())
    assert value(again, "BEGIN").split()[1:3] == [str(saved), str(saved > 0)]
    assert value(again, "END").split()[1] == "40"
    (told,) = (line for line in again if "exclude_from_loading loads full steps" in line)
    assert "by memory" in told and ("there is none" in told) == (saved == 0)


@pytest.mark.parametrize("is_whole", [False, True], ids=["weights", "all"])
def test_torchtitans_own_last_step_is_begun_with(
    is_whole: bool, tmp_path: Path, ranks: Ranks
) -> None:
    """That is of weights alone by default."""
    own = tmp_path / "own"
    given = {"steps": 6, "last_save_model_only": not is_whole}
    theirs = settings(tmp_path, theirs=True, folder=str(own), **given)
    ends = value(ranks.printed(theirs.text()), "END").split()
    begun = settings(tmp_path, initial_load_path=str(own / "step-6"), steps=8)
    begun.config["initial_load_model_only"] = not is_whole
    found = ranks.printed(begun.text())
    at = "6" if is_whole else "0"
    assert value(found, "BEGIN").split() == ["BEGIN", at, "True", *ends[3:]]
    assert value(found, "END").split()[1] == "8"


def test_torchft_is_refused_by_name() -> None:
    config = HoldfastCheckpointManager.Config(enable=True)
    with pytest.raises(UsageError, match="ft_manager"):
        HoldfastCheckpointManager(config, ft_manager=SimpleNamespace(enabled=True))
