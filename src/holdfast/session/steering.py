"""The frequencies of a run with `every=Auto()`, which follow measured costs and failures.

Rank 0 measures and decides (`holdfast.policy.tuning`).  At every tenth step the other ranks learn the
frequencies from that step on, so all ranks save at the same steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median

import msgspec

from holdfast.base.errors import Deadline
from holdfast.base.events import Event, emit, subscribe
from holdfast.base.wire import decode_msgpack
from holdfast.core.group import Group
from holdfast.core.store import LocalStore, Store
from holdfast.live.every import Every
from holdfast.live.saving import Save
from holdfast.policy.tuning import START, Auto, FailureKind, History, Tuner
from holdfast.policy.wasted import Frequencies
from holdfast.session.tiers import Tiers
from holdfast.session.tuning_store import TuningState, TuningStore
from holdfast.tiers.records.clock import Spent
from holdfast.tiers.records.tier import DeltaTier

LOOK_EVERY = 10
RECENT = 64
BEYOND = 0.01
"""The share of node losses that protected snapshots are assumed not to survive."""
POLL_S = 0.001

WRITE_SHARE, WRITE_LEAST_S, WRITE_S = 0.02, 1.0, 60.0
"""Trained time that a crash may lose from `tuning.json`: a share of all, within these bounds in seconds."""


class Steering:
    """Frequencies that are tuned.  All ranks make one, and call `at` at the same steps."""

    def __init__(
        self,
        auto: Auto,
        tiers: tuple[str, ...],
        group: Group,
        store: Store,
        *,
        crashed: bool,
        records: DeltaTier | None = None,
    ) -> None:
        """`records`: the run's tier of records, whose batches are tuned.  `crashed`: the previous run did
        not close.  Collective."""
        self._group = group
        self._records = records
        self._store = TuningStore(store)
        self._is_local = isinstance(store, LocalStore)
        self._kept = self._store.read() if group.rank == 0 else TuningState()
        self._after_failure = crashed or self._kept.failed
        self._tuner = self._make_tuner(auto, tiers, 1 if records is None else records.batch)
        self._written_s = self._kept.trained_s
        self._flying: list[tuple[str, Save, float]] = []
        """Saves under way: tier, save, and the extra seconds of the steps since."""
        self._alone: deque[float] = deque(maxlen=RECENT)
        """Seconds of steps beside which nothing was saved."""
        self._beside: deque[float] = deque(maxlen=RECENT)
        """Seconds of steps beside which a batch of records was written."""
        self._wrote = False
        self._looks = 0
        """Number of broadcasts; their keys need it, because a step may come twice after going back."""
        self._since: float | None = None
        if group.rank == 0 and self._after_failure:
            self._tuner.failed("process")
        if group.rank == 0 and (self._after_failure or not self._is_local):
            self._write()  # also measures the time of a request
        told = group.from_rank0(lambda: msgspec.msgpack.encode(self._tuner.frequencies))
        self._apply(decode_msgpack(told, Frequencies))
        self._stop_listening: Callable[[], None] = subscribe(self._heard)

    def _make_tuner(self, auto: Auto, tiers: tuple[str, ...], batch: int) -> Tuner:
        """Make a tuner with the history of earlier runs, and their frequencies if the tiers are the
        same."""
        kept, start = self._kept, replace(START, batch=batch)
        found = Frequencies(*kept.frequencies)
        sound = all(n is None or n > 0 for n in kept.frequencies) and found.delta in (None, 1)
        if kept.tiers == tuple(sorted(tiers)) and found.durable and sound and found.valid:
            start = found
        failures: dict[FailureKind, int] = {"process": kept.process, "node": kept.node}
        return Tuner(
            auto,
            tiers,
            history=History(kept.trained_s, failures),
            start=start,
            known=kept.costs,
        )

    def at(self, step: int) -> Every:
        """Return the frequencies from this step on.  At every tenth step other ranks block for rank 0's."""
        if self._group.rank == 0:
            self._account()
        if step % LOOK_EVERY == 0:
            self._look(step)
        self._since = time.perf_counter()
        return self.every

    def acted(self) -> None:
        """After this step's record: set the size of batches of the next ones."""
        if self._records is not None and self.every.delta is not None and self.batch is not None:
            self._records.rebatch(self.batch)

    def saving(self, tier: str, save: Save) -> None:
        """Note that a save has begun."""
        if tier == "durable" or tier in self._tuner.tiers:
            self._flying.append((tier, save, 0.0))

    def lost(self, snapshot: str, num_nodes: int) -> None:
        """Note that a restart found `num_nodes` nodes without their part of a snapshot.  The time of the
        restart is not counted as a step's."""
        self._since = None
        if self._group.rank != 0 or not num_nodes or snapshot == self._kept.lost_of:
            return
        self._kept = msgspec.structs.replace(self._kept, lost_of=snapshot)
        if self._after_failure:  # the failure was the loss of a node
            self._after_failure = False
            self._tuner.failed("process", -1)
            self._tuner.failed("node")
        self._write()

    def close(self, error: BaseException | None = None) -> None:
        """End the tuning.  `error`: the exception that ends the training."""
        self._stop_listening()
        if self._group.rank == 0:
            self._write(failed=isinstance(error, Exception))
        self._store.close()

    # -- rank 0 -----------------------------------------------------------------------------------

    def _account(self) -> None:
        """Account for a finished step: its own time, and the extra time from saves beside it."""
        records = self._records
        spent = records.spent() if records is not None else Spent(0.0, None)
        wrote, self._wrote = self._wrote, False
        if records is not None:
            self._tuner.most_batch = records.most_batch
        if self._since is None:
            return
        took = max(time.perf_counter() - self._since - spent.seconds, 0.0)
        if spent.record_s is not None:
            self._tuner.measured("record_stall", spent.record_s)
        alone = median(self._alone) if self._alone else took
        self._tuner.ran(1, min(took, alone))
        if self._flying:
            self._account_for_saves(max(took - alone, 0.0) / len(self._flying))
        elif wrote and (self.batch or 1) > 1:
            self._beside.append(took)
            self._tuner.measured("batch_stall", max(median(self._beside) - alone, 0.0))
        else:
            self._alone.append(took)

    def _account_for_saves(self, longer: float) -> None:
        left = []
        for tier, save, held in self._flying:
            if not save.done():
                left.append((tier, save, held + longer))
            elif save.error is None and not save.skipped:
                self._tuner.measured(f"{tier}_stall", held + longer)
        self._flying = left

    def _heard(self, event: Event) -> None:
        if self._group.rank != 0 or "error" in event.fields:
            return
        request_s = None if self._is_local else self._store.put_s
        for what, seconds in costs_of(event, request_s):
            if what != "memory" or "memory" in self._tuner.tiers:
                self._tuner.measured(what, seconds)
        self._wrote |= event.name == "delta.wrote"
        if event.name == "memory.redundancy":
            protected = event.fields["kept"] != "none" and event.fields["nodes"] > 1
            self._tuner.beyond = BEYOND if protected else 1.0

    def _decide(self, step: int) -> Frequencies:
        retuned = self._tuner.decide(step)
        if retuned is not None:
            emit(
                "retuned", step=step, knob=retuned.knob, before=str(retuned.before),
                after=str(retuned.after), why=retuned.why,
            )  # fmt: skip
        trained_s = self._tuner.history.trained_s
        due = trained_s - self._written_s > min(
            max(WRITE_LEAST_S, WRITE_SHARE * trained_s), WRITE_S
        )
        if retuned is not None or (due and not self._store.busy):
            self._write()
        return self._tuner.frequencies

    # -- together ---------------------------------------------------------------------------------

    def _look(self, step: int) -> None:
        key, self._looks = f"tune/{self._looks}", self._looks + 1
        if self._group.rank == 0:
            told = self._decide(step)
            if self._group.size > 1:
                self._group.post(key, msgspec.msgpack.encode(told))
        else:
            told = decode_msgpack(self._receive(key, step), Frequencies)
        self._apply(told)

    def _apply(self, told: Frequencies) -> None:
        self.every, self.batch = Every(told.durable, told.memory, told.delta), told.batch

    def _receive(self, key: str, step: int) -> bytes:
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

    def _write(self, *, failed: bool = False) -> None:
        history, f = self._tuner.history, self._tuner.frequencies
        self._kept = TuningState(
            history.trained_s, history.failures["process"], history.failures["node"], failed,
            self._kept.lost_of, tuple(sorted(self._tuner.tiers)), (f.durable, f.memory, f.delta, f.batch),
            self._tuner.learned,
        )  # fmt: skip
        self._written_s = history.trained_s
        self._store.write(self._kept)


