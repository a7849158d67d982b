"""The newest manifest is damaged, in every way: whoever takes another step for it says so, by name.

Where the damage is at the manifest's beginning nobody knows that the step is the newest, and it counts as
the oldest; elsewhere it keeps its place, and is tried.  Either way the user is told once, with the file and
what is wrong with it.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from cli.calling import call, call_json
from holdfast.core.checkpoint.names import committed, manifest_key
from holdfast.core.checkpoint.pruning import prunable
from holdfast.core.checkpoint.tidying import Keep
from holdfast.errors import FormatError, HoldfastError, HoldfastWarning, NotFound, RankErrors
from holdfast.store import LocalStore

GOOD, NEWEST = 10, 20
Damage = Callable[[Path], object]


def cut(num_bytes: int) -> Damage:
    """All but the first bytes are gone; of -n: all but the last n stay."""
    return lambda path: path.write_bytes(path.read_bytes()[:num_bytes])


def flip(at: int) -> Damage:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 4
        path.write_bytes(data)

    return damage


def link(target: str, of: str = "") -> Damage:
    """A link in the place of the manifest, or of the folder of the step."""

    def damage(path: Path) -> None:
        place = path.parent if of == "step" else path
        place.rename(path.parent.parent.parent / "elsewhere")
        os.symlink(target, place)

    return damage


BEGINNING: dict[str, tuple[Damage, str]] = {
    "empty": (cut(0), r"is empty \(0 bytes\)"),
    "cut in its head": (cut(25), r"is cut short \(25 bytes\)"),
    "a bit of its head": (flip(3), "does not begin as a manifest does"),
    "zeros": (
        lambda p: p.write_bytes(bytes(len(p.read_bytes()))),
        "does not begin as a manifest does",
    ),
    "text": (lambda p: p.write_text("hello " * 40), "does not begin as a manifest does"),
    "of another step": (
        lambda p: p.write_bytes((p.parents[1] / f"{GOOD:010d}/manifest.json").read_bytes()),
        "states that it is of step 10",
    ),
    "a link to nothing": (link("/no/such/manifest.json"), "is a link that leads nowhere"),
    "a loop of links": (link("manifest.json"), "is a link that leads nowhere"),
    "its folder a link to nothing": (link("/no/such/step", "step"), "is a link that leads nowhere"),
}
REST: dict[str, tuple[Damage, str]] = {
    "cut in its middle": (cut(400), "cut short: its seal is missing"),
    "cut by one byte": (cut(-1), "cut short: its seal is missing"),
    "a bit of its body": (flip(300), "differs from what was written"),
    "a bit of its seal": (flip(-4), "its seal is missing|differs from what"),
}


def state_of(value: float) -> dict[str, Any]:
    return {"data": {"x": torch.full((3,), value)}}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound")
    for step in (GOOD, NEWEST):
        holdfast.save(root, state_of(step), step=step)
    return root


@pytest.fixture(params=[*BEGINNING, *REST])
def damaged(request: pytest.FixtureRequest, sound: Path, tmp_path: Path) -> tuple[Path, str, bool]:
    """A root whose newest manifest is damaged; what is wrong with it; whether its beginning is."""
    root = tmp_path / "root"
    shutil.copytree(sound, root)
    damage, what = {**BEGINNING, **REST}[request.param]
    damage(root / manifest_key(NEWEST))
    return root, what, request.param in BEGINNING


def told(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call returns, or the error that it raises, and the warnings."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            result = call()
        except HoldfastError as error:
            result = error
    return result, [str(w.message) for w in found if w.category is HoldfastWarning]


def check_text(text: str, what: str) -> None:
    assert f"step {NEWEST}" in text and manifest_key(NEWEST) in text
    assert re.search(what, text), text


def test_restore(damaged: tuple[Path, str, bool]) -> None:
    root, what, _ = damaged
    state = state_of(0)
    ckpt = holdfast.Checkpointer(root, state)
    step, warned = told(ckpt.restore)
    assert step == GOOD and state["data"]["x"].tolist() == [GOOD] * 3
    assert len(warned) == 1
    check_text(warned[0], what)
    folder = (root / manifest_key(NEWEST)).parent
    if folder.is_symlink():
        with pytest.raises(
            RankErrors, match=f"{folder}' is a link to '/no/such/step', which is not"
        ):
            ckpt.save(NEWEST).wait(300)
        folder.unlink()
    ckpt.save(NEWEST).wait(300)
    ckpt.close()
    again, warned = told(lambda: holdfast.load(root, state_of(0)))
    assert (again, warned) == (NEWEST, [])


@pytest.mark.parametrize("name", ["load", "open"])
def test_load_and_open(damaged: tuple[Path, str, bool], name: str) -> None:
    """They go back no step that is known to be the newest; of one that is not known to be, they tell."""
    root, what, at_beginning = damaged
    calls = {
        "load": lambda: holdfast.load(root, state_of(0)),
        "open": lambda: holdfast.open(root).step,
    }
    result, warned = told(calls[name])
    if at_beginning:
        assert result == GOOD and len(warned) == 1
        check_text(warned[0], what)
        assert f"step {GOOD} is taken, though it may be the newest" in warned[0]
    else:
        assert isinstance(result, FormatError) and not warned
        check_text(str(result), what)


def test_steps(damaged: tuple[Path, str, bool]) -> None:
    root, what, _ = damaged
    steps, warned = told(lambda: holdfast.steps(root))
    assert steps == [GOOD, NEWEST] and len(warned) == 1
    check_text(warned[0], what)


def test_ls_and_verify(damaged: tuple[Path, str, bool]) -> None:
    root, what, _ = damaged
    code, listed = call_json("ls", root)
    problems = {s["step"]: s["problem"] for s in listed["steps"]}
    assert code == 1 and problems[GOOD] is None
    assert re.search(what, problems[NEWEST]) and listed["newest_good"] == GOOD
    assert "restore() " in call("ls", root)[1]
    code, out, _ = call("verify", root)
    assert code == 1 and f"step {NEWEST}" in out


def test_a_verb_that_takes_the_newest(damaged: tuple[Path, str, bool]) -> None:
    root, what, at_beginning = damaged
    code, _, errors = call("inspect", root)
    assert code == (0 if at_beginning else 1)
    assert errors.startswith("warning: " if at_beginning else "error: ")
    check_text(errors, what)


LINKS = [name for name in BEGINNING if "link" in name]


@pytest.mark.parametrize("damaged", LINKS, indirect=True)
def test_named_it_is_an_error(damaged: tuple[Path, str, bool]) -> None:
    root, _, _ = damaged
    for named in (
        lambda: holdfast.load(root, state_of(0), step=NEWEST),
        lambda: holdfast.open(root, step=NEWEST),
        lambda: holdfast.Checkpointer(root, state_of(0)).restore(NEWEST),
    ):
        result, _ = told(named)
        assert isinstance(result, (FormatError, NotFound)) and str(NEWEST) in str(result)


@pytest.mark.parametrize("damaged", LINKS, indirect=True)
def test_it_is_not_pruned(damaged: tuple[Path, str, bool]) -> None:
    root, _, _ = damaged
    store = LocalStore(root)
    holdfast.save(root, state_of(5), step=5)
    assert NEWEST not in prunable(store, Keep(last=1))
    assert GOOD not in prunable(store, Keep(last=1))


def test_what_is_sound_is_not_told_of(tmp_path: Path) -> None:
    for step in (GOOD, NEWEST):
        holdfast.save(tmp_path, state_of(step), step=step)
    for newest in (
        lambda: holdfast.load(tmp_path, state_of(0)),
        lambda: holdfast.open(tmp_path).step,
        lambda: holdfast.steps(tmp_path)[-1],
    ):
        assert told(newest) == (NEWEST, [])
    assert all(saved.is_proved for saved in committed(LocalStore(tmp_path)))


def test_many_are_told_in_one_warning(tmp_path: Path) -> None:
    for step in range(1, 9):
        holdfast.save(tmp_path, state_of(step), step=step)
        if step > 1:
            (tmp_path / manifest_key(step)).write_bytes(b"")
    step, warned = told(lambda: holdfast.load(tmp_path, state_of(0)))
    assert step == 1 and len(warned) == 1
    assert (
        "step 8: " in warned[0] and "and 2 more" in warned[0] and "one of them may be" in warned[0]
    )
