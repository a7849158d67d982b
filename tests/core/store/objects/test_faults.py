"""Requests that fail on their way: refused, cut, late, done without a word of it; a bucket that is gone."""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import holdfast
from core.store.objects.fixtures import fresh
from core.store.objects.proxy import Choice, Fate, Proxy, Request, Shares
from core.store.objects.servers import SeaweedFS
from holdfast.core.checkpoint.claiming import claim
from holdfast.core.checkpoint.verifying import verify
from holdfast.errors import Exists, HoldfastError, HoldfastWarning
from holdfast.live.saving import durable
from holdfast.store import Store, open_store
from holdfast.testing.stores import cut, raised, read, sample, write_all
from system.crash.single import WAIT_S, contents, state_of

MIB = 1 << 20
PATIENCE_S = 20.0
"""Bounds on an operation, so that a test of a fault is over soon."""


@pytest.fixture
def place(seaweed: SeaweedFS, proxy: Proxy) -> tuple[Store, Store]:
    """One place, through the proxy and straight."""
    prefix = fresh()
    store = open_store(seaweed.url(prefix, proxy.endpoint))
    store.patience.limit_s = PATIENCE_S
    store.put("first", b"", if_absent=True)  # it has proved that it heeds conditions
    store.delete("first")
    proxy.reset()
    return store, open_store(seaweed.url(prefix))


def once(fate: Fate, *, which: Callable[[Request], bool] = lambda r: r.changes) -> Choice:
    """A choice for the first request of a kind; all others pass."""
    left = [fate]

    def choose(request: Request) -> Fate:
        return left.pop() if left and which(request) else Fate.PASSED

    return choose


# lost replies and conflicts

FAULTS = [Fate.REFUSED, Fate.CUT, Fate.DROPPED, Fate.LOST]


@pytest.mark.soak_except("cut", "dropped", "lost")
@pytest.mark.parametrize("fate", FAULTS, ids=lambda fate: fate.name.lower())
def test_a_conditional_put_is_done_once(place: tuple[Store, Store], proxy: Proxy, fate) -> None:
    store, straight = place
    proxy.choose = once(fate)
    store.put("a", b"mine", if_absent=True)
    proxy.choose = once(fate)
    store.put("a", b"mine, too", replacing=b"mine")
    assert proxy.fates[fate] == 2
    assert straight.get("a") == b"mine, too"
    error = raised(Exists, store.put, "a", b"other", if_absent=True)
    assert error.key == "a"
    assert straight.get("a") == b"mine, too"


@pytest.mark.parametrize("condition", [{"if_absent": True}, {"replacing": b"seen"}], ids=str)
def test_who_comes_second_after_a_lost_request_has_lost(
    place: tuple[Store, Store], proxy: Proxy, condition: dict[str, Any]
) -> None:
    """The request never arrived, and before it is repeated another process puts its own object."""
    store, straight = place
    if "replacing" in condition:
        straight.put("a", b"seen")

    def overtaken(request: Request) -> Fate:
        if request.method != "PUT":
            return Fate.PASSED
        proxy.choose = lambda request: Fate.PASSED
        straight.put("a", b"theirs", **condition)
        return Fate.LOST

    proxy.choose = overtaken
    assert raised(Exists, store.put, "a", b"mine", **condition).key == "a"
    assert straight.get("a") == b"theirs"


def test_a_claim_whose_reply_was_lost_is_ours(place: tuple[Store, Store], proxy: Proxy) -> None:
    store, straight = place
    for run in (1, 2):
        proxy.choose = once(Fate.DROPPED)
        assert claim(store).run == run
        assert straight.list("claims/") == [f"claims/{run:010d}.json"]


@pytest.mark.soak_except("begin-cut", "part-refused", "end-dropped")
@pytest.mark.parametrize("fate", FAULTS, ids=lambda fate: fate.name.lower())
@pytest.mark.parametrize("which", ["begin", "part", "end"])
def test_an_upload_survives_a_fault(
    place: tuple[Store, Store], proxy: Proxy, which: str, fate: Fate
) -> None:
    store, straight = place
    step = {
        "begin": lambda r: r.method == "POST" and "uploads" in r.path,
        "part": lambda r: r.method == "PUT" and "partNumber=2" in r.path,
        "end": lambda r: r.method == "POST" and "uploadId=" in r.path,
    }[which]
    proxy.choose = once(fate, which=step)
    data = sample(17 * MIB + 5)
    writer = store.create("big", len(data))
    write_all(writer, cut(data, 4 * MIB))
    writer.finish()
    assert proxy.fates[fate] == 1
    assert read(straight, "big", 0, len(data)) == data


