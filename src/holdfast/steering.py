"""Frequencies of a run: fixed ones, or such as follow what is measured and what fails.

Rank 0 measures and decides (`holdfast.policy.tuning`); at every tenth step the others learn what holds from
that step on, so all ranks save at the same steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec

from holdfast.capture import Save
from holdfast.errors import Deadline, HoldfastError, UsageError
from holdfast.events import Event, emit, subscribe
from holdfast.group import Group
from holdfast.policy.tuning import Auto, History, Tuner
from holdfast.policy.wasted import Frequencies
from holdfast.store import Store

HISTORY_KEY = "tuning.json"
LOOK_EVERY = 10
RECENT = 64
POLL_S = 0.001

COSTS = {
    "delta.call": "record_stall",
    "delta.wrote": "record",
    "restore.read": "durable_load",
}
"""Events whose durations are costs."""


@dataclass(frozen=True, slots=True)
class Every:
    """How often each tier acts, in steps.  None: only when asked."""

    durable: int | None = None
    memory: int | None = None
    delta: int | None = None

    def __post_init__(self) -> None:
        for tier in ("durable", "memory", "delta"):
            n = getattr(self, tier)
            if n is not None and (not isinstance(n, int) or n < 1):
                raise UsageError(f"Every({tier}={n!r}): must be a positive number or None")
        if self.delta not in (None, 1):
            raise UsageError(
                f"Every(delta={self.delta!r}): records are of every step, so 1 or None"
            )


class _Told(msgspec.Struct, frozen=True):
    """What rank 0 tells the others."""

    durable: int | None
    memory: int | None
    delta: int | None
    batch: int | None


class _Kept(msgspec.Struct, frozen=True):
    """`tuning.json`: what is known of failures, over all runs of a root."""

    trained_s: float
    process: int
    node: int


class Steering:
    """Frequencies that are tuned.  All ranks call `at` at the same steps."""

    def __init__(
        self,
        auto: Auto,
        tiers: tuple[str, ...],
        group: Group,
        store: Store,
        *,
        beyond: float,
        crashed: bool,
    ) -> None:
        self._group = group
        self._store = store
        self._tuner = Tuner(auto, tiers, beyond=beyond, history=self._read(), look_every=LOOK_EVERY)
        if crashed:
            self._tuner.failed("process")
        self.batch = self._tuner.frequencies.batch
        self._every = _every(self._tuner.frequencies)
        self._flying: list[tuple[str, Save, float]] = []
        """Saves under way: of which tier, and what the steps since have taken longer."""
        self._alone: deque[float] = deque(maxlen=RECENT)
        """Seconds of steps beside which nothing was saved."""
        self._since: float | None = None
        self._stop_listening: Callable[[], None] = subscribe(self._heard)

    def at(self, step: int) -> Every:
        """What is in force from this step on.  Ranks other than 0 wait for it at every tenth step."""
        if self._group.rank == 0:
            self._account()
        if step % LOOK_EVERY == 0:
            self._look(step)
        self._since = time.perf_counter()
        return self._every

    def saving(self, tier: str, save: Save) -> None:
        """A save has begun."""
        self._flying.append((tier, save, 0.0))

    def close(self) -> None:
        self._stop_listening()
        self._write()

    # -- rank 0 -----------------------------------------------------------------------------------

    def _account(self) -> None:
        """A step is over: it tells what a step takes, or what the saves beside it take of it."""
        if self._since is None:
            return
        took = time.perf_counter() - self._since
        alone = median(self._alone) if self._alone else took
        self._tuner.ran(1, min(took, alone))
        if not self._flying:
            self._alone.append(took)
            return
        longer = max(took - alone, 0.0) / len(self._flying)
        left = []
        for tier, save, held in self._flying:
            if not save.done():
                left.append((tier, save, held + longer))
            elif save.error is None and not save.skipped:
                self._tuner.measured(f"{tier}_stall", held + longer)
        self._flying = left

    def _heard(self, event: Event) -> None:
        if self._group.rank != 0:
            return
        seconds = event.fields.get("seconds", event.duration_s)
        if event.name in COSTS and seconds is not None:
            self._tuner.measured(COSTS[event.name], float(seconds))
        elif event.name in ("save.committed", "snapshot.committed") and seconds is not None:
            tier = "durable" if event.name == "save.committed" else "memory"
            if tier == "durable" or "memory" in self._tuner.tiers:
                self._tuner.measured(tier, float(seconds))
        elif event.name == "replay" and event.fields.get("steps") and event.duration_s:
            self._tuner.measured("replay", event.duration_s / event.fields["steps"])

    def _decide(self, step: int) -> Frequencies:
        retuned = self._tuner.decide(step)
        if retuned is not None:
            emit(
                "retuned", step=step, knob=retuned.knob, before=str(retuned.before),
                after=str(retuned.after), why=retuned.why,
            )  # fmt: skip
            self._write()
        return self._tuner.frequencies

    # -- together ---------------------------------------------------------------------------------

    def _look(self, step: int) -> None:
        key = f"tune/{step}"
        if self._group.rank == 0:
            f = self._decide(step)
            told = _Told(f.durable, f.memory, f.delta, f.batch)
            if self._group.size > 1:
                self._group.post(key, msgspec.msgpack.encode(told))
        else:
            told = msgspec.msgpack.decode(self._hear(key, step), type=_Told)
        found = Frequencies(told.durable, told.memory, told.delta, told.batch)
        self._every, self.batch = _every(found), found.batch

    def _hear(self, key: str, step: int) -> bytes:
        until = time.monotonic() + self._group.deadline_s
        while (data := self._group.peek(key)) is None:
            if time.monotonic() > until:
                raise Deadline(
                    f"rank 0 did not come to step {step} within {self._group.deadline_s:g} s",
                    rank=0,
                    step=step,
                )
            time.sleep(POLL_S)
        return data

    # -- what is kept -----------------------------------------------------------------------------

    def _read(self) -> History:
        if self._group.rank != 0:
            return History()
        with suppress(HoldfastError, msgspec.DecodeError, UnicodeDecodeError):
            kept = msgspec.json.decode(self._store.get(HISTORY_KEY), type=_Kept)
            return History(kept.trained_s, {"process": kept.process, "node": kept.node})
        return History()

    def _write(self) -> None:
        if self._group.rank != 0:
            return
        history = self._tuner.history
        kept = _Kept(history.trained_s, history.failures["process"], history.failures["node"])
        try:
            self._store.put(HISTORY_KEY, msgspec.json.encode(kept))
        except HoldfastError as error:
            emit("tuning.not_kept", error=str(error))


def _every(f: Frequencies) -> Every:
    return Every(f.durable, f.memory, f.delta)


def check_every(every: Any, *, memory: bool, delta: bool) -> None:
    """UsageError unless this is an `Every` or an `Auto`, and the tiers are there that it names."""
    if every is not None and not isinstance(every, (Every, Auto)):
        raise UsageError(
            f"every={every!r}: must be holdfast.Every(...) or holdfast.Auto(...)",
        )
    fixed = every if isinstance(every, Every) else Every()
    if fixed.memory is not None and not memory:
        raise UsageError("Every(memory=...) needs Checkpointer(memory=holdfast.Memory())")
    if fixed.delta is not None and not delta:
        raise UsageError("Every(delta=1) needs Checkpointer(delta=holdfast.Delta())")
