"""A run in another process deletes the step that is being read: what its word names by then is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
import zygote
from holdfast.errors import NotFound
from holdfast.events import Event, listen


class Pruner:
    """A run that keeps one step (`session.pruner`)."""

    def __init__(self, root: Path) -> None:
        (asked, asks), (answered, answers) = os.pipe(), os.pipe()
        args = ["-m", "session.pruner", root]
        self._process = zygote.start(args, stdin=asked, out=answers, err=root.parent / "err")
        for theirs in (asked, answers):
            os.close(theirs)
        self._asks, self._answers = os.fdopen(asks, "w"), os.fdopen(answered)
        self.step = self._next()

    def go_on(self) -> None:
        """Have it save the next step, and delete the one before."""
        self._asks.write("on\n")
        self._asks.flush()
        self.step = self._next()

    def _next(self) -> int:
        line = self._answers.readline()
        assert line, "the run has ended"
        return int(line)

    def close(self) -> None:
        self._asks.close()
        self._answers.close()
        assert self._process.wait(120) == 0


class Meddler:
    """State whose place in the checkpoint is asked for after the manifest was read, and before the files
    are: at this moment the run goes on."""

    def __init__(self, pruner: Pruner, times: int = 1) -> None:
        self.w = torch.full((1000,), -1.0)
        self._pruner, self._times = pruner, times

    def state_dict(self) -> dict[str, Any]:
        if self._times:
            self._times -= 1
            self._pruner.go_on()
        return {"w": self.w}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.w.copy_(state["w"])


@pytest.fixture
def pruner(tmp_path: Path) -> Iterator[Pruner]:
    found = Pruner(tmp_path / "run")
    yield found
    found.close()


def load(address: str, step: Any, state: dict[str, Any], _: Path) -> int:
    return holdfast.load(address, state, step=step)


def restore(address: str, step: Any, state: dict[str, Any], other: Path) -> int:
    """Begin another run with the step."""
    with holdfast.Checkpointer(other, state) as ckpt:
        return int(ckpt.restore(step, source=address))


@pytest.mark.parametrize(
    ("read", "address", "named"),
    [
        (load, "", "good"),
        (load, "@good", None),
        (load, "", "best"),
        (load, "@best", None),
        (load, "@newest", None),
        (load, "", None),
        (restore, "@best", None),
        (restore, "", "good"),
    ],
)
def test_what_a_word_names_by_then_is_loaded(
    pruner: Pruner, tmp_path: Path, read: Callable[..., int], address: str, named: str | None
) -> None:
    """Step 1 is gone when its files are read, then step 2."""
    state = {"model": Meddler(pruner, times=2)}
    events: list[Event] = []
    with listen(events.append):
        loaded = read(f"{tmp_path / 'run'}{address}", named, state, tmp_path / "other")
    assert loaded == pruner.step == 3
    assert state["model"].w.unique().tolist() == [3.0]
    assert [e.fields["step"] for e in events if e.name == "load.again"] == [1, 2]


def test_a_number_names_no_other_step(pruner: Pruner, tmp_path: Path) -> None:
    state = {"model": Meddler(pruner)}
    with pytest.raises(NotFound):
        holdfast.load(tmp_path / "run", state, step=1)