def costs_of(event: Event, request_s: float | None = None) -> Iterator[tuple[str, float]]:
    """Yield the costs in an event: their names in `Costs`, and seconds.

    `request_s`: the time to put a small object into a bucket; None for a file system.  A bucket gets a
    file's bytes when the file is finished, so time beyond one request counts as the records'.
    """
    given, took = event.fields, event.duration_s or 0.0
    match event.name:
        case "delta.wrote" if given["records"]:
            fixed_s = min(given["fixed_s"], request_s or given["fixed_s"])
            yield "record", (given["seconds"] - fixed_s) / given["records"]
            yield "batch", fixed_s
        case "restore.load" if given["tier"] in ("durable", "memory"):
            yield f"{given['tier']}_load", took
        case "log.headers" if given["files"]:
            yield "open", took / given["files"]
        case "replay" if given.get("steps"):
            yield "replay", took / given["steps"]
        case "save.committed":
            yield "durable", given["seconds"]
        case "snapshot.committed":
            yield "memory", given["seconds"]


def steering_of(auto: Auto, tiers: Tiers) -> Steering:
    """Tune the tiers that a run has.  Collective."""
    names = tuple(name for name in ("memory", "delta") if tiers.get(name) is not None)
    records = tiers.get("delta")
    return Steering(auto, names, tiers.group, tiers.store, crashed=tiers.crashed, records=records)
