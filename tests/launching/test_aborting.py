"""Communicators of devices are aborted all at once, and nobody waits for one that does not end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from holdfast.launch import abort_connections


class Backend:
    """Stands for NCCL: its abort ends when `others` have begun theirs."""

    def __init__(self, others: threading.Barrier) -> None:
        self.others, self.is_aborted = others, False

    def abort(self) -> None:
        self.others.wait(60)
        self.is_aborted = True


def test_each_may_need_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = threading.Barrier(3)
    backends = [Backend(barrier) for _ in range(3)]
    monkeypatch.setattr(abort_connections, "on_devices", lambda: backends)
    abort_connections.abort_on_devices()
    assert all(one.is_aborted for one in backends)


def test_one_that_does_not_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    class Stuck:
        def abort(self) -> None:
            released.wait(60)

    class Fails:
        def abort(self) -> None:
            raise RuntimeError("no communicator")

    backends: list[Any] = [Stuck(), Fails()]
    monkeypatch.setattr(abort_connections, "on_devices", lambda: backends)
    monkeypatch.setattr(abort_connections, "ABORT_S", 0.2)
    abort_connections.abort_on_devices()
    assert not released.is_set()
    released.set()
