"""The decisions of an agent: a pure function `(state, message, now) -> (state, effects)`.

`jobs` has the state, `effects` what is to be done.  This module handles processes that come, leave and die;
`leases` handles a job's memory until a slot is filled, and `commits` from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from holdfast.base.errors import SegmentLost, UsageError
from holdfast.tiers.memory.node import commits, leases
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.node.effects import (
    FREED,
    STOPPED,
    Answer,
    Effect,
    Exit,
    Greet,
    RemoveJob,
    Reply,
    Result,
    refuse,
)
from holdfast.tiers.memory.node.jobs import Job, State

LINGER_S = 30.0
"""Seconds for which an agent without jobs stays, and for which it keeps a dead job without a ready
image."""

KEEP_S = 24 * 3600.0
"""Seconds for which a job's memory outlives its last process, if nobody asks for it."""

JOB_HANDLERS: dict[type[w.Message], Callable[..., Result]] = {
    w.Take: leases.take,
    w.Made: leases.made,
    w.Ready: leases.ready,
    w.Protect: leases.protect,
    w.Digested: leases.digested,
    w.Drop: leases.drop,
    w.Commit: commits.commit,
    w.Persist: commits.persist,
    w.Wrote: commits.wrote,
    w.Settled: commits.settled,
}
"""The function that handles each kind of message to a known job: `(state, job, message, ask)`."""


def step(state: State, message: w.Message, now: float, ask: int = 0) -> Result:
    """Return the state after a message, and the effects to carry out, in order.

    `ask`: number of the request that is to be answered; 0 for what nobody waits for.
    """
    match message:
        case w.Hello():
            return _hello(state, message, now, ask)
        case w.Bye():
            return _bye(state, message, now, ask)
        case w.Finished():
            return _finished(state, message, now)
        case w.Ask():
            return state, [Answer(ask, message.job)]
        case w.Status():
            return state, [Answer(ask, "")]
        case w.Clean():
            return _clean(state, message, now, ask)
        case w.Stay():
            budget = message.budget or state.budget
            return replace(state, stay=True, budget=budget), [Reply(ask, None)]
        case w.Stop():
            freed: list[Effect] = [RemoveJob(name) for name in state.jobs] if message.free else []
            return state, [*freed, Reply(ask, None), Exit(FREED if message.free else STOPPED)]
        case w.Gone():
            return _gone(state, message, now)
        case w.Tick():
            return _tick(state, now)
    return _of_a_job(state, message, ask)


def _of_a_job(state: State, message: Any, ask: int) -> Result:
    work = JOB_HANDLERS[type(message)]
    job = state.jobs.get(message.job)
    if job is not None:
        return work(state, job, message, ask)
    if isinstance(message, w.Made):  # made for a job that has been freed meanwhile
        return state, [RemoveJob(message.job)]
    if not ask:
        return state, []
    text = f"this agent knows nothing of job {message.job}"
    return state, [refuse(ask, SegmentLost(text, hint="say hello"))]


def _hello(state: State, m: w.Hello, now: float, ask: int) -> Result:
    if m.version != w.VERSION:
        text = (
            f"the agent of this node speaks version {w.VERSION}, this process version {m.version}"
        )
        hint = "`holdfast agent stop` when its jobs are over; the next start brings one that fits"
        return state, [refuse(ask, UsageError(text, hint=hint))]
    job = state.jobs.get(m.job) or Job(m.job)
    older = m.run > job.run  # processes of an earlier run no longer count, even if they seem to run
    trainers = {} if older else dict(job.trainers)
    trainers[m.pid] = (m.rank, m.started)
    effects: list[Effect] = []
    if older:
        late = commits.late_commits(job, job.trainers.keys() - trainers.keys())
        job, effects = leases.remove_unfinished(job, trainers)
        effects += late
    host, budget = m.host, max(m.budget, state.budget)
    if state.stay:
        host, budget = "", state.budget
    state = replace(state, budget=budget).with_job(
        job,
        root=m.root,
        run=max(m.run, job.run),
        trainers=trainers,
        crashed=False,
        finished=job.finished and not older,
        seen=now,
        claim=m.claim if m.run >= job.run else job.claim,
        flush_s=m.flush_s,
        bytes_per_s=m.bytes_per_s,
        budget=m.budget,
        host=host if older else job.host,  # its ranks know this node by one card
    )
    return state, [*effects, Greet(ask, m.job)]


def _bye(state: State, m: w.Bye, now: float, ask: int) -> Result:
    job = state.jobs.get(m.job)
    if job is None:
        return state, [Reply(ask, None)]
    left, crashed = job.trainers_but({m.pid}), job.crashed or not m.finished
    finished = job.finished or (m.finished and job.trainers.get(m.pid, (-1, ""))[0] == 0)
    if left or crashed or not finished:
        state = state.with_job(job, trainers=left, crashed=crashed, finished=finished, seen=now)
        return state, [*commits.late_commits(job, {m.pid}), Reply(ask, None)]
    state, effects = _forget(state, [job.name], now)
    return state, [*effects, Reply(ask, None)]


