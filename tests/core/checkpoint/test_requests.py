"""Requests that each deed costs in a bucket, where every call of a store is one: few, however many steps
are kept.  A listing is one request for every 1,000 keys.

    pytest -s tests/core/checkpoint/test_requests.py      # prints the table
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import holdfast
from holdfast import store as stores
from holdfast.core.checkpoint.claiming import claim
from holdfast.core.checkpoint.listing import survey_root
from holdfast.core.checkpoint.pruning import prune
from holdfast.core.checkpoint.tidying import Keep
from holdfast.core.format.manifest import MANIFEST_HEAD_BYTES
from holdfast.store import MemoryStore
from holdfast.testing import Counting

KEPT = (3, 34, 100)
IMAGE = {"create": 1, "write": 1, "finish": 1}
"""Of a small image, which a bucket takes by one PUT; of a larger one each write is a part, and `finish`
asks whether the key is taken."""
COMMIT = {"get": 1, "list": 1, "entries": 1, "put": 1}
"""The manifest that was there, the claims, the files of the attempt, the new manifest."""
MOST_OF_RANK_0 = 8


class Root:
    """A root in memory that counts requests, and a training that saves there."""

    def __init__(self, url: str, store: Counting, kept: int) -> None:
        self.url = url
        self.store = store
        self.kept = kept
        model = torch.nn.Linear(300, 300)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 300)).sum().backward()
        optimizer.step()
        self.state = {"model": model, "optim": optimizer}

    def run(self, **options: Any) -> holdfast.Checkpointer:
        return holdfast.Checkpointer(
            self.url, self.state, keep=holdfast.Keep(last=self.kept), **options
        )

    def save(self, ckpt: holdfast.Checkpointer, step: int) -> None:
        """Save, and tidy up."""
        ckpt.save(step).wait(300)
        ckpt._tiers.durable.settle(60)

    def cost(self, what: str, call: Callable[[], object]) -> dict[str, int]:
        """Number of requests of each kind that a call makes."""
        before = self.store.calls.copy()
        call()
        made = dict(self.store.calls - before)
        print(f"{self.kept:4} kept  {what:34} {sum(made.values()):4}  {made}")
        return made


@pytest.fixture(scope="module")
def opened() -> Iterator[dict[str, Counting]]:
    """Stores that count, by their URLs `counted://name`."""
    opened: dict[str, Counting] = {}

    def count(url: str) -> Counting:
        return opened.setdefault(url, Counting(MemoryStore(f"requests/{url}")))

    stores.register("counted", count)
    yield opened
    del stores._registered["counted"]


@pytest.fixture(scope="module", params=KEPT)
def root(request: pytest.FixtureRequest, opened: dict[str, Counting]) -> Root:
    """A root with as many steps as are kept, by a run that has ended."""
    url, kept = f"counted://kept{request.param}", request.param
    stores.open_store(url)
    root = Root(url, opened[url], kept)
    with root.run() as ckpt:
        for step in range(1, kept + 2):
            ckpt.save(step).wait(300)
    assert holdfast.steps(url) == list(range(2, kept + 2))
    return root


def test_a_run(root: Root) -> None:
    """From its claim to its end: the first save, too, is one of 8 requests besides the image."""
    run: list[holdfast.Checkpointer] = []
    made = root.cost("claim", lambda: run.append(root.run()))
    assert made == {"entries_many": 1, "get": 1, "put": 1, "delete": 1}
    (ckpt,) = run
    made = root.cost("restore", ckpt.restore)
    assert made["entries_many"] == made["get"] == 1 and not {"list", "entries"} & made.keys()
    step = holdfast.steps(root.url)[-1]
    for when in ("first save", "next save"):
        step += 1
        made = root.cost(when, lambda: root.save(ckpt, step))
        tidied = {"list": 1, "get": 1, "delete": 1, "delete_many": 1}
        assert made == dict(Counter(IMAGE) + Counter(COMMIT) + Counter(tidied))
        assert sum(made.values()) <= sum(IMAGE.values()) + MOST_OF_RANK_0
    made = root.cost("save in its place", lambda: root.save(ckpt, step))
    replaced = {"list": 1, "get": 1, "delete_many": 1}
    assert made == dict(Counter(IMAGE) + Counter(COMMIT) + Counter(replaced))
    made = root.cost("close", ckpt.close)
    assert made == {"list": 1, "get": 1, "put": 1}


def test_a_restore_reads_what_is_wanted(root: Root) -> None:
    """The image once, the manifest of its step, and of the others the beginnings."""
    with root.run() as ckpt:
        before = root.store.bytes_read
        step = ckpt.restore()
        num_bytes = root.store.bytes_read - before
    sizes = dict(root.store.entries(f"steps/{step:010d}/"))
    assert num_bytes <= 1.1 * sum(sizes.values()) + 256 * 1024 + MANIFEST_HEAD_BYTES * root.kept


def test_a_run_that_does_not_restore(root: Root) -> None:
    """It asks once whose the steps are, by the beginnings of manifests that it does not know, and deletes
    none of them."""
    there = holdfast.steps(root.url)
    with root.run(anew=True) as ckpt:
        step = there[-1]
        made = root.cost("first save, without a restore", lambda: root.save(ckpt, step + 1))
        assert made.pop("read") == root.kept
        assert sum(made.values()) <= sum(IMAGE.values()) + MOST_OF_RANK_0
        assert not {"delete", "delete_many"} & made.keys()
        made = root.cost("next save, without a restore", lambda: root.save(ckpt, step + 2))
        assert not {"delete", "delete_many"} & made.keys()
        assert sum(made.values()) <= sum(IMAGE.values()) + MOST_OF_RANK_0
    assert prune(root.store, Keep(last=root.kept)) == there[:2]


def test_looking(root: Root) -> None:
    steps = root.cost("holdfast.steps", lambda: holdfast.steps(root.url))
    assert steps == {"list": 2, "read": root.kept, "get": 1}
    ls = root.cost("ls", lambda: survey_root(root.store))
    assert ls == {"list": 1, "entries": 1, "get": root.kept}
    newest = holdfast.steps(root.url)[-1]
    load = root.cost("holdfast.load", lambda: holdfast.load(root.url, root.state))
    named = root.cost(
        "holdfast.load of a step", lambda: holdfast.load(root.url, root.state, step=newest)
    )
    assert (load["list"], named["list"]) == (2, 1)
    assert load["read"] - root.kept == named["read"]


def test_a_save_by_itself(root: Root) -> None:
    """Among many steps it costs what it costs in an empty root."""
    newest = holdfast.steps(root.url)[-1]
    made = root.cost("holdfast.save", lambda: holdfast.save(root.url, root.state, step=newest + 1))
    before = {"entries_many": 1, "get": 1}  # claims, steps, records; the newest claim
    assert made.pop("read", 0) <= 1
    assert Counter(made) - Counter(IMAGE) - Counter(COMMIT) <= Counter(before)
    root.store.delete(f"steps/{newest + 1:010d}/manifest.json")


def test_pruning(root: Root) -> None:
    """A listing; for each step that goes its manifest, which is read and deleted; then all images."""
    last = max(root.kept // 2, 1)
    there = holdfast.steps(root.url)
    gone: list[int] = []
    made = root.cost("prune to half", lambda: gone.extend(prune(root.store, Keep(last=last))))
    assert gone == there[:-last]
    assert made.pop("entries") == made.pop("list") == 1  # of the newest step: is it whole?
    bulk = {"delete": len(gone), "delete_many": 1}
    assert made == {"read": len(there), "get": 1 + len(gone), **bulk}


def test_a_claim_of_a_root_whose_claims_are_gone(root: Root) -> None:
    """The numbers of runs are in the names of the images."""
    for key in root.store.list("claims/"):
        root.store.delete(key)
    made = root.cost("claim without claims", lambda: claim(root.store))
    assert made == {"entries_many": 1, "list": 1, "put": 1}
    assert claim(MemoryStore(root.store.inner.name)).run > 1
