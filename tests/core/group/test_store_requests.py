"""Questions to a torch store that end: when the host is silent, the line is closed, and Python ends."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from holdfast.base.errors import AgentError, Deadline
from holdfast.core.group import store_requests
from holdfast.core.group.store_requests import StoreLine


def line_to(store: Any) -> StoreLine:
    return StoreLine(lambda: store, "rank 0", 0)


def test_a_line_puts_questions_in_order_until_its_host_is_silent() -> None:
    gate, said = threading.Event(), list[int]()
    line = line_to(said)
    for n in range(3):
        line.leave_word(lambda store, n=n: store.append(n))
    assert line.ask("look", list, 60.0) == [0, 1, 2]
    with pytest.raises(Deadline, match=r"^rank 0 did not answer within 0.01 s \(wait\)"):
        line.ask("wait", lambda _: gate.wait(), 0.01)
    gate.set()
    assert line.ask("look", len, 60.0) == 3


@pytest.mark.parametrize("is_used", [True, False])
def test_nothing_is_asked_on_a_line_that_is_closed(is_used: bool) -> None:
    said = list[str]()
    line = line_to(said)
    if is_used:
        line.ask("say", lambda store: store.append("before"), 60.0)
    line.close()
    with pytest.raises(AgentError, match=r"^the connection to rank 0 is closed \(say\)"):
        line.ask("say", lambda store: store.append("after"), 60.0)
    line.leave_word(lambda store: store.append("after"))
    line.settle(60.0)
    line.close()
    assert said == ["before"] * is_used


def test_every_line_is_settled_when_python_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever becomes of the others."""

    def connect() -> Any:
        raise ValueError("no such host")

    monkeypatch.setattr(store_requests, "_EXIT_S", 60.0)
    gate, said = threading.Event(), list[str]()
    lines = [StoreLine(connect, "rank 0", 0), *(line_to(said) for _ in range(3))]
    for name, line in zip(("unreachable", "lost", "closed", "open"), lines, strict=True):
        line.leave_word(lambda _: gate.wait())
        line.leave_word(lambda store, name=name: store.append(name))
    lines[1].lost = "the ranks have lost each other"
    lines[2].close()
    timer = threading.Timer(0.1, gate.set)
    timer.start()
    store_requests._settle_all()
    assert gate.is_set() and {"closed", "open"} <= {*said}
