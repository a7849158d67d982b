"""Warnings that repeat: the first at once, then one a minute, and at the end what was left out."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.base.notices import Notices
from holdfast.errors import HoldfastWarning


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def told(notices: Notices, *texts: str, at_end: bool = False) -> list[str]:
    notices.warn(*texts)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        (notices.tell_all if at_end else notices.tell)()
    return [str(one.message) for one in found]


def test_one_a_minute_with_the_number_of_those_left_out() -> None:
    clock = Clock()
    notices = Notices("warn", clock)
    assert told(notices, "step 1 failed: 3.5 s") == ["step 1 failed: 3.5 s"]
    for step in range(2, 6):
        clock.now += 10.0
        assert told(notices, f"step {step} failed: 2 s") == []
    clock.now = 60.0
    assert told(notices, "step 6 failed: 1 s") == [
        "step 6 failed: 1 s\n  (4 more of this kind since the last one)"
    ]
    clock.now = 300.0
    assert told(notices, "step 7 failed: 1 s") == ["step 7 failed: 1 s"]


def test_others_are_told_at_once() -> None:
    notices = Notices("warn", Clock())
    assert told(notices, "step 1 failed", "step 2 was left out") == [
        "step 1 failed",
        "step 2 was left out",
    ]


def test_the_end_tells_what_was_left_out() -> None:
    clock = Clock()
    notices = Notices("warn", clock)
    told(notices, "step 1 failed", "step 1 was left out", "step 2 was left out")
    clock.now = 1.0
    assert told(notices, "step 2 failed", "step 3 failed") == []
    assert notices.texts == [
        "step 2 was left out",
        "step 3 failed\n  (1 more of this kind before)",
    ]
    assert told(notices, "step 4 failed", "another", at_end=True) == [
        "another",
        "step 2 was left out",
        "step 4 failed\n  (2 more of this kind before)",
    ]


def test_errors_that_are_raised_are_not_left_out() -> None:
    notices = Notices("raise", Clock())
    for _ in range(2):
        notices.complain(ValueError("the disk is full"))
        with pytest.raises(ValueError, match="full"):
            notices.tell()


def test_a_run_whose_saves_fail_warns_of_the_first_and_of_the_last(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with holdfast.Checkpointer(tmp_path, {"x": torch.ones(3)}, every=1) as ckpt:
            ckpt.step(1)
            ckpt.wait()
            for step in range(2, 8):
                tmp_path.joinpath(f"steps/{step:010d}").write_text("in the way")
                ckpt.step(step)
                ckpt.wait()
    texts = [str(one.message) for one in found if isinstance(one.message, HoldfastWarning)]
    assert len(texts) == 2, texts
    assert "step 2" in texts[0] or "0000000002" in texts[0]
    assert "0000000007" in texts[1] and "(4 more of this kind before)" in texts[1]
