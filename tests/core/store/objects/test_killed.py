"""SIGKILL: of trainings and saves on SeaweedFS, at random and at every request, and of SeaweedFS itself."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from core.store.objects.cases import digests, new
from core.store.objects.fixtures import fresh
from core.store.objects.proxy import Fate, Proxy, Request
from core.store.objects.servers import S3_ENV, SeaweedFS
from holdfast.core.checkpoint.verifying import verify
from holdfast.errors import HoldfastError
from holdfast.store import Store, open_store
from system.crash.single import WAIT_S, contents, leftovers
from tiers.memory.zygote import KILLED, Lives

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("HOLDFAST_KILL_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 30)
SILENCE_S = 60.0


def notes(place: Path) -> list[dict[str, Any]]:
    path = place / "notes.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def tell(lives: Lives, **what: Any) -> None:
    (lives.place / "what.json").write_text(json.dumps({"env": S3_ENV, **what}))


class Killer(threading.Thread):
    """Kills the process that writes notes next, some seconds after it has made `num_steps` steps."""

    def __init__(self, place: Path, num_steps: int, after_s: float) -> None:
        super().__init__(daemon=True)
        self.place, self.num_steps, self.after_s = place, num_steps, after_s
        self.seen = len(notes(place))
        self.start()

    def run(self) -> None:
        until = time.monotonic() + SILENCE_S
        while time.monotonic() < until:
            found = notes(self.place)[self.seen :]
            if found and sum("step" in line for line in found) >= self.num_steps:
                time.sleep(self.after_s)
                os.kill(found[0]["pid"], signal.SIGKILL)
                return
            time.sleep(0.005)


@pytest.mark.soak_except("2")
@pytest.mark.parametrize("kills", [2, 20])
def test_a_training_with_records(lives: Lives, seaweed: SeaweedFS, kills: int) -> None:
    """Each life begins with the state of the uninterrupted training, at the last step but one or later."""
    draw = random.Random(f"{SEED} {kills}")
    url = seaweed.url(fresh())
    begun = time.monotonic()
    for life in range(kills):  # the last one makes a step at least
        tell(lives, url=url, until=100_000)
        least = int(life == kills - 1)
        killer = Killer(lives.place, draw.randint(least, 12), draw.uniform(0, 0.1))
        (told,) = lives.live(nodes=[0], case="core.store.objects.cases:trains")
        killer.join()
        assert told.status == KILLED, (SEED, lives.errors())
    last = [line["step"] for line in notes(lives.place) if "step" in line][-1]
    tell(lives, url=url, until=last + 3)
    (told,) = lives.live(nodes=[0], case="core.store.objects.cases:trains")
    assert told.status == 0, (SEED, lives.errors())
    restored = check_restored(notes(lives.place))
    assert 2 <= len(restored) <= kills + 1  # some are killed before they have restored anything
    assert holdfast.steps(url)
    print(f"seed {SEED}: {kills} kills in {time.monotonic() - begun:.1f} s, restored {restored}")


def check_restored(lines: list[dict[str, Any]]) -> list[int]:
    """Each restore against the last step before it, and bit for bit against a plain run; the steps."""
    expected = {0: digests(new())}
    plain, done, found = new(), 0, []
    for line in lines:
        if "step" in line:
            done = line["step"]
        if "restored" not in line:
            continue
        step = line["restored"]
        assert done - 1 <= step <= done + 1, (done, line, SEED)
        for number in range(max(expected) + 1, step + 1):
            plain.step(number)
            expected[number] = digests(plain)
        assert line["digests"] == expected[step], (step, SEED)
        found.append(step)
    return found


# at every request


def pid(place: Path) -> int:
    return [line["pid"] for line in notes(place) if "pid" in line][-1]


CASES = {
    "save": {"saves": [(3, 3.0)], "keep": 5},
    "repeated save": {"saves": [(2, 20.0)], "keep": 5, "back": 1},
    "prune": {"saves": [(3, 3.0)], "keep": 1},
}


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_at_every_request(lives: Lives, seaweed: SeaweedFS, proxy: Proxy, case: str) -> None:
    """The process dies at each request that changes something: of a claim, a save, and what is tidied."""
    before = {1: 1.0, 2: 2.0}
    outcomes = []
    for n in range(1, 40):
        deaths = 0
        for fate in (Fate.LOST, Fate.DROPPED):
            prefix = fresh()
            prepared(lives, seaweed.url(prefix), before)
            deaths += dies(lives, proxy, seaweed.url(prefix, proxy.endpoint), case, n, fate)
            found = contents(open_store(seaweed.url(prefix)))
            outcomes.append(tuple(found.items()))
            check_outcome(case, before, found)
            recovers(lives, seaweed.url(prefix), found)
        if not deaths:
            break
    print(case, f"{n - 1} requests;", sorted(set(outcomes)))
    assert n > 4 and len(set(outcomes)) >= 2


def prepared(lives: Lives, url: str, before: dict[int, float]) -> None:
    tell(lives, url=url, saves=list(before.items()), keep=5)
    (told,) = lives.live(nodes=[0], case="core.store.objects.cases:saves")
    assert told.status == 0, lives.errors()


def dies(lives: Lives, proxy: Proxy, url: str, case: str, n: int, fate: Fate) -> bool:
    """A life that dies at its n-th change; False if it makes fewer."""
    tell(lives, url=url, **CASES[case])
    seen = [0]

    def choose(request: Request) -> Fate:
        seen[0] += request.changes
        if seen[0] < n:
            return Fate.PASSED
        if seen[0] == n and request.changes and fate is Fate.LOST:
            os.kill(pid(lives.place), signal.SIGKILL)
        return fate if seen[0] == n and request.changes else Fate.LOST

    def replied(request: Request) -> None:
        if seen[0] >= n:
            os.kill(pid(lives.place), signal.SIGKILL)

    proxy.choose, proxy.on_reply = choose, replied if fate is Fate.DROPPED else None
    (told,) = lives.live(nodes=[0], case="core.store.objects.cases:saves")
    assert told.status in (0, KILLED), lives.errors()
    return told.status == KILLED


def check_outcome(case: str, before: dict[int, float], found: dict[int, float]) -> None:
    new_step = {2: 20.0} if case == "repeated save" else {3: 3.0}
    if case == "prune":
        assert max(found) in (2, 3)
        assert found == before or found[3] == 3.0
    else:
        assert found in (before, {**before, **new_step})


def recovers(lives: Lives, url: str, before: dict[int, float]) -> None:
    tell(lives, url=url, saves=[(9, 9.0)], keep=5)
    (told,) = lives.live(nodes=[0], case="core.store.objects.cases:saves")
    assert told.status == 0, lives.errors()
    assert contents(open_store(url)) == {**before, 9: 9.0}
    assert leftovers(open_store(url)) == []


# the server


@pytest.mark.soak
@pytest.mark.parametrize(
    "kills", [pytest.param([2], id="once"), pytest.param([1, 3, 4, 5], id="four times")]
)
def test_the_server_dies_in_mid_save(tmp_path: Path, monkeypatch, kills: list[int]) -> None:
    """At the n-th change of a save; it is started again meanwhile, on the same data."""
    for name, value in S3_ENV.items():
        monkeypatch.setenv(name, value)
    with SeaweedFS(tmp_path) as server, Proxy(server.endpoint) as proxy:
        straight = server.url("run")
        state = {"data": {"big": torch.zeros(3_000_000)}}
        ends, committed = [], {0: 0.0}
        with holdfast.Checkpointer(
            server.url("run", proxy.endpoint), state, keep=holdfast.Keep(last=50), deadline_s=300
        ) as ckpt:
            for step, n in enumerate([0, *kills, 0], 1):
                state["data"]["big"].fill_(step)
                starting = kill_at(server, proxy, n) if n else None
                try:
                    ckpt.save(step).wait(WAIT_S)
                    committed[step] = step
                    ends.append("committed")
                except HoldfastError as error:
                    ends.append(str(error)[:120])
                if starting is not None:
                    starting.join(SILENCE_S)
                    assert server.process.is_alive
                check_saved(open_store(straight), committed)
        print(kills, ends, server.port)
        assert ends[0] == ends[-1] == "committed"


def kill_at(server: SeaweedFS, proxy: Proxy, n: int) -> threading.Thread:
    """SIGKILL at the n-th change from now, and a start a second later; the thread that does it."""
    due, seen = threading.Event(), [0]

    def choose(request: Request) -> Fate:
        seen[0] += request.changes
        if seen[0] >= n and not due.is_set():
            server.kill()
            due.set()
        return Fate.PASSED

    def restart() -> None:
        if due.wait(SILENCE_S):
            time.sleep(1)
            server.start()

    proxy.choose = choose
    thread = threading.Thread(target=restart, daemon=True)
    thread.start()
    return thread


def check_saved(store: Store, committed: dict[int, float]) -> None:
    """All that was committed is there and verifies, and nothing is mixed."""
    steps = holdfast.steps(store.url)
    assert set(committed) - {0} <= set(steps)
    for step in steps:
        assert verify(store, step).problems == []
        with holdfast.open(store.url, step=step) as saved:
            assert (saved.read("data.big") == step).all()
