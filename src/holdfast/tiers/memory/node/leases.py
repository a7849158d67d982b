"""Slots from the request for memory to the digested image: given out, filled, given up.  Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import msgspec

from holdfast.base.errors import OutOfSpace, SegmentLost, UsageError
from holdfast.base.wire import WireError
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.effects import (
    Digest,
    Effect,
    Encode,
    Make,
    Note,
    Refuse,
    Remove,
    Reply,
    Result,
    refuse,
)
from holdfast.tiers.memory.node.jobs import Job, State
from holdfast.tiers.memory.node.messages import Phase, Slot


def take(state: State, job: Job, m: w.Take, ask: int) -> Result:
    """Lease a slot that fits and may be overwritten; else a new one, for which others may have to go."""
    if m.pid not in job.trainers:  # its death would go unnoticed, and others would ask a dead agent
        text = f"process {m.pid} has said hello to an earlier agent, but not to this one"
        return state, [refuse(ask, SegmentLost(text, hint="say hello"))]
    free = [s for s in job.slots.values() if job.is_free(s) and s.attempt != m.attempt]
    free.sort(key=lambda s: _age(job, s))
    free += [s for s in job.slots.values() if _is_over(s, m)]
    good = [s for s in free if s.kind == m.kind and w.fits(s.capacity, m.bytes)]
    if not good:
        return _make(state, job, m, ask, free)
    slot = _assigned(min(good, key=lambda s: s.rank != m.rank), m, "filling")
    lease = w.Lease(slot.name, slot.capacity)
    return state.with_job(job.with_slots(slot)), [Note(job.name, slot), Reply(ask, lease)]


def _is_over(slot: Slot, m: w.Take) -> bool:
    """True if the process that asks fills this slot for an earlier snapshot: that has ended, though
    this agent was not told."""
    same = (slot.owner, slot.kind, slot.rank) == (m.pid, m.kind, m.rank)
    return same and slot.phase == "filling" and not slot.ask and slot.attempt != m.attempt


def _make(state: State, job: Job, m: w.Take, ask: int, free: list[Slot]) -> Result:
    """Make a new slot.  If the budget is too small, free slots are removed: first this job's, from the
    oldest on, then those of jobs that have no process any more."""
    over = state.used + m.bytes - state.budget
    own = job.used + m.bytes - (job.budget or state.budget)
    gone: dict[str, list[str]] = {}
    for owner, slot in [*((job, s) for s in free), *_slots_of_dead_jobs(state, job)]:
        is_other_size = owner is job and (slot.kind, slot.rank) == (m.kind, m.rank)
        if over > 0 or (own > 0 and owner is job) or is_other_size:
            gone.setdefault(owner.name, []).append(slot.name)
            over -= slot.capacity
            own -= slot.capacity if owner is job else 0
    if over > 0 or own > 0:
        return state, [_too_large(state, job, m, ask, free)]
    removed: list[Effect] = []
    for name, slots in gone.items():
        state = state.with_job(state.jobs[name].without(slots))
        removed.append(Remove(name, tuple(slots)))
    job = state.jobs[job.name]
    slot = _assigned(
        Slot(f"{m.kind}-{m.rank:05d}-{job.number}", m.bytes, m.kind, m.rank), m, "making"
    )
    slot = replace(slot, ask=ask)
    state = state.with_job(job.with_slots(slot), number=job.number + 1)
    return state, [*removed, Make(job.name, slot.name, slot.capacity)]


def _slots_of_dead_jobs(state: State, but: Job) -> list[tuple[Job, Slot]]:
    """Return the spare slots of other jobs, of which no process runs; first of the job that ended
    first."""
    dead = [job for job in state.jobs.values() if not job.trainers and job.name != but.name]
    dead.sort(key=lambda job: job.seen)
    return [(job, s) for job in dead for s in job.slots.values() if job.is_spare(s)]


def _age(job: Job, slot: Slot) -> int:
    """Return the key by which slots are given out, least first: 0 if empty, 1 if never committed, then
    from the oldest commit on."""
    order = [attempt for attempt, _ in job.commits]
    if slot.phase == "empty":
        return 0
    return 2 + order.index(slot.attempt) if slot.attempt in order else 1


def _assigned(slot: Slot, m: w.Take, phase: Phase) -> Slot:
    """Return a slot as it is for the process that asks."""
    return replace(
        slot, kind=m.kind, rank=m.rank, phase=phase, attempt=m.attempt, step=m.step,
        bytes=m.bytes, owner=m.pid, digest="", table=0, ask=0, members=(), num_data=1, num_parity=0,
    )  # fmt: skip


def _too_large(state: State, job: Job, m: w.Take, ask: int, free: list[Slot]) -> Refuse:
    spare = [*free, *(slot for _, slot in _slots_of_dead_jobs(state, job))]
    needed, whose, budget = state.used - sum(s.capacity for s in spare), "agent", state.budget
    if job.budget and needed + m.bytes <= budget:
        needed, whose, budget = job.used - sum(s.capacity for s in free), "job", job.budget
    error = OutOfSpace(
        f"{m.bytes} bytes for the {m.kind} of rank {m.rank}: the {whose}'s budget is {budget} bytes, "
        f"of which {needed} are in use",
        hint="raise Memory(budget=...), or free what other jobs left: `holdfast agent status`, `clean`",
    )
    return refuse(ask, error)


def made(state: State, job: Job, m: w.Made, _: int) -> Result:
    """The file of a new slot is there, or cannot be."""
    slot = job.slots.get(m.name)
    if slot is None or slot.phase != "making":
        return state, [Remove(job.name, (m.name,))]
    if m.error:
        text = f"{slot.capacity} bytes of shared memory for rank {slot.rank}: {m.error}"
        hint = "a larger /dev/shm (in containers --shm-size), or a smaller Memory(budget=...)"
        refused = refuse(slot.ask, OutOfSpace(text, hint=hint))
        return state.with_job(job.without((m.name,))), [Remove(job.name, (m.name,)), refused]
    if not slot.owner:
        empty = slot.emptied()
        return state.with_job(job.with_slots(empty)), [Note(job.name, empty)]
    done = replace(slot, phase="filling", ask=0)
    reply = Reply(slot.ask, w.Lease(slot.name, slot.capacity))
    return state.with_job(job.with_slots(done)), [Note(job.name, done), reply]


def ready(state: State, job: Job, m: w.Ready, ask: int) -> Result:
    """A rank has filled its slot."""
    slot = job.slots.get(m.name)
    if slot is None or slot.phase != "filling" or slot.attempt != m.attempt:
        text = f"{m.name} is not being filled for attempt {m.attempt}"
        return state, [refuse(ask, SegmentLost(text))]
    if not 0 <= m.table <= m.bytes <= slot.capacity:
        return state, [refuse(ask, UsageError(f"{m.bytes} bytes in a slot of {slot.capacity}"))]
    slot = replace(slot, table=m.table, bytes=m.bytes, ask=ask)
    return state.with_job(job.with_slots(slot)), [Digest(job.name, slot)]


def protect(state: State, job: Job, m: w.Protect, ask: int) -> Result:
    """The images of a group are there: its guard can be filled."""
    slot = job.slots.get(m.name)
    if slot is None or slot.phase != "filling" or (slot.attempt, slot.rank) != (m.attempt, m.rank):
        text = f"{m.name} is not kept for attempt {m.attempt}"
        return state, [refuse(ask, SegmentLost(text))]
    slot = replace(
        slot, members=tuple(x.rank for x in m.members), num_data=m.num_data,
        num_parity=m.num_parity, table=m.table, bytes=m.bytes, ask=ask,
    )  # fmt: skip
    return state.with_job(job.with_slots(slot)), [Encode(job.name, slot, m)]


def digested(state: State, job: Job, m: w.Digested, _: int) -> Result:
    """The content of a slot is digested and may be used, or cannot be."""
    slot = job.slots.get(m.name)
    if slot is None or slot.phase != "filling" or slot.attempt != m.attempt:
        return state, []
    if m.error or not slot.owner:
        empty = slot.emptied()
        refused = Refuse(slot.ask, _unfilled(m))
        return state.with_job(job.with_slots(empty)), [Note(job.name, empty), refused]
    done = replace(slot, phase="ready", digest=m.digest, ask=0)
    reply = Reply(slot.ask, m.digest)
    return state.with_job(job.with_slots(done)), [Note(job.name, done), reply]


def _unfilled(m: w.Digested) -> WireError:
    """Return the error of a slot that was not filled: Corrupt if bytes are not what they should be, else
    SegmentLost, whatever the cause."""
    if m.error is None:
        return WireError.of(SegmentLost(f"{m.name}: it was given up"))
    kind = "Corrupt" if m.error.kind == "Corrupt" else "SegmentLost"
    message = f"{m.name}: {m.error.error().message}"
    return msgspec.structs.replace(m.error, kind=kind, message=message)


def drop(state: State, job: Job, m: w.Drop, ask: int) -> Result:
    """An attempt has failed."""
    dropped = [
        _given_up(s) for s in job.slots.values() if s.attempt == m.attempt and s.phase == "filling"
    ]  # not what is ready: others may know it as committed, and it serves until it is given out
    return state.with_job(job.with_slots(*dropped)), [*notes(job, dropped), Reply(ask, None)]


def given_up_by(job: Job, pids: tuple[int, ...]) -> list[Slot]:
    """Return the slots that dead processes were filling or waiting for, now given up."""
    owned = [s for s in job.slots.values() if s.owner in pids]
    filling = [_given_up(s) for s in owned if s.phase == "filling"]
    return filling + [replace(s, owner=0, ask=0) for s in owned if s.phase == "making"]


def remove_unfinished(job: Job, trainers: Collection[int]) -> tuple[Job, list[Effect]]:
    """Remove the slots that processes other than `trainers` were filling: these may be alive, and
    still write to them."""
    others = {s.owner for s in job.slots.values()}.difference(trainers)
    stopped = given_up_by(job, tuple(others))
    gone = tuple(s.name for s in stopped if s.phase == "empty")
    job = job.with_slots(*stopped).without(gone)
    return job, [Remove(job.name, gone)] if gone else []


def notes(job: Job, changed: list[Slot]) -> list[Effect]:
    """Return notes for those slots that are empty; the others are noted when this agent's work on them
    is done."""
    return [Note(job.name, s) for s in changed if s.phase == "empty"]


def _given_up(slot: Slot) -> Slot:
    """Return a slot, emptied; while this agent still works on it, without owner instead."""
    return replace(slot, owner=0) if slot.ask else slot.emptied()
