"""Requests as a server counts them: what `checkpoint/test_requests.py` counts, over HTTP."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest
import torch

import holdfast
from holdfast.store.objects import PART_BYTES
from objects.fixtures import fresh
from objects.proxy import Fate, Proxy, Request
from objects.servers import SeaweedFS

KEPT = 3
COMMIT = {"GET": 1, "LIST": 2, "PUT": 1}
GONE = {"LIST": 1, "GET": 1, "DELETE": 2}
"""Of one step that goes after the commit: obstore deletes by POST."""


class Counted:
    """Counts requests by their kind."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> Fate:
        with self._lock:
            self.kinds[kind_of(request)] += 1
        return Fate.PASSED

    def cost(self, call: Callable[[], object]) -> dict[str, int]:
        before = self.kinds.copy()
        call()
        return dict(self.kinds - before)


def kind_of(request: Request) -> str:
    query = request.path.partition("?")[2]
    for word, kind in (
        ("list-type", "LIST"),
        ("partNumber", "PART"),
        ("uploadId", "COMPLETE"),
        ("uploads", "BEGIN"),
        ("delete", "DELETE"),
    ):
        if word in query:
            return kind
    return request.method


@pytest.mark.parametrize("width", [64, 1500], ids=["one PUT", "an upload"])
def test_a_run(seaweed: SeaweedFS, proxy: Proxy, width: int) -> None:
    counted = Counted()
    proxy.choose = counted
    url = seaweed.url(fresh(), proxy.endpoint)
    state = {"model": torch.nn.Linear(width, width)}
    image_bytes = 4 * width * (width + 1)
    parts = -(-image_bytes // PART_BYTES)
    image = {"PART": parts, "BEGIN": 1, "COMPLETE": 1, "HEAD": 1} if parts > 1 else {"PUT": 1}
    assert sum(image.values()) <= parts + 4

    def save(ckpt: holdfast.Checkpointer, step: int) -> None:
        ckpt.save(step).wait(60)
        ckpt._tiers.durable.settle(60)

    def run() -> holdfast.Checkpointer:
        return holdfast.Checkpointer(url, state, keep=holdfast.Keep(last=KEPT))

    with run() as ckpt:
        for step in range(1, KEPT + 2):
            save(ckpt, step)
        made = counted.cost(lambda: save(ckpt, KEPT + 2))
        assert made == dict(Counter(image) + Counter(COMMIT) + Counter(GONE))
    runs: list[holdfast.Checkpointer] = []
    made = counted.cost(lambda: runs.append(run()))
    assert made == {"LIST": 3, "GET": 1, "PUT": 1, "DELETE": 1}
    made = counted.cost(runs[0].restore)
    assert made.pop("LIST") == 2 and set(made) <= {"GET", "HEAD"}
    made = counted.cost(lambda: save(runs[0], KEPT + 3))
    assert made == dict(Counter(image) + Counter(COMMIT) + Counter(GONE))
    runs[0].close()