def _finished(state: State, m: w.Finished, now: float) -> Result:
    """Free a job's memory.  Only rank 0 knows that all are done: another rank may have left while rank 0
    went on, and crashed."""
    job = state.jobs.get(m.job)
    if job is None or job.run != m.run:
        return state, []
    if job.trainers or job.crashed:
        return state.with_job(job, finished=True), []
    return _forget(state, [job.name], now)


def _forget(state: State, names: Iterable[str], now: float) -> Result:
    names = tuple(names)
    jobs = {name: job for name, job in state.jobs.items() if name not in names}
    state = replace(state, jobs=jobs, idle_since=now if not jobs else state.idle_since)
    return state, [RemoveJob(name) for name in names]


def _clean(state: State, m: w.Clean, now: float, ask: int) -> Result:
    """Free what dead jobs hold, but for images that are still being written.  A commit that only waits for
    files of other nodes needs no memory: it goes on."""
    named = {n: job for n, job in state.jobs.items() if m.job in ("", n)}
    alive = {n: (job.trainers, job.unwritten) for n, job in named.items()}
    alive = {n: in_use for n, in_use in alive.items() if any(in_use)}
    if m.job and (alive or not named):
        return state, [refuse(ask, _not_cleaned(m.job, *alive.get(m.job, ((), ()))))]
    dead = {n: job for n, job in named.items() if n not in alive and job.holds_memory}
    committing = {
        n: replace(job, slots={}, commits=(), elsewhere=())
        for n, job in dead.items()
        if job.writing
    }
    state, effects = _forget(state, dead, now)
    state = replace(state, jobs={**state.jobs, **committing})
    return state, [*effects, Reply(ask, list(dead))]


def _not_cleaned(job: str, trainers: Collection[int], unwritten: Collection[int]) -> UsageError:
    """Return the error of a job whose memory is not freed."""
    if trainers:
        pids = ", ".join(map(str, sorted(trainers)))
        return UsageError(f"job {job} has running processes: {pids}", hint="end them first")
    if not unwritten:
        text, hint = f"job {job} is not known here", "`holdfast agent status` lists the jobs"
        return UsageError(text, hint=hint)
    steps = ", ".join(map(str, sorted(unwritten)))
    return UsageError(
        f"job {job}: this agent is writing its step {steps} to storage",
        hint="the same command once that is written; `holdfast agent stop --free` gives it up, and "
        "frees what other jobs hold, too",
    )


def _gone(state: State, m: w.Gone, now: float) -> Result:
    """Processes have died: empty what they were filling, and commit what they had to commit."""
    job = state.jobs.get(m.job)
    if job is None:
        return state, []
    lost = set(m.pids) & job.trainers.keys()
    stopped = leases.given_up_by(job, m.pids)
    if not lost and not stopped:
        return state, []
    left = job.trainers_but(lost)
    state = state.with_job(job.with_slots(*stopped), trainers=left, crashed=True, seen=now)
    return state, [*leases.notes(job, stopped), *commits.late_commits(job, lost)]


def _tick(state: State, now: float) -> Result:
    old = [n for n, job in state.jobs.items() if now - job.seen > _keep_s(job)]
    effects: list[Effect] = []
    if old:
        state, effects = _forget(state, old, now)
    for job in list(state.jobs.values()):
        if not job.trainers and job.crashed and 0 < job.flush_s < now - job.seen:
            state, more = commits.flush(state, job)
            effects += more
    if not state.jobs and not state.stay and now - state.idle_since > LINGER_S:
        effects.append(Exit("left, as it held nothing"))
    return state, effects


def _keep_s(job: Job) -> float:
    """Return the seconds for which a job's memory is kept after it was last heard of."""
    if job.trainers or job.writing:
        return float("inf")
    return KEEP_S if job.ready else LINGER_S


def adopted(budget: int, jobs: Iterable[Job], now: float, *, stay: bool = False) -> State:
    """Return the state of an agent that adopts what another left.  Slots that were being filled are empty,
    and jobs without processes count as crashed."""
    found = {}
    for job in jobs:
        unready = [s.emptied() for s in job.slots.values() if s.phase != "ready"]
        kept = tuple(c for c in job.commits if c[0] in job.ready)
        elsewhere = tuple(a for a, _ in job.commits if a not in job.ready)
        found[job.name] = replace(
            job.with_slots(*unready), commits=kept, elsewhere=elsewhere, crashed=not job.trainers,
            seen=now,
        )  # fmt: skip
    return State(budget, stay, found, now)
