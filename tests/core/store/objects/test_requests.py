"""Requests as a server counts them: what `checkpoint/test_requests.py` counts, over HTTP.

    pytest -s tests/core/store/objects/test_requests.py -m ""      # prints the table, for 1, 4 and 8 ranks

A listing is a request for each 1,000 keys, which none of these roots has.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
from core.store.objects.fixtures import fresh
from core.store.objects.google_stub import GoogleStub
from core.store.objects.proxy import Fate, Proxy, Request
from core.store.objects.requests_cases import kind_of
from core.store.objects.servers import SeaweedFS
from holdfast.base.threads import in_threads
from holdfast.core.store.objects import UPLOAD_PART_BYTES, ObjectStore
from holdfast.store import keys_below
from system.distributed.launch import launch

KEPT = 3
COMMIT = {"GET": 1, "LIST": 2, "PUT": 1}
GONE = {"LIST": 1, "GET": 1, "DELETE": 2}
"""Of one step that goes after the commit: its manifest, and the images of all ranks with what goes of the
records.  Obstore deletes by POST."""
CLAIM = {"LIST": 1, "GET": 1, "PUT": 1, "DELETE": 1}
MOST_OF_RANK_0 = 8
"""Requests of a save besides the image."""


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


@pytest.mark.soak
def test_a_root_among_many_other_files(google: GoogleStub) -> None:
    """Its folders are listed apart when a page of others was seen."""
    counted = Counted()
    with Proxy(google.endpoint) as proxy:
        proxy.choose = counted
        store = ObjectStore(google.url(fresh(), proxy.endpoint))
        ours = [f"{folder}/a{number}" for folder in ("log", "steps") for number in range(3)]
        in_threads(lambda key: store.put(key, b"x"), [*ours, "claims/1"], 8)
        below = ["steps/", "log/"]
        listed = counted.cost(lambda: keys_below(store, below))
        assert [*keys_below(store, below)] == ours and listed == {"LIST": 1}
        in_threads(lambda key: store.put(key, b"x"), [f"data/{n}" for n in range(1001)], 8)
        listed = counted.cost(lambda: keys_below(store, below))
        assert keys_below(store, below) == dict.fromkeys(ours, 1) and listed == {"LIST": 4}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("server", "requests"),
    [
        ("seaweed", {"DELETE": 2}),  # of S3: 1,000 at a time
        ("google", {"DELETE": 1001}),
        pytest.param("azurite", {"POST": 4}, marks=pytest.mark.soak),  # 256 at a time
    ],
)
def test_many_are_deleted(
    request: pytest.FixtureRequest, server: str, requests: dict[str, int]
) -> None:
    running, counted = request.getfixturevalue(server), Counted()
    with Proxy(running.endpoint) as proxy:
        proxy.choose = counted
        url = fresh()
        keys = [f"steps/{number}" for number in range(1001)]
        near, far = ObjectStore(running.url(url)), ObjectStore(running.url(url, proxy.endpoint))
        in_threads(lambda key: near.put(key, b"x"), ["stays", *keys], 8)
        assert counted.cost(lambda: far.delete_many(keys)) == requests
        assert near.list() == ["stays"]


@pytest.mark.soak_except("one PUT")
@pytest.mark.parametrize("width", [64, 1500], ids=["one PUT", "an upload"])
def test_a_run(seaweed: SeaweedFS, proxy: Proxy, width: int) -> None:
    counted = Counted()
    proxy.choose = counted
    url = seaweed.url(fresh(), proxy.endpoint)
    state = {"model": torch.nn.Linear(width, width)}
    image_bytes = 4 * width * (width + 1)
    parts = -(-image_bytes // UPLOAD_PART_BYTES)
    image = {"PART": parts, "BEGIN": 1, "COMPLETE": 1, "HEAD": 1} if parts > 1 else {"PUT": 1}
    assert sum(image.values()) <= parts + 4

    def save(ckpt: holdfast.Checkpointer, step: int) -> None:
        ckpt.save(step).wait(300)
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
    assert made == CLAIM
    made = counted.cost(runs[0].restore)
    assert made.pop("LIST") == 1 and set(made) <= {"GET", "HEAD"}
    made = counted.cost(lambda: save(runs[0], KEPT + 3))
    assert made == dict(Counter(image) + Counter(COMMIT) + Counter(GONE))
    runs[0].close()


@pytest.mark.soak
@pytest.mark.parametrize(
    "num_ranks",
    [1, pytest.param(4, marks=pytest.mark.soak), pytest.param(8, marks=pytest.mark.soak)],
)
def test_ranks_with_100_steps_kept(seaweed: SeaweedFS, tmp_path: Path, num_ranks: int) -> None:
    out = tmp_path / fresh().partition("/")[0]
    out.mkdir()
    launch("core.store.objects.requests_cases", num_ranks, out, seaweed.endpoint).check()
    ranks: list[dict[str, Counter[str]]] = []
    for rank in range(num_ranks):
        phases = json.loads((out / f"requests-{rank}.json").read_text())
        ranks.append({name: Counter(kind for kind, _ in made) for name, made in phases.items()})
        for name, made in ranks[-1].items():
            print(f"{num_ranks} ranks  {name:32} rank {rank}  {made.total():4}  {dict(made)}")
    for name in ranks[0]:
        if "save" in name:  # of a small image, which is one PUT
            assert ranks[0][name].total() <= 1 + MOST_OF_RANK_0
            assert all(others[name] == {"PUT": 1} for others in ranks[1:])
    for kind in ("", " with records"):
        reads = (
            {"GET": 2} if num_ranks > 1 else {}
        )  # all ranks look whether their root has the claim
        assert ranks[0][f"claim{kind}"] == CLAIM | reads
        both = (one[phase + kind] for one in ranks for phase in ("claim", "restore"))
        assert sum(made["LIST"] for made in both) == 2
    for name in ("save", "first save"):
        assert ranks[0][name] == Counter({"PUT": 1}) + Counter(COMMIT) + Counter(GONE)
