"""What agents hold, told among ranks that are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.base.threads import in_threads
from holdfast.tiers.memory import own_agent
from holdfast.tiers.memory.node import messages as w
from tiers.memory.agents import noise

A, B, C, D = (noise(100_000, seed) for seed in range(4))


class Ranks:
    """Of one group; counts what is sent to each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.said: list[bytes] = [b""] * size
        self.sent = 0
        self.barrier = threading.Barrier(size, timeout=120)

    def rank(self, number: int) -> Rank:
        return Rank(self, number)


class Rank:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks = ranks
        self.rank = rank

    def all_gather(self, data: bytes) -> list[bytes]:
        return self._talk(data, list)

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        assert (data is not None) == (self.rank == source)
        return self._talk(data or b"", lambda said: said[source])

    def from_rank0(self, work: Callable[[], bytes]) -> bytes:
        return self.broadcast(work() if self.rank == 0 else None)

    def _talk(self, data: bytes, hear: Callable[[list[bytes]], Any]) -> Any:
        self.ranks.said[self.rank] = data
        if self.ranks.barrier.wait() == 0:
            self.ranks.sent += sum(map(len, self.ranks.said))
        found = hear(self.ranks.said)
        self.ranks.barrier.wait()
        return found


def held(agent: str, *manifests: bytes) -> w.Held:
    return w.Held(w.Card(agent, "h:1", "t"), "/d", (), manifests)


def test_each_manifest_goes_to_each_rank_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a node that the job no longer runs on; the third rank speaks for no node."""
    away = held("away", C, D)
    monkeypatch.setattr(own_agent, "elsewhere", lambda job, helds: [away])
    ranks, heard = Ranks(4), dict[int, list[w.Held]]()
    mine = [held("one", A, B), held("two", B, C), None, held("three")]

    def ask(number: int) -> None:
        heard[number] = own_agent.gather_held(ranks.rank(number), "job", mine[number])  # type: ignore[arg-type]

    in_threads(ask, [0, 1, 2, 3], 4)
    expected = [one for one in mine if one is not None] + [away]
    assert [heard[number] for number in range(4)] == [expected] * 4
    assert len(A + B + C + D) < ranks.sent < len(A + B + C + D) + 2000
