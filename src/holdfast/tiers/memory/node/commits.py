"""Commits of snapshots, and images on their way to storage.  Pure."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from holdfast.base.errors import SegmentLost, UsageError
from holdfast.core.checkpoint.names import step_prefix
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.effects import (
    CommitLate,
    Effect,
    KeepManifest,
    KeepPeers,
    Refuse,
    Remove,
    Reply,
    Result,
    Write,
    refuse,
)
from holdfast.tiers.memory.node.jobs import Job, PersistTask, State

FLUSH_DEADLINE_S = 600.0
"""Seconds that an agent waits for what the others flush, before it gives up committing."""


def commit(state: State, job: Job, m: w.Commit, ask: int) -> Result:
    """All ranks have their images of an attempt: it is the newest now."""
    if m.run and m.run < job.run:
        text = f"run {m.run} commits a snapshot, but run {job.run} has begun"
        return state, [refuse(ask, UsageError(text))]
    if m.attempt == job.newest or m.attempt in job.elsewhere:
        known: list[Effect] = [KeepPeers(job.name, m.cards)] if m.cards else []
        return state, [*known, Reply(ask, None)]
    keep = KeepManifest(job.name, m.attempt, m.step, m.manifest, m.cards)
    here, gone = job.ready, job.elsewhere
    if m.attempt not in here:  # only other nodes have images: no slot here has to be kept for it
        before: list[Effect] = [Remove(job.name, (), gone)] if gone else []
        state = state.with_job(job, elsewhere=(m.attempt,))
        return state, [keep, *before, Reply(ask, None)]
    gone += tuple(attempt for attempt, _ in job.commits if attempt not in here)
    job = replace(_with_newest(job, m.attempt, m.step), elsewhere=())
    over = _left_over(job)
    removed: list[Effect] = [Remove(job.name, over, gone)] if gone or over else []
    return state.with_job(job.without(over)), [keep, *removed, Reply(ask, None)]


def _with_newest(job: Job, attempt: str, step: int) -> Job:
    """Return the job with this attempt as its newest; slots that were begun for it and are not needed in
    the end are emptied."""
    here = job.ready
    kept = tuple(c for c in job.commits if c[0] in here and c[0] != attempt)
    of_it = [s for s in job.slots.values() if s.attempt == attempt]
    unused = [s.emptied() for s in of_it if s.phase == "filling"]
    return replace(job.with_slots(*unused), commits=(*kept, (attempt, step)))


def _left_over(job: Job) -> tuple[str, ...]:
    """Return the names of the free slots of ranks that are no longer here."""
    used = {(s.kind, s.rank) for s in job.slots.values() if s.attempt == job.newest}
    free = [s for s in job.slots.values() if job.is_free(s)]
    return tuple(s.name for s in free if (s.kind, s.rank) not in used)


def persist(state: State, job: Job, m: w.Persist, ask: int) -> Result:
    """Send an image to storage."""
    found = [s for s in job.images(m.attempt) if s.rank == m.rank]
    if not found:
        text = f"the image of rank {m.rank} of attempt {m.attempt} is not here"
        return state, [refuse(ask, SegmentLost(text))]
    writing = {**job.writing, (m.attempt, m.rank): PersistTask(m, ask)}
    return state.with_job(job, writing=writing), [Write(found[0], m)]


def wrote(state: State, job: Job, m: w.Wrote, _: int) -> Result:
    """An image is in storage, or cannot be.  Rank 0's task stays until the commit is settled."""
    found = job.writing.get((m.attempt, m.rank))
    if found is None:
        return state, []
    writing = dict(job.writing)
    to_commit = found.order.claim and not m.error
    if to_commit:
        writing[m.attempt, m.rank] = replace(found, written=True)
    else:
        del writing[m.attempt, m.rank]
    effects: list[Effect] = []
    if found.ask:
        effects.append(Refuse(found.ask, m.error) if m.error else Reply(found.ask, None))
    if to_commit and found.order.pid not in job.trainers:
        effects.append(CommitLate(found.order))
    return state.with_job(job, writing=writing), effects


def settled(state: State, job: Job, m: w.Settled, ask: int) -> Result:
    """The durable step is committed or given up: this agent need not see to it."""
    writing = {k: v for k, v in job.writing.items() if k[0] != m.attempt or not v.written}
    for key, one in writing.items():
        if key[0] == m.attempt:  # still being written, and not to be committed here afterwards
            writing[key] = replace(one, order=msgspec.structs.replace(one.order, claim=b""))
    replies: list[Effect] = [Reply(ask, None)] if ask else []
    return state.with_job(job, writing=writing), replies


def late_commits(job: Job, lost: set[int]) -> list[Effect]:
    """Return the commits that are left to this agent by processes that died or left."""
    written = [one.order for one in job.writing.values() if one.written]
    return [CommitLate(order) for order in written if order.pid in lost]


def flush(state: State, job: Job) -> Result:
    """Send the newest snapshot to storage, once: all processes have died, and none came back."""
    attempt, step_number = job.commits[-1] if job.commits else ("", 0)
    if not attempt or job.flushed == attempt:
        return state, []
    writing, effects = dict(job.writing), list[Effect]()
    for slot in job.images(attempt):
        key = f"{step_prefix(step_number)}{attempt}/r{slot.rank:05d}.safetensors"
        order = w.Persist(
            job.name, attempt, slot.rank, 0, job.root, key, FLUSH_DEADLINE_S, job.claim
        )
        writing[attempt, slot.rank] = PersistTask(order, 0)
        effects.append(Write(slot, order))
    return state.with_job(job, writing=writing, flushed=attempt), effects
