"""Ranks of a real run are killed at random moments: each time it goes on in place, as if nothing had been.

The moments come from a seed, which is printed; HOLDFAST_SEED=N repeats a run's.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from launching.soaked import RANKS, Soaked, soaked, trajectory

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.soak]

KILLS = int(os.environ.get("HOLDFAST_KILLS", "100"))
EVENTS = {
    "": ["delta.call"],
    "memory": [
        "snapshot.call", "snapshot.copy", "snapshot.digest", "snapshot.committed", "save.call",
        "persist", "tidy", "restore.read", "restore.load", "restore",
    ],
    "records": [
        "save.call", "persist", "save.committed", "tidy", "delta.call", "delta.hand_over",
        "delta.wrote", "replay.writers", "log.headers", "replay", "restore.load", "restore",
    ],
}  # fmt: skip


def wound(run: Soaked, chance: random.Random, events: list[str]) -> str:
    """Kill something of a run at a random moment, two processes at most; return what."""
    ranks, order = run.stepping(), Path(f"{run.root}.order")
    order.unlink(missing_ok=True)  # of an event that did not come
    kind = chance.choices(["any", "event", "again"], [4, 4, 3])[0]
    time.sleep(chance.uniform(0, 0.4))
    rank = chance.randrange(RANKS)
    if kind == "event":
        event = chance.choice(events)
        order.with_suffix(".new").write_text(f"{rank} {event}")
        order.with_suffix(".new").rename(order)
        stop = time.monotonic() + chance.uniform(2, 4)
        while order.exists() and time.monotonic() < stop:
            time.sleep(0.01)
        if not order.exists():
            return f"rank {rank} at {event}"
        # One that comes in a recovery alone: whoever takes its place dies there.
    run.kill(ranks[rank])
    if kind != "again":
        return f"rank {rank} ({kind})"
    later = chance.uniform(0, 1.0)
    time.sleep(later)
    if others := run.forked():
        run.kill(chance.choice(others))
    return f"rank {rank}, and another process {later:.3f} s later"


def lost_steps(run: Soaked) -> list[tuple[int, int, int]]:
    """Return (attempt, step that all ranks had done before, step restored) where these differ."""
    found = []
    for attempt in sorted({t["attempt"] for t in run.told}):
        begins = {t["begins"] for t in run.told if t["attempt"] == attempt and "begins" in t}
        assert len(begins) <= 1, (attempt, begins)
        before = [t for t in run.told if t["attempt"] < attempt and "state" in t]
        done = [
            max((t["state"] for t in before if t["rank"] == r), default=0) for r in range(RANKS)
        ]
        if begins and min(done) > min(begins):
            found.append((attempt, min(done), min(begins)))
    return found


def unwoken(run: Soaked) -> list[set[int]]:
    """Return, for each attempt that had any, the processes that were killed since gloo does not wake them:
    a rank was killed before it had connected, or in the middle of a message (decision 166)."""
    found = re.findall(r"for a lost rank, and nothing wakes them: ([\d, ]+)", run.printed)
    return [set(map(int, pids.split(","))) for pids in found]


def growth(run: Soaked) -> list[str]:
    """Return what grew in a process from its third entry on, and what is left of an attempt at any.

    Attempts that are cut off at once open nothing: what is opened once, when one lasts, is no growth.
    """
    entries: dict[int, list[dict[str, Any]]] = {}
    for t in run.told:
        if "holds" in t:
            entries.setdefault(t["pid"], []).append(t["holds"])
    found = []
    for pid, held in entries.items():
        for h in held:
            if h["tensors"] > 10 or h["python_threads"] > 8 or h["storage_threads"] > 4:
                found.append(f"process {pid} holds an attempt that it has left: {h}")
        for name in ("fds", "sockets", "threads", "maps", "groups"):
            numbers = [h[name] for h in held[2:]]
            early_ones = numbers[: max(1, len(numbers) // 2)]
            if len(numbers) > 2 and min(numbers[-2:]) > max(early_ones):
                late, early = ([*h["links"], *h["names"]] for h in (held[-1], held[2]))
                opened = Counter(late) - Counter(early)
                found.append(f"process {pid}: {name} {numbers}; open since: {dict(opened)}")
    return found


@pytest.mark.parametrize("tiers", ["memory,durable", "records,durable", "memory,records,durable"])
def test_kills_at_random_moments(tiers: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("HOLDFAST_SEED", secrets.randbelow(1 << 30)))
    print(f"HOLDFAST_SEED={seed}")
    chance = random.Random(seed)
    events = EVENTS["memory" if "memory" in tiers else "records"]
    events = events + EVENTS[""] * ("records" in tiers)
    words = (f"--tiers={tiers}", "--pause=0.02")
    with soaked(tmp_path / "root", *words, options=("--spares=1",)) as run:
        for n in range(KILLS // 3 + 1):
            recover(run, n, chance, events)
        Path(f"{run.root}.order").unlink(missing_ok=True)
        run.until(run.stepping, "all ranks do a step")
        assert run.finish() == 0, run.printed[-6000:]
        run.nothing_is_left()
    check(run, trajectory(tmp_path / "whole", run.last_step))
    last = {t["pid"] for t in run.told if t["attempt"] == run.attempt}
    lost = {t["pid"] for t in run.told} - run.killed - last
    attempts = unwoken(run)
    assert lost <= set().union(
        *attempts
    )  # nobody else was lost; who had just entered has told nothing
    assert len(attempts) <= 2 + KILLS // 100
    assert not [lost for lost in lost_steps(run) if lost[1] - lost[2] > 2]
    assert not growth(run)


def recover(run: Soaked, n: int, chance: random.Random, events: list[str]) -> None:
    """Kill something, and wait until all ranks have done a step that none had done before.

    Three deaths of one rank at the same step end a run; so none is at the step of the last but one.
    """
    run.until(run.stepping, "all ranks do a step")
    before = run.attempt
    what = wound(run, chance, events)
    at, done = time.time(), run.last_step
    run.until(lambda: run.stepping(before, done), f"kill {n}, {what}: all go on")
    took_s = max(t["at"] for t in run.told) - at
    print(f"{n}: {what}: {took_s:.2f} s")


def check(run: Soaked, expected: dict[tuple[int, int], str]) -> None:
    """Every state, restored or reached, is one of the uninterrupted run."""
    states = [t for t in run.told if "state" in t]
    wrong = [t for t in states if t["digest"] != expected[t["rank"], t["state"]]]
    assert not wrong, wrong[:5]
    assert len({t["state"] for t in states}) == run.last_step


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    ("tiers", "how"),
    [("", "raise"), ("memory", "raise"), ("memory,records,durable", "raise"), ("memory", "kill")],
)
def test_survivors_do_not_grow(tiers: str, how: str, tmp_path: Path) -> None:
    """The same processes recover a hundred times: one rank raises, or is killed and a spare takes its
    place."""
    each = 3 if tiers else 1  # without tiers every attempt does two steps again
    words = (f"--tiers={tiers}", f"--{how}-each={each}", f"--steps={each * KILLS}", "--size=256")
    with soaked(tmp_path / "root", *words, options=("--spares=1",) * (how == "kill")) as run:
        run.finishes(limit_s=1200)
        run.nothing_is_left()
    entries: dict[int, list[dict[str, Any]]] = {}
    for t in run.told:
        if "holds" in t:
            entries.setdefault(t["pid"], []).append(t["holds"])
    if how == "raise":
        assert len(entries) == RANKS
        assert min(map(len, entries.values())) >= KILLS * 0.9
    # who is not woken is replaced, and its place has two processes then, or three
    survivors = [held for held in entries.values() if len(held) >= KILLS * 0.3]
    assert len(survivors) >= RANKS - 1, [len(held) for held in entries.values()]
    for held in survivors:
        early, late = held[10], held[-1]
        print(f"from recovery 10 to {len(held)}: {early} {late}")
        for name in ("fds", "sockets", "threads", "storage_threads", "maps", "groups", "tensors"):
            assert late[name] <= early[name] + 2, (name, [h[name] for h in held])
        assert late["rss"] <= 1.05 * early["rss"], [h["rss"] >> 20 for h in held]
