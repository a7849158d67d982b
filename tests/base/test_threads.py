"""Threads that share a list of items, whose caller is interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.base import threads
from holdfast.base.storage_deadlines import Patience
from holdfast.base.threads import in_threads
from holdfast.errors import Deadline

LIMIT_S = 60.0


class Interrupt(BaseException):
    """As Ctrl-C, or the news that a rank is lost."""


@pytest.fixture
def heard() -> Iterator[threading.Event]:
    """Set once this thread was interrupted, by SIGUSR1."""
    event = threading.Event()

    def handler(*_: Any) -> None:
        event.set()
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, handler)
    yield event
    signal.signal(signal.SIGUSR1, before)


def interrupt() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)


def of_crews() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "holdfast-io"]


def test_no_thread_is_at_work_after_an_interrupt(heard: threading.Event) -> None:
    """They write to the caller's memory, which it fills with NaN then."""
    before, done = of_crews(), list[int]()

    def work(number: int) -> None:
        if number == 3:
            interrupt()
        if number >= 3:
            assert heard.wait(LIMIT_S)
        done.append(number)

    with pytest.raises(Interrupt):
        in_threads(work, [*range(1000)], 2, fills=True)
    assert of_crews() == before
    assert {0, 1, 2, 3} <= {*done} and len(done) < 1000


def test_one_that_storage_does_not_answer_is_left_behind(
    heard: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It uses nothing of what comes back, and asks for no more."""
    monkeypatch.setattr(threads, "STOP_S", 0.1)
    gate, patience, done, errors = threading.Event(), Patience(), list[int](), list[Exception]()

    def work(number: int) -> None:
        if number == 1:
            interrupt()
        try:
            patience.run(lambda: gate.wait(LIMIT_S), "read", "somewhere")
        except Deadline as error:
            errors.append(error)
            raise
        done.append(number)

    known = {*of_crews()}
    with pytest.raises(Interrupt):
        in_threads(work, [*range(1000)], 2, fills=True)
    left = [thread for thread in of_crews() if thread not in known]
    gate.set()
    for thread in left:
        thread.join(LIMIT_S)
    assert len(left) == len(errors) == 2 and not done
