"""Processes that convert together learn how each has ended, however that was."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.base.wire import wire_error
from holdfast.formats.write.converting_ranks import Ranks


class Group:
    """One rank, which hears what it says itself."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.said: list[bytes] = []

    def ask(
        self, key: str, value: bytes, decide: Callable[[list[bytes]], bytes], deadline_s: float
    ) -> bytes:
        self.said.append(value)
        return decide([value])


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError])
def test_who_is_interrupted_says_so(kind: type[BaseException]) -> None:
    group = Group()
    with pytest.raises(kind), Ranks(group).all("written"):
        raise kind("stop")
    assert [wire_error(said).text for said in group.said] == [f"{kind.__name__}: stop"]


def test_rank_0_s_answer_is_everybody_s() -> None:
    ranks = Ranks(Group())
    assert ranks.first("begin", lambda: True) and not ranks.first("begin", lambda: False)
