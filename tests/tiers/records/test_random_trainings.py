"""Trainings that are drawn whole: what is trained and how, what a script does beside the optimizer's step,
how it ends (killed at a random moment, mostly), and how often it is started again.

What a restart restores equals bit for bit what was live at that step, in the newest history that leads
there, and is not older than was promised.  The oracle is outside of holdfast: the training process tells
each state before it calls `Checkpointer.step`.

HOLDFAST_FUZZ_SEED repeats one; what failed says which it was.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tiers.memory.zygote import KILLED, Lives

from .random_cases import EDITS
from .test_exact import OPTIMIZERS

pytestmark = pytest.mark.slow

FIXED = [2, 7, 9, 22, 23]
GIVEN = [int(seed) for seed in os.environ.get("HOLDFAST_FUZZ_SEED", "").split()]
NUMBERS = range(len(GIVEN) or 12)


def seed_of(number: int) -> int:
    some = GIVEN or FIXED
    return some[number] if number < len(some) else random.SystemRandom().randrange(1, 1 << 30)


def drawn(seed: int) -> dict[str, Any]:
    """A case, all of it."""
    r = random.Random(seed)
    others = sorted({*OPTIMIZERS} - {"muon"})  # which wants matrices
    first = r.choice([*others, "muon"])
    scaler, sched = first != "muon" and r.random() < 0.2, r.random() < 0.4
    some = {"durable": [None, 2, 3, 5, 7], "memory": [None, None, 1, 2, 3], "delta": [None, 1, 1]}
    every = {tier: r.choice(often) for tier, often in some.items()}
    acts = [*EDITS, "skip", "save", "restore", "restore", "reopen"]
    acts += ["inf"] * 4 if scaler else ["none", "fail"]
    lives = [drawn_life(r, acts) for _ in range(r.randint(3, 5))]
    late = not sched and every["memory"] is None and r.random() < 0.5
    grows = r.randrange(len(lives)) if late else len(lives)
    for script in lives[grows : grows + 1]:
        script["acts"].setdefault(r.randrange(script["steps"]), []).append("group")
    return {
        "seed": seed, "optimizers": [first, *r.sample(others, r.choice([0, 0, 1]))], "scaler": scaler,
        "sched": sched, "tied": r.random() < 0.5, "large_at": r.randint(0, 20), "grows": grows,
        "accumulate": r.choice([1, 1, 2]), "keep": r.choice([None, None, 1, 2]),
        "every": every if any(every.values()) else {"delta": 1}, "auto": r.random() < 0.1,
        "delta": {"batch": r.randint(1, 4), "queue": r.randint(1, 3),
                  "when_full": r.choice(["wait", "wait", "drop"])},
        "when_busy": r.choice(["queue", "skip"]), "lives": [*lives, drawn_life(r, [], "close")],
    }  # fmt: skip


def drawn_life(r: random.Random, acts: list[str], end: str = "") -> dict[str, Any]:
    """The last one ends well, and does not train."""
    steps, rate = 0 if end else r.randint(2, 12), r.choice([0.1, 0.3, 0.6])
    ends = ["kill"] * 4 + ["close", "error", "exit"]
    return {
        "steps": steps, "pause": r.choice([0, 0.002, 0.02]),
        "acts": {i: r.sample(acts, r.randint(1, 2)) for i in range(steps) if r.random() < rate},
        "end": end or r.choice(ends), "at": r.randint(-1, steps),
        "after": r.choice([0.0, r.uniform(0, 0.002), r.uniform(0, 0.02), r.uniform(0, 0.2)]),
    }  # fmt: skip


def promised(told: list[dict[str, Any]], *, died: bool) -> tuple[int, set[int]]:
    """The step below which a restart may not come, and those that storage has, by what a process told
    since it restored a step.

    A chain of steps, each of which is recorded, counts from a step on that was saved.  Of each chain the
    last record may be lost: of one that broke, and of one whose process died.
    """
    start = told[0]["restored"]
    held, is_freed, kept = start, False, set()
    saved = set() if told[0]["tier"] == "memory" else {start}
    chains = [[start] if told[0]["chained"] else []]
    for line in told[1:]:
        match line:
            case {"event": "save.committed", "step": step}:
                saved.add(step)
            case {"event": "snapshot.committed", "step": step}:
                kept |= set() if is_freed else {step}
            case {"event": "delta.broken"}:
                chains[-1] = chains[-1][:-1]
                chains.append([])
            case {"done": step, "chained": chained}:
                chains[-1] = [*chains[-1], step] if chained else []
            case {"closing": True}:
                held, kept, is_freed = 0, set(), True
            case {"reopened": True}:
                chains.append([])
                is_freed = False
    if died:
        chains[-1] = chains[-1][:-1]
    sure = reached(chains, saved)
    return max([held, *sure, *reached(chains, saved | kept)]), sure


def reached(chains: list[list[int]], full: set[int]) -> set[int]:
    """Full steps, and those that records lead to from them."""
    found = set(full)
    for chain in chains:
        first = next((i for i, step in enumerate(chain) if step in full), len(chain))
        found |= {*chain[first:]}
    return found


class Known:
    """Histories of a training, by its log."""

    def __init__(self) -> None:
        self.path: dict[int, int] = {}
        """The newest history: by step, which of the copies."""
        self.faults: list[str] = []
        self.grown = False
        """Whether the optimizer had got its late group, when a state was told last."""
        self._copies: list[tuple[dict[str, str], dict[int, int]]] = []
        """States, each with the history that led to it."""
        self._told: list[dict[str, Any]] = []
        """Since the process restored a step; empty before that."""
        self._bound, self._start, self._went_back = 0, 0, False

    def take(self, lines: list[dict[str, Any]], *, died: bool, keeps_all: bool) -> None:
        """What a life has told."""
        tier = ""
        for line in lines:
            match line:
                case {"event": "restore.load", "tier": tier}:
                    pass
                case {"fault": text}:  # the memory of a history that was left may be given out
                    self.faults += [] if self._went_back and "passed_over" in text else [text]
                case {"at": step, "state": state, "grown": grown}:
                    self.grown = grown
                    self.path = {**self.path, step: len(self._copies)}
                    self._copies.append((state, self.path))
                case {"refused": step}:
                    if keeps_all and step in promised(self._told, died=False)[1]:
                        self.faults.append(f"step {step} was refused, which is in storage")
                case {"restored": step}:
                    self._end(died=False)
                    self._came_back(step, line["want"], line["state"])
                    self._told = [{**line, "tier": tier}]
                    continue
            if self._told:
                self._told.append(line)
        if not died and not any("restored" in line for line in lines):
            self.faults.append("nothing was restored")
        self._end(died=died)

    def _end(self, *, died: bool) -> None:
        if self._told:
            self._bound, _ = promised(self._told, died=died)
        self._told = []

    def _came_back(self, step: int, want: int | None, state: dict[str, str]) -> None:
        found = [i for i, (known, _) in enumerate(self._copies) if known == state]
        if step and not found:
            at = self.path.get(step)
            known = {} if at is None else self._copies[at][0]
            differ = sorted(k for k in known.keys() | state.keys() if known.get(k) != state.get(k))
            self.faults.append(f"step {step} (wanted: {want}) differs in {differ}")
        if want is None and step < self._bound:
            self.faults.append(f"step {step} was restored, and {self._bound} promised")
        is_left = self._went_back and self._bound <= self._start  # and nothing counts since
        if want is None and found and self._bound and not is_left:
            if found[-1] not in self.path.values():
                self.faults.append(f"step {step} was restored of a history that was left")
        if found:
            self.path = self._copies[found[-1]][1]
        elif not step:
            self.path = {}
        self._start, self._went_back = step, want is not None


@pytest.mark.soak_except("0", "1")
@pytest.mark.parametrize("number", NUMBERS)
def test_as_drawn(lives: Lives, number: int) -> None:
    case, known = drawn(seed_of(number)), Known()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="holdfast-test-") as folder:
        place = Path(folder)
        for i, script in enumerate(case["lives"]):
            steps = sorted(known.path) if i <= case["grows"] else []
            life = {"case": case, "number": i, "steps": steps, "grown": known.grown}
            (place / "life.json").write_text(json.dumps(life))
            (told,) = lives.live(
                nodes=[0], root=f"{place}/root", case="tiers.records.random_cases:trains"
            )
            with (place / f"log{i}").open() as log:
                lines = [json.loads(line) for line in log if line.endswith("\n")]
            known.take(lines, died=told.status == KILLED, keeps_all=case["keep"] is None)
            ended = any("refused" in line for line in lines) and told.status == 0
            if told.status != (KILLED if script["end"] == "kill" else 0) and not ended:
                known.faults.append(f"status {told.status}")
            what = f"HOLDFAST_FUZZ_SEED={case['seed']}, life {i}: {known.faults}"
            assert not known.faults, f"{what}\n{json.dumps(case)}\n{lives.errors()}"
