"""What an agent decides: every script in tests/tiers/memory/scenarios/agent, with its whole trace.

A script lists messages, each followed by the effects that must come of it, in order:

    Hello pid=10
      answer
    Take pid=10 attempt=a1 bytes=100
      make share-00000-0 of 100

`budget N`, `stay` and `adopt` (a new agent finds what this one had noted) are lines of their own; `at S`
sets the clock.  Requests are numbered from 1 as they come.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.base.wire import WireError
from holdfast.tiers.memory.node import effects as e
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node import state_machine
from holdfast.tiers.memory.node.jobs import Job, State
from holdfast.tiers.memory.node.messages import Slot

SCRIPTS = sorted((Path(__file__).parent / "scenarios" / "agent").glob("*.txt"))
DEFAULTS: dict[str, Any] = {
    "job": "j", "root": "r", "run": 1, "rank": 0, "pid": 10, "started": "1", "kind": "share", "step": 1,
    "attempt": "a1", "bytes": 100, "table": 90, "manifest": b"", "digest": "d", "error": "", "claim": b"",
    "store": "s", "key": "k", "deadline_s": 9.0, "members": (), "num_data": 1, "num_parity": 1,
    "free": False, "finished": True, "flush_s": 0.0,
}  # fmt: skip
KINDS = {c.__name__: c for c in w.Message.__subclasses__()}
INTERNAL = (w.Made, w.Digested, w.Wrote, w.Gone, w.Tick, w.Finished)


def failure(text: str, kind: str = "OutOfSpace") -> WireError | None:
    """The error of a message; None if there is no text."""
    return WireError(kind=kind, message=text) if text else None


def message(words: list[str]) -> w.Message:
    """`Take rank=1 bytes=5` with the defaults for what is not said."""
    kind, said = KINDS[words[0]], dict(word.split("=", 1) for word in words[1:])
    values: dict[str, Any] = {}
    if kind in (w.Digested, w.Wrote):
        values["error"] = failure(said.pop("error", ""), said.pop("kind", "OSError"))
    for field in msgspec.structs.fields(kind):
        if field.name in values:
            continue
        if field.name in said:
            text = said.pop(field.name)
            values[field.name] = (
                tuple(map(int, text.split(",")))
                if field.name == "pids"
                else tuple(w.Card(agent, f"{agent}:1", "t") for agent in text.split(","))
                if field.name == "cards"
                else msgspec.convert(text, field.type, strict=False)
            )
        elif field.name == "job" and kind is w.Clean:
            values["job"] = ""
        elif field.default is msgspec.NODEFAULT:
            values[field.name] = DEFAULTS[field.name]
    assert not said, f"{words[0]} has no {', '.join(said)}"
    return kind(**values)


def show(effect: e.Effect) -> str:
    match effect:
        case e.Reply(ask, w.Lease(name, capacity)):
            return f"reply {ask}: {name} of {capacity}"
        case e.Reply(ask, value):
            return f"reply {ask}" + (f": {value}" if value not in (None, []) else "")
        case e.Refuse(ask, error):
            return f"refuse {ask} {error.kind}: {error.message}"
        case e.Make(_, name, capacity):
            return f"make {name} of {capacity}"
        case e.Note(_, s):
            return f"note {s.name} {s.phase}" + (f" {s.attempt}" if s.phase != "empty" else "")
        case e.Digest(_, s):
            return f"digest {s.name} to {s.table}"
        case e.Encode(_, s, _):
            return f"encode {s.name}"
        case e.Write(s, order):
            return f"write {s.name} to {order.key}"
        case e.CommitLate(order):
            return f"commit late {order.attempt}"
        case e.KeepManifest(_, attempt, step, _):
            return f"keep manifest {attempt} of step {step}"
        case e.KeepPeers(_, cards):
            return "keep peers " + " ".join(card.agent for card in cards)
        case e.Remove(_, names, attempts):
            return "remove " + " ".join((*names, *attempts))
        case e.RemoveJob(job):
            return f"remove job {job}"
        case e.Greet(ask, _):
            return f"greet {ask}"
        case e.Answer(ask, job):
            return f"answer {ask}" + (f" on {job}" if job else "")
        case e.Exit():
            return "exit"
    raise AssertionError(effect)


class Notes:
    """What an agent has written down, for the next one: the job's slots and commits."""

    def __init__(self) -> None:
        self.slots: dict[str, dict[str, Slot]] = {}
        self.commits: dict[str, list[tuple[str, int]]] = {}

    def see(self, effect: e.Effect) -> None:
        match effect:
            case e.Note(job, slot):
                self.slots.setdefault(job, {})[slot.name] = slot
            case e.KeepManifest(job, attempt, step, _):
                self.commits.setdefault(job, []).append((attempt, step))
            case e.Remove(job, names, attempts):
                for name in names:
                    self.slots.get(job, {}).pop(name, None)
                kept = [c for c in self.commits.get(job, []) if c[0] not in attempts]
                self.commits[job] = kept
            case e.RemoveJob(job):
                self.slots.pop(job, None)
                self.commits.pop(job, None)

    def jobs(self) -> list[Job]:
        return [
            Job(name, "r", 1, dict(slots), tuple(self.commits.get(name, ())), number=len(slots))
            for name, slots in self.slots.items()
        ]