@pytest.mark.soak_except("refused", "cut")
@pytest.mark.parametrize("fate", FAULTS, ids=lambda fate: fate.name.lower())
def test_reads_lists_and_deletes_survive_a_fault(
    place: tuple[Store, Store], proxy: Proxy, fate: Fate
) -> None:
    store, straight = place
    data = sample(3 * MIB)
    straight.put("a", data)
    for call, expected in (
        (lambda: store.get("a"), data),
        (lambda: read(store, "a", 5, 2 * MIB), data[5 : 2 * MIB]),
        (lambda: store.entries(), [("a", len(data))]),
        (lambda: store.size("a"), len(data)),
        (lambda: store.delete("a"), None),
    ):
        proxy.choose = once(fate, which=lambda request: True)
        assert call() == expected
    assert proxy.fates[fate] == 5
    assert straight.list() == []


# many faults


def saves_through(
    proxy: Proxy, url: str, straight: str, num_saves: int, num_floats: int
) -> Counter[str]:
    """Save again and again; what each came to.  Every fifth time all that is there is restored."""
    outcomes: Counter[str] = Counter()
    state = {"data": {"big": torch.zeros(num_floats), "step": 0}}
    last = 0
    with holdfast.Checkpointer(url, state, keep=holdfast.Keep(last=2), deadline_s=300) as ckpt:
        for step in range(1, num_saves + 1):
            state["data"]["big"].copy_(filled(step, num_floats))
            state["data"]["step"] = step
            try:
                ckpt.save(step).wait(WAIT_S)
            except HoldfastError as error:
                outcomes[type(error).__name__] += 1
                print(step, error)
            else:
                outcomes["committed"] += 1
                last = step
            if step % 5 == 0:
                assert ckpt.restore() >= last
                found = state["data"]["step"]
                assert torch.equal(state["data"]["big"], filled(found, num_floats))
                outcomes["restored"] += 1
    store = open_store(straight)
    steps = holdfast.steps(straight)
    assert steps and steps[-1] >= last
    for step in steps:
        assert verify(store, step).problems == []
        with holdfast.open(straight, step=step) as saved:
            assert (saved.read("data.big") == filled(step, num_floats).numpy()).all()
    return outcomes


def filled(step: int, num_floats: int) -> torch.Tensor:
    """Values without a pattern, of that step."""
    return torch.randn(num_floats, generator=torch.Generator().manual_seed(step))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("num_saves", "num_floats", "delay_s"),
    [
        pytest.param(20, 60_000, 0.3, id="short"),
        pytest.param(180, 60_000, 5.0, id="long"),
        pytest.param(20, 6_000_000, 5.0, id="uploads"),
    ],
)
def test_each_save_commits_or_fails_cleanly(
    seaweed: SeaweedFS, proxy: Proxy, num_saves: int, num_floats: int, delay_s: float
) -> None:
    proxy.delay_s = delay_s
    proxy.choose = Shares(seed=num_saves, refused=0.1, cut=0.01, delayed=0.01, dropped=0.03)
    prefix = fresh()
    url, straight = seaweed.url(prefix, proxy.endpoint), seaweed.url(prefix)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HoldfastWarning)
        outcomes = saves_through(proxy, url, straight, num_saves, num_floats)
    print(dict(outcomes), dict(proxy.counts), dict(proxy.fates))
    assert outcomes["committed"] >= 0.95 * num_saves
    assert outcomes["restored"] == num_saves // 5


# a bucket that is gone


@pytest.mark.soak
@pytest.mark.parametrize(
    ("how", "when_busy"),
    [
        ("refuses", "skip"),
        ("is silent", "skip"),
        ("refuses", "queue"),
        ("is silent", "queue"),
    ],
)
def test_a_bucket_that_is_gone_costs_saves_and_not_the_training(
    seaweed: SeaweedFS, proxy: Proxy, how: str, when_busy: Any
) -> None:
    """The training completes, and is not held by saves that fail; where it was asked to wait for the save
    before, no longer than that may take."""
    prefix, deadline_s = fresh(), 2.0
    url = seaweed.url(prefix, proxy.endpoint)
    with pytest.warns(HoldfastWarning) as said:
        held = trains_on(url, proxy, how, deadline_s, when_busy)
    warned = [str(w.message) for w in said]
    assert any("failed" in text for text in warned), warned
    print(
        how, when_busy, f"held {sum(held):.2f} s, {max(held):.2f} at most; {len(warned)} warnings"
    )
    assert max(held) < (deadline_s if when_busy == "skip" else deadline_s + 2), held
    found = contents(open_store(seaweed.url(prefix)))
    assert 31 in found and min(found) <= 3
    if when_busy == "queue":
        assert {1, 2, 3} <= set(found)
    assert all(value == min(step, 30) for step, value in found.items())


