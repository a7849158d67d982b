"""The order in which snapshots take memory."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from holdfast.errors import Deadline
from holdfast.tiers.memory import tier


def test_one_limit_for_both_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot before ends after 400 of 600 s, and is not handed over in the 200 s that are left."""
    now, limits = 0.0, []

    class Timed(threading.Event):
        """Is set, if ever, after 400 s."""

        def wait(self, timeout: float | None = None) -> bool:
            nonlocal now
            assert timeout is not None
            limits.append(timeout)
            now += min(timeout, 400.0)
            return timeout >= 400.0

    turns = tier.Turns()
    turns._is_free = Timed()
    monkeypatch.setattr(tier, "time", SimpleNamespace(monotonic=lambda: now))
    with pytest.raises(Deadline, match="did not end within 600 s"):
        turns.take(600.0, Timed())
    assert limits == [600.0, 200.0]
