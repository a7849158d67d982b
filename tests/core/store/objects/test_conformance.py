"""The public suite of stores on servers of four kinds; a store that does not heed conditions is refused."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, final

import pytest

import holdfast
from builders import FSDP_TP, describe
from core.store.objects.fixtures import fresh
from core.store.objects.google_stub import GoogleStub
from core.store.objects.proxy import Proxy
from core.store.objects.servers import Azurite, Moto, S3rver, SeaweedFS
from holdfast.core.checkpoint.committing import commit
from holdfast.core.checkpoint.names import manifest_key, read_manifest
from holdfast.errors import Corrupt, Exists, UsageError
from holdfast.store import Store, get_small, open_store
from holdfast.testing import Operation, StoreTests
from holdfast.testing.stores import raised, together
from holdfast.testing.wrappers import Wrapper

T = TypeVar("T")
RACERS = 8


class TestSeaweedFS(StoreTests):
    @pytest.fixture
    def store(self, seaweed: SeaweedFS) -> Store:
        return open_store(seaweed.url(fresh()))

    # SeaweedFS lets who loses a race wait for whole seconds: the gate has races of one turn, below

    @pytest.mark.soak
    def test_put_if_absent_has_one_winner(self, store: Store) -> None:
        super().test_put_if_absent_has_one_winner(store)

    @pytest.mark.soak
    def test_replacing_has_one_winner(self, store: Store) -> None:
        super().test_replacing_has_one_winner(store)


@pytest.mark.soak
class TestMoto(StoreTests):
    @pytest.fixture
    def store(self, moto: Moto) -> Store:
        return open_store(moto.url(fresh()))


class TestGoogle(StoreTests):
    @pytest.fixture
    def store(self, google: GoogleStub) -> Store:
        return open_store(google.url(fresh()))


@pytest.mark.soak
class TestAzurite(StoreTests):
    @pytest.fixture
    def store(self, azurite: Azurite) -> Store:
        return open_store(azurite.url(fresh()))


# conditions


@pytest.fixture(
    params=["seaweed", "moto", "google", pytest.param("azurite", marks=pytest.mark.soak)]
)
def store(request: pytest.FixtureRequest) -> Store:
    return open_store(request.getfixturevalue(request.param).url(fresh()))


def test_eight_racing_puts_have_one_winner(store: Store) -> None:
    def attempt(name: bytes, **condition: Any) -> bytes | None:
        try:
            store.put("claim", name * 1000, **condition)
        except Exists:
            return None
        return name * 1000

    seen = None
    for turn in range(2):
        names = [bytes([65 + RACERS * turn + i]) for i in range(RACERS)]  # none puts what was seen
        condition: dict[str, Any] = {"if_absent": True} if seen is None else {"replacing": seen}
        winners = together(*(partial(attempt, name, **condition) for name in names))
        assert len([name for name in winners if name]) == 1, turn
        seen = store.get("claim")
        assert seen in winners


def test_eight_racing_commits_have_one_winner(store: Store) -> None:
    """Each has looked before one of them puts its manifest; the losers say that they have not committed."""
    meeting = Meeting(store, manifest_key(5), RACERS)

    def attempt(run: int) -> int | str:
        try:
            commit(meeting, describe(FSDP_TP, {}, step=5, run=run))
        except UsageError as error:
            return str(error)
        return run

    ends = together(*(partial(attempt, 1 + i) for i in range(RACERS)))
    (winner,) = (end for end in ends if isinstance(end, int))
    assert read_manifest(store, 5).run == winner
    assert all("another process has saved step 5" in str(end) for end in ends if end != winner)


@final
class Meeting(Wrapper):
    """A store whose first `n` gets of a key end together."""

    def __init__(self, inner: Store, key: str, n: int) -> None:
        super().__init__(inner)
        self.key, self.turn = key, itertools.count()
        self.n, self.barrier = n, threading.Barrier(n, timeout=300)

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        try:
            return call()
        finally:
            if (operation.name, operation.key) == ("get", self.key) and next(self.turn) < self.n:
                self.barrier.wait()


# lengths


def test_the_length_of_a_small_object_is_looked_at_first(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head of the reply states it, before anything of its body is taken into memory."""
    store.put("a", b"four")
    monkeypatch.setattr("holdfast.core.store.objects.SMALL_FILE_BYTES", 3)
    with pytest.raises(Corrupt, match=r"'a' in .* has 4 bytes; of its kind at most 3"):
        get_small(store, "a")
    assert store.get("a") == b"four"


# stores that do not heed conditions


def refused(url: str) -> None:
    """At the first claim, with the reason, and nothing is left; `unsafe` in the URL lets it be."""
    error = raised(UsageError, holdfast.Checkpointer, url, {"data": {"x": 1}})
    assert "does not heed If-None-Match" in str(error)
    assert "unsafe=yes" in str(error)
    assert open_store(url).list() == []
    with holdfast.Checkpointer(f"{url}&unsafe=yes", {"data": {"x": 1}}) as ckpt:
        ckpt.save(1).wait(300)
    assert holdfast.steps(f"{url}&unsafe=yes") == [1]


def test_a_store_that_never_sees_conditions_is_refused(moto: Moto) -> None:
    """moto does not look at signatures, so a header may be lost on the way."""
    with Proxy(moto.endpoint, stripped=frozenset({"if-none-match", "if-match"})) as proxy:
        refused(moto.url(fresh(), proxy.endpoint))


@pytest.mark.soak
def test_s3rver_is_refused(s3rver: S3rver, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3rver.env.items():
        monkeypatch.setenv(name, value)
    refused(s3rver.url(fresh()))
