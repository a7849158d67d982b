"""The methods of an attached engine take and return what DeepSpeed's do."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is imported
pytest.importorskip("deepspeed")

from .forked import Ranks

pytestmark = [pytest.mark.distributed, pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    log = tmp_path_factory.mktemp("ranks") / "log"
    with Ranks("integrations.trainers.deepspeed_attached", log, is_group_of_one=True) as found:
        yield found


@pytest.mark.parametrize(
    "case",
    [
        "tags",
        "parts",
        "branched",
        "elsewhere",
        "twice",
        "kept_as_given",
        "after_every",
        "labelled",
        "labelled_by_a_run_before",
        "relative",
        "not_labelled",
        "replaced",
        "went_back",
        "went_back_in_part",
        "accumulated",
        "unwritable",
        "deepspeeds_own",
        "universal",
        "behind",
        "frozen",
        "refused",
    ],
)
def test_attached(ranks: Ranks, tmp_path: Path, case: str) -> None:
    ranks.finish({"case": case, "root": str(tmp_path / "root")}, 1)


def test_sigterm_stops_an_engine_that_saves_when_asked(ranks: Ranks, tmp_path: Path) -> None:
    options = {"case": "told_to_stop", "root": str(tmp_path / "root")}
    assert ranks.run({**options, "dies": True}, 1) == [128 + signal.SIGTERM], ranks.errors()
    ranks.finish(options, 1)


def test_two_ranks_go_on_from_the_same_pointer(ranks: Ranks, tmp_path: Path) -> None:
    ranks.finish({"case": "late_pointer", "root": str(tmp_path / "root")}, 2)


def test_two_ranks_go_back_in_part(ranks: Ranks, tmp_path: Path) -> None:
    ranks.finish({"case": "went_back_in_part", "root": str(tmp_path / "root")}, 2)


def test_killed_before_each_write_beside_the_root(ranks: Ranks, tmp_path: Path) -> None:
    """`load_checkpoint` of a folder gives the step that was saved there last, the only one that is kept."""
    whole = tmp_path / "whole"
    whole.mkdir()
    ranks.finish({"case": "saves", "root": str(whole / "root")}, 1)
    *_, expected = (whole / "journal").read_text().splitlines()
    number, has_ended = 0, False
    while not has_ended:
        number += 1
        assert number < 50
        place = tmp_path / str(number)
        place.mkdir()
        options = {"case": "saves", "root": str(place / "root")}
        code = ranks.run({**options, "dies": number}, 1)[0]
        assert code in (0, -signal.SIGKILL), ranks.errors()
        has_ended = code == 0
        died = (place / "journal").read_text().splitlines()
        if not has_ended:
            ranks.finish(options, 1)
            again = (place / "journal").read_text().splitlines()[len(died) :]
            has_loaded, begins = again[0] == "True", int(again[1])
            assert has_loaded or int(died[-1]) == 1, again
            assert begins == (int(died[-1]) if has_loaded else 0), (number, died, begins)
            assert again[-1] == expected, number
    assert number > 4 * 4