@pytest.mark.soak_except("refuses")
@pytest.mark.parametrize("how", ["refuses", "is silent"])
def test_by_default_the_training_waits_once(
    seaweed: SeaweedFS, proxy: Proxy, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves are left out as soon as it is clear that storage does not answer."""
    monkeypatch.setattr(durable, "STUCK_S", 1.0)
    url = seaweed.url(fresh(), proxy.endpoint)
    with pytest.warns(HoldfastWarning) as said:
        held = trains_on(url, proxy, how, 60.0, None)
    warned = [str(w.message) for w in said]
    assert any("left out" in text for text in warned), warned
    assert max(held) < 10 and len([h for h in held if h > 0.5]) <= 2, held
    assert holdfast.steps(url)[-1] == 31


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_bucket_that_is_gone_for_ten_minutes(seaweed: SeaweedFS, proxy: Proxy) -> None:
    """With all defaults: saves are left out or fail, and the training is held once."""
    prefix = fresh()
    with pytest.warns(HoldfastWarning) as said:
        held = trains_through(seaweed.url(prefix, proxy.endpoint), proxy, out_s=600.0)
    print(
        f"{len(held)} steps; held {sum(held):.1f} s, {max(held):.1f} at most; {len(said)} warnings"
    )
    assert max(held) < 40 and len([h for h in held if h > 0.5]) <= 2, held
    found = contents(open_store(seaweed.url(prefix)))
    assert len(held) in found and {10, 20} <= set(found)
    assert all(value == step for step, value in found.items())


def trains_through(url: str, proxy: Proxy, out_s: float) -> list[float]:
    """Steps of a second with a save each ten; there is no bucket from step 25 on for `out_s` seconds, and a
    minute later the training ends.  The seconds that each call of `step` took."""
    held: list[float] = []
    state, left = state_of(0), float("inf")
    with holdfast.Checkpointer(url, state, every=10) as ckpt:
        while len(held) % 10 or left > -60:
            step = len(held) + 1
            state["data"].update(state_of(step)["data"])
            time.sleep(1.0)
            began = time.monotonic()
            ckpt.step(step)
            held.append(time.monotonic() - began)
            if step == 25:
                ckpt.wait()
                away(proxy, "refuses")
                gone = time.monotonic()
            if step >= 25:
                was, left = left, gone + out_s - time.monotonic()
                if left <= 0 < was:
                    back(proxy, "refuses")
    return held


def trains_on(url: str, proxy: Proxy, how: str, deadline_s: float, when_busy: Any) -> list[float]:
    """Thirty steps, of which 4 to 24 have no bucket; the seconds that each call of `step` took."""
    held, state = [], state_of(0)
    with holdfast.Checkpointer(
        url, state, every=1, deadline_s=deadline_s, when_busy=when_busy
    ) as ckpt:
        for step in range(1, 31):
            if step == 4:
                ckpt.wait()
                away(proxy, how)
            if step == 25:
                back(proxy, how)
                time.sleep(min(deadline_s, 5.0))  # what was begun meanwhile is given up
            state["data"].update(state_of(step)["data"])
            time.sleep(0.1)
            begun = time.monotonic()
            ckpt.step(step)
            held.append(time.monotonic() - begun)
        ckpt.save(31).wait(WAIT_S)
    return held


def away(proxy: Proxy, how: str) -> None:
    if how == "refuses":
        proxy.stop()
    else:
        proxy.delay_s, proxy.choose = 3600.0, lambda request: Fate.DELAYED


def back(proxy: Proxy, how: str) -> None:
    if how == "is silent":
        proxy.choose = lambda request: Fate.PASSED
        proxy.stop()  # the connections that wait for an answer
    proxy.start()


# two runs


def test_two_runs_that_race_on_one_root(seaweed: SeaweedFS) -> None:
    """As from two hosts, where neither can see the other: who claims later commits; nothing is mixed."""
    url = seaweed.url(fresh())
    values = [1.0, 2.0]
    runs = [holdfast.Checkpointer(url, state_of(value), deadline_s=300) for value in values]
    errors: list[list[str]] = [[], []]

    def live(number: int) -> None:
        for step in range(1, 9):
            try:
                runs[number].save(step).wait(WAIT_S)
            except HoldfastError as error:
                errors[number].append(str(error))

    threads = [threading.Thread(target=live, args=[n]) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    for run in runs:
        run.close()
    assert len(errors[0]) == 8 and all("taken over by run 2" in said for said in errors[0])
    assert errors[1] == []
    assert contents(open_store(url)) == {step: 2.0 for step in range(1, 9)}
