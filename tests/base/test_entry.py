"""Tracebacks of users' mistakes end at the user's line; those of everything else are whole."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.base.entry import public
from holdfast.errors import HoldfastError, NotFound, UsageError

HERE = Path(__file__).name


def state() -> dict[str, Any]:
    return {"x": torch.ones(3)}


class Refuses:
    """An object whose state cannot be saved: a call of the library within it is refused."""

    def state_dict(self) -> dict[str, Any]:
        holdfast.open("/nowhere", step=-1)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def frames(call: Callable[[], object]) -> list[str]:
    """The files of the traceback of what a call raises, without the frame of this function."""
    try:
        call()
    except HoldfastError as error:
        return [Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)][
            1:
        ]
    raise AssertionError("nothing was raised")


def test_a_mistake_ends_at_the_line_of_the_user(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", state(), step=1)
    with holdfast.Checkpointer(tmp_path / "run", state(), anew=True) as ckpt:
        calls: list[Callable[[], object]] = [
            lambda: holdfast.save(tmp_path, {"a.b": 1}, step=1),
            lambda: holdfast.load(tmp_path / "run", {"y": torch.ones(3)}),
            lambda: holdfast.load(tmp_path / "run", state(), step="best"),
            lambda: holdfast.open(tmp_path / "typo"),
            lambda: holdfast.open(tmp_path / "run").read("z"),
            lambda: holdfast.steps(tmp_path / "typo"),
            lambda: holdfast.convert(tmp_path / "run", tmp_path / "x", to="tocrh"),
            lambda: holdfast.wait_newer("dcp:x"),
            lambda: holdfast.Checkpointer(tmp_path / "new", state(), when_busy="qeue"),  # type: ignore[arg-type]
            lambda: ckpt.step(-1),
            lambda: ckpt.save(2, metrics={"loss": "low"}),  # type: ignore[dict-item]
            lambda: ckpt.restore(7),
            lambda: ckpt.find("best"),
            lambda: ckpt.metrics(7, loss=0.1),
            lambda: ckpt.pin(7, "best"),
            lambda: ckpt.wait(-1.0),
        ]
        for call in calls:
            assert frames(call) == [HERE]
    for options in (holdfast.Keep, holdfast.Every, holdfast.Memory, holdfast.Delta, holdfast.Auto):
        wrong = next(iter(inspect.signature(options).parameters))
        made = frames(lambda: options(**{wrong: -1.5}))
        assert made == [HERE]


def test_all_frames_are_shown_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TRACEBACK", "full")
    found = frames(lambda: holdfast.open(tmp_path / "typo"))
    assert found[:2] == [HERE, "entry.py"] and "looking.py" in found


def test_a_function_of_the_users_that_led_to_it_is_shown(tmp_path: Path) -> None:
    found = frames(lambda: holdfast.save(tmp_path, {"x": Refuses()}, step=1))
    assert found.count(HERE) == 2, found


def test_other_errors_keep_their_frames(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise ZeroDivisionError("of the user")

    holdfast.save(tmp_path, state(), step=1)
    image = next(tmp_path.glob("steps/*/*/r00000.safetensors"))
    data = bytearray(image.read_bytes())
    data[-1] ^= 1
    image.write_bytes(data)
    assert len(frames(lambda: holdfast.load(tmp_path, state()))) > 3


def test_a_call_is_still_what_it_was() -> None:
    assert holdfast.save.__name__ == "save" and (holdfast.save.__doc__ or "").startswith("Save")
    with pytest.raises(TypeError):
        holdfast.save("x")  # type: ignore[call-arg]
    assert issubclass(NotFound, HoldfastError) and issubclass(UsageError, ValueError)


MISSPELT: dict[str, tuple[Callable[[], object], str]] = {
    "Checkpointer": (lambda: holdfast.Checkpointer("r", {}, kep=3), "'kep'; did you mean 'keep'?"),  # type: ignore[call-arg]
    "load": (lambda: holdfast.load("r", {}, strct=False), "'strct'; did you mean 'strict'"),  # type: ignore[call-arg]
    "Keep": (lambda: holdfast.Keep(lats=3), "'lats'; did you mean 'last'"),  # type: ignore[call-arg]
    "Every": (lambda: holdfast.Every(durabel=3), "'durabel'; did you mean 'durable'"),  # type: ignore[call-arg]
    "Memory": (lambda: holdfast.Memory(budgt=3), "'budgt'; did you mean 'budget'?"),  # type: ignore[call-arg]
    "Delta": (lambda: holdfast.Delta(max_byte=3), "'max_byte'; did you mean 'max_bytes'"),  # type: ignore[call-arg]
    "Auto": (lambda: holdfast.Auto(mtbf_hour=3), "'mtbf_hour'; did you mean"),  # type: ignore[call-arg]
}


@pytest.mark.parametrize("call", MISSPELT)
def test_a_misspelt_argument_is_answered_by_the_one_that_was_meant(call: str) -> None:
    """Newer versions of Python do so themselves, in words of their own."""
    misspell, said = MISSPELT[call]
    with pytest.raises(TypeError, match="unexpected keyword argument") as caught:
        misspell()
    assert said.lower() in str(caught.value).lower().replace(". did", "; did")


def test_a_misspelt_argument_of_a_call_within_is_left_as_it_is() -> None:
    @public
    def outer(keep: int = 0) -> None:
        inner(kep=1)  # type: ignore[call-arg]

    def inner(keep: int = 0) -> None: ...

    with pytest.raises(TypeError, match=r"'kep'$"):
        outer()