def play(script: str) -> list[str]:
    """The trace of a script: its messages, and what came of them."""
    state, now, asked, notes = State(1000), 0.0, 0, Notes()
    trace: list[str] = []
    for line in script.splitlines():
        words = line.split()
        if not words or line.startswith((" ", "#")):
            continue
        trace.append(line)
        match words:
            case ["at", seconds]:
                now = float(seconds)
            case ["budget", number]:
                state = dataclasses.replace(state, budget=int(number))
            case ["stay"]:
                state = dataclasses.replace(state, stay=True)
            case ["adopt"]:
                state = state_machine.adopted(state.budget, notes.jobs(), now)
            case _:
                said = message(words)
                asked += not isinstance(said, INTERNAL)
                ask = 0 if isinstance(said, INTERNAL) else asked
                state, effects = state_machine.step(state, said, now, ask)
                for effect in effects:
                    notes.see(effect)
                    trace.append(f"  {show(effect)}")
    return trace


def test_there_are_scenarios() -> None:
    assert len(SCRIPTS) >= 20


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_scenario(path: Path) -> None:
    script = path.read_text()
    assert play(script) == [x for x in script.splitlines() if x.strip() and not x.startswith("#")]


# -- what holds in whatever order things come -----------------------------------------------------

ATTEMPTS = ["a1", "a2", "a3", "a4"]


@st.composite
def messages(draw: st.DrawFn) -> w.Message:
    attempt, rank = draw(st.sampled_from(ATTEMPTS)), draw(st.integers(0, 1))
    name = f"share-{rank:05d}-{draw(st.integers(0, 4))}"
    pid = 10 + rank
    return draw(
        st.sampled_from(
            [
                w.Hello("j", "r", 1, rank, pid, "1"),
                w.Take("j", pid, "share", rank, attempt, 1, draw(st.sampled_from([50, 100, 300]))),
                w.Made("j", name, draw(st.sampled_from(["", "no space"]))),
                w.Ready("j", name, attempt, 40, 50),
                w.Digested("j", name, attempt, "d", failure(draw(st.sampled_from(["", "gone"])))),
                w.Commit("j", attempt, 1, b""),
                w.Persist("j", attempt, rank, pid, "s", "k", 9.0, b"" if rank else b"c"),
                w.Wrote("j", attempt, rank, failure(draw(st.sampled_from(["", "full"])))),
                w.Settled("j", attempt),
                w.Drop("j", attempt),
                w.Gone("j", (pid,)),
                w.Bye("j", pid, draw(st.booleans())),
                w.Finished("j", 1),
                w.Tick(),
            ]
        )
    )


@given(st.lists(messages(), max_size=60))
@settings(max_examples=300, deadline=None)
def test_whatever_comes_the_newest_snapshot_stays(said: list[w.Message]) -> None:
    """Nobody is given a slot of the newest commit, or one on its way to storage; the budget holds; each
    request is answered at most once, and a slot has one user."""
    state, answered = State(1000), set()
    for number, one in enumerate(said, 1):
        before = state.jobs.get("j", Job("j"))
        ask = 0 if isinstance(one, INTERNAL) else number
        state, effects = state_machine.step(state, one, float(number), ask)
        assert state.used <= max(state.budget, 0)
        for effect in effects:
            match effect:
                case e.Reply(_, w.Lease(name, capacity)):
                    slot = before.slots.get(name)
                    if slot is not None and slot.phase == "ready":
                        assert slot.attempt != before.newest
                        assert all(a != slot.attempt for a, _ in before.writing)
                    assert state.jobs["j"].slots[name].phase == "filling"
                    assert capacity >= state.jobs["j"].slots[name].bytes
                case e.Remove(_, names, _):
                    for name in names:
                        slot = before.slots.get(name)
                        assert (
                            slot is None or slot.attempt != before.newest or slot.phase != "ready"
                        )
            if isinstance(effect, (e.Reply, e.Refuse, e.Answer, e.Greet)) and effect.ask:
                assert effect.ask not in answered
                answered.add(effect.ask)
