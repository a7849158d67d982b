"""Another tier is one file, and a line beside the arguments of `Checkpointer`: `stick.py` keeps steps in a
place of its own."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

import holdfast
import zygote
from holdfast.session import checkpointer
from session.stick import EVERY, StickSwitch, train

LAST, KILLED = 20, 17


def run(tmp_path: Path, kill_at: int = 0, *, root: str = "root") -> tuple[str, str]:
    """What a training says that it restored, and its last state; a killed one has none."""
    args = [str(tmp_path / root), str(tmp_path / f"{root}-stick"), str(LAST), str(kill_at)]
    done = zygote.run([Path(__file__).with_name("stick.py"), *args])
    assert done.returncode == (-signal.SIGKILL if kill_at else 0), done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    return lines.get("restored", ""), lines.get("state", done.stderr)


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The place of a run that was killed, and the last state of one that was not."""
    place = tmp_path_factory.mktemp("lives")
    run(place, KILLED)
    assert holdfast.steps(place / "root") == [10]
    assert holdfast.steps(place / "root-stick") == [3, 6, 9, 12, 15]
    return place, run(place, root="other")[1]


@pytest.fixture
def killed(lives: tuple[Path, str], tmp_path: Path) -> Path:
    return Path(shutil.copytree(lives[0], tmp_path / "copy"))


def test_a_killed_run_goes_on_from_it(lives: tuple[Path, str], killed: Path) -> None:
    assert run(killed) == ("15 stick", lives[1])
    assert holdfast.steps(killed / "root") == [10, 20]


def test_what_is_damaged_there_is_passed_over(lives: tuple[Path, str], killed: Path) -> None:
    for step in (12, 15):
        (image,) = (killed / "root-stick").glob(f"steps/*{step}/*/*.safetensors")
        data = bytearray(image.read_bytes())
        data[len(data) // 2] ^= 1
        image.write_bytes(data)
    assert run(killed) == ("10 durable", lives[1])


def test_its_steps_are_no_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with an empty root that has not looked at the stick is refused, as with snapshots in memory."""
    monkeypatch.setitem(checkpointer.NEAR, "stick", StickSwitch(str(tmp_path / "stick")))
    train(str(tmp_path / "root"), EVERY, 0)
    with (
        holdfast.Checkpointer(tmp_path / "empty", {"n": 1}) as ckpt,
        pytest.raises(holdfast.errors.UsageError, match="step 3 on a stick"),
    ):
        ckpt.step(1)
