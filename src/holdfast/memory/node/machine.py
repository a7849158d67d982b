"""What an agent decides: a pure function `(state, message, now) -> (state, effects)`.

A job's memory is a set of *slots*.  A slot is `filling` for one training process, or `ready` with one
attempt's image of one rank, or `empty`.  The newest commit's slots are never given out again, all others
are; until one is, what it holds may still serve.  So two slots per rank are all that ever are needed, and
nothing has to be said when a snapshot grows old.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from holdfast.checkpoint.names import step_prefix
from holdfast.memory.node import words as w

LINGER_S = 30.0
"""How long an agent without jobs stays."""

KEEP_S = 24 * 3600.0
"""How long a job's memory outlives its last process, if nobody asks for it."""

FLUSH_DEADLINE_S = 600.0
"""How long an agent waits for what the others flush, before it gives up to commit."""

Phase = Literal["making", "empty", "filling", "ready"]


@dataclass(frozen=True)
class Slot:
    """A file in shared memory."""

    name: str
    capacity: int
    kind: str
    rank: int
    phase: Phase = "empty"
    attempt: str = ""
    step: int = 0
    bytes: int = 0
    table: int = 0
    digest: str = ""
    members: tuple[int, ...] = ()
    """Of a guard: the ranks of its group."""
    num_data: int = 1
    num_parity: int = 0
    owner: int = 0
    """Process that fills it; 0 if it died, or gave it up, while this agent worked on it."""
    ask: int = 0
    """Request that waits for it: as long as it is not 0, this agent makes, digests or encodes it."""


@dataclass(frozen=True)
class Writing:
    """An image on its way to storage, which must not be given out."""

    order: w.Persist
    ask: int
    written: bool = False


@dataclass(frozen=True)
class Job:
    """A training run on this node, over all its restarts."""

    name: str
    root: str = ""
    run: int = 0
    slots: dict[str, Slot] = field(default_factory=dict)
    commits: tuple[tuple[str, int], ...] = ()
    """(attempt, step), the newest last: those of which an image may still be here."""
    trainers: dict[int, tuple[int, str]] = field(default_factory=dict)
    """By pid: rank and start time."""
    writing: dict[tuple[str, int], Writing] = field(default_factory=dict)
    """By attempt and rank."""
    crashed: bool = False
    claim: bytes = b""
    flush_s: float = 0.0
    flushed: str = ""
    """The attempt that was sent to storage because everybody had died."""
    number: int = 0
    """Of the next file."""
    seen: float = 0.0

    @property
    def newest(self) -> str:
        return self.commits[-1][0] if self.commits else ""

    @property
    def used(self) -> int:
        return sum(s.capacity for s in self.slots.values())


@dataclass(frozen=True)
class State:
    """Everything that an agent knows."""

    budget: int
    stay: bool = False
    """Started by hand: does not leave by itself."""
    jobs: dict[str, Job] = field(default_factory=dict)
    idle_since: float = 0.0

    @property
    def used(self) -> int:
        return sum(job.used for job in self.jobs.values())


@dataclass(frozen=True)
class Reply:
    ask: int
    value: Any


@dataclass(frozen=True)
class Refuse:
    ask: int
    kind: str
    """Name of the error's class."""
    text: str
    hint: str = ""


@dataclass(frozen=True)
class Make:
    """Create a file with all its memory; answered by `Made`."""

    job: str
    name: str
    capacity: int


@dataclass(frozen=True)
class Note:
    """Write a slot's header; always before what follows it."""

    job: str
    slot: Slot


@dataclass(frozen=True)
class Digest:
    """Digest a slot up to its table, write the table; answered by `Digested`."""

    job: str
    slot: Slot


@dataclass(frozen=True)
class Encode:
    """Fill a guard from the images of its group; answered by `Digested`."""

    job: str
    slot: Slot
    order: w.Protect


@dataclass(frozen=True)
class Write:
    """Write an image to storage; answered by `Wrote`."""

    slot: Slot
    order: w.Persist


@dataclass(frozen=True)
class CommitLate:
    """Wait for the files of all ranks, and commit the durable step in the place of rank 0."""

    order: w.Persist


@dataclass(frozen=True)
class KeepManifest:
    job: str
    attempt: str
    step: int
    manifest: bytes
    cards: tuple[w.Card, ...] = ()


@dataclass(frozen=True)
class Remove:
    """Files of a job that are no more: slots, and manifests by attempt."""

    job: str
    names: tuple[str, ...] = ()
    attempts: tuple[str, ...] = ()


@dataclass(frozen=True)
class RemoveJob:
    job: str


@dataclass(frozen=True)
class Answer:
    """To be answered by the shell, which alone knows addresses and reads manifests."""

    ask: int
    job: str


@dataclass(frozen=True)
class Greet:
    """Answer with the agent's card, and note who belongs to a job."""

    ask: int
    job: str


@dataclass(frozen=True)
class Exit:
    """Leave."""


Effect = (
    Reply | Refuse | Make | Note | Digest | Encode | Write | CommitLate
    | KeepManifest | Remove | RemoveJob | Answer | Greet | Exit
)  # fmt: skip
Result = tuple[State, list[Effect]]


def step(state: State, message: w.Message, now: float, ask: int = 0) -> Result:
    """What becomes of the state, and what is to be done, in order."""
    match message:
        case w.Hello():
            return _hello(state, message, now, ask)
        case w.Take():
            return _of_job(state, message.job, ask, lambda job: _take(state, job, message, ask))
        case w.Made():
            return _of_job(state, message.job, 0, lambda job: _made(state, job, message))
        case w.Ready():
            return _of_job(state, message.job, ask, lambda job: _ready(state, job, message, ask))
        case w.Protect():
            return _of_job(state, message.job, ask, lambda job: _protect(state, job, message, ask))
        case w.Digested():
            return _of_job(state, message.job, 0, lambda job: _digested(state, job, message))
        case w.Persist():
            return _of_job(state, message.job, ask, lambda job: _persist(state, job, message, ask))
        case w.Wrote():
            return _of_job(state, message.job, 0, lambda job: _wrote(state, job, message))
        case w.Settled():
            return _of_job(state, message.job, ask, lambda job: _settled(state, job, message, ask))
        case w.Commit():
            return _of_job(state, message.job, ask, lambda job: _commit(state, job, message, ask))
        case w.Drop():
            return _of_job(state, message.job, ask, lambda job: _drop(state, job, message, ask))
        case w.Bye():
            return _bye(state, message, now, ask)
        case w.Ask():
            return state, [Answer(ask, message.job)]
        case w.Status():
            return state, [Answer(ask, "")]
        case w.Clean():
            return _clean(state, message, now, ask)
        case w.Stop():
            freed: list[Effect] = [RemoveJob(name) for name in state.jobs] if message.free else []
            return state, [*freed, Reply(ask, None), Exit()]
        case w.Gone():
            return _gone(state, message.pids, now)
        case w.Tick():
            return _tick(state, now)
    raise AssertionError(message)


def _of_job(state: State, name: str, ask: int, work: Any) -> Result:
    job = state.jobs.get(name)
    if job is not None:
        result: Result = work(job)
        return result
    if not ask:
        return state, []
    return state, [
        Refuse(ask, "SegmentLost", f"this agent knows nothing of job {name}", "say hello")
    ]


def _with(state: State, job: Job, **changes: Any) -> State:
    job = replace(job, **changes)
    return replace(state, jobs={**state.jobs, job.name: job})


def _slots(job: Job, *changed: Slot) -> dict[str, Slot]:
    return {**job.slots, **{s.name: s for s in changed}}


def _hello(state: State, m: w.Hello, now: float, ask: int) -> Result:
    if m.version != w.VERSION:
        text = (
            f"the agent of this node speaks version {w.VERSION}, this process version {m.version}"
        )
        hint = "`holdfast agent stop` when its jobs are over; the next start brings one that fits"
        return state, [Refuse(ask, "UsageError", text, hint)]
    job = state.jobs.get(m.job) or Job(m.job)
    older = m.run > job.run  # what a run before left counts no more, even if nobody can see it end
    trainers = {} if older else dict(job.trainers)
    trainers[m.pid] = (m.rank, m.started)
    state = _with(
        state,
        job,
        root=m.root,
        run=max(m.run, job.run),
        trainers=trainers,
        crashed=False,
        seen=now,
        claim=m.claim if m.run >= job.run else job.claim,
        flush_s=m.flush_s,
    )
    return state, [Greet(ask, m.job)]


def _take(state: State, job: Job, m: w.Take, ask: int) -> Result:
    if m.pid not in job.trainers:  # it would not be missed, and others would look for a dead agent
        text = f"process {m.pid} is unknown to this agent, which is another than the one it met"
        return state, [Refuse(ask, "SegmentLost", text, "say hello")]
    free = [s for s in job.slots.values() if _is_free(job, s) and s.attempt != m.attempt]
    fits = [s for s in free if s.kind == m.kind]
    fits = [s for s in fits if m.bytes <= s.capacity <= m.bytes * 5 // 4 + (1 << 20)]
    if fits:
        best = min(fits, key=lambda s: (s.rank != m.rank, _age(job, s)))
        slot = _for(best, m, "filling")
        state = _with(state, job, slots=_slots(job, slot))
        return state, [Note(job.name, slot), Reply(ask, w.Lease(slot.name, slot.capacity))]
    over = state.used + m.bytes - state.budget
    gone: list[Slot] = []
    for slot in sorted(free, key=lambda s: _age(job, s)):
        if over > 0 or (slot.kind, slot.rank) == (m.kind, m.rank):  # of a size that is over
            gone.append(slot)
            over -= slot.capacity
    if over > 0:
        return state, [_too_large(state, m, ask)]
    slot = _for(Slot(f"{m.kind}-{m.rank:05d}-{job.number}", m.bytes, m.kind, m.rank), m, "making")
    slot = replace(slot, ask=ask)
    kept = {name: s for name, s in job.slots.items() if s not in gone}
    state = _with(state, job, slots={**kept, slot.name: slot}, number=job.number + 1)
    removed: list[Effect] = [Remove(job.name, tuple(s.name for s in gone))] if gone else []
    return state, [*removed, Make(job.name, slot.name, slot.capacity)]


def _is_free(job: Job, slot: Slot) -> bool:
    if any(attempt == slot.attempt for attempt, _ in job.writing):
        return False
    return slot.phase == "empty" or (slot.phase == "ready" and slot.attempt != job.newest)


def _age(job: Job, slot: Slot) -> int:
    """What is to be given out first: nothing, what was never committed, the oldest."""
    order = [attempt for attempt, _ in job.commits]
    if slot.phase == "empty":
        return 0
    return 2 + order.index(slot.attempt) if slot.attempt in order else 1


def _for(slot: Slot, m: w.Take, phase: Phase) -> Slot:
    return replace(
        slot, kind=m.kind, rank=m.rank, phase=phase, attempt=m.attempt, step=m.step,
        bytes=m.bytes, owner=m.pid, digest="", table=0, ask=0, members=(), num_data=1, num_parity=0,
    )  # fmt: skip


def _too_large(state: State, m: w.Take, ask: int) -> Refuse:
    needed = sum(
        s.capacity
        for job in state.jobs.values()
        for s in job.slots.values()
        if not _is_free(job, s)
    )
    return Refuse(
        ask,
        "OutOfSpace",
        f"{m.bytes} bytes for the {m.kind} of rank {m.rank}: the agent's budget is {state.budget} bytes, "
        f"of which {needed} are in use",
        "raise Memory(budget=...), or free what other jobs left: `holdfast agent status`, `clean`",
    )


def _made(state: State, job: Job, m: w.Made) -> Result:
    slot = job.slots.get(m.name)
    if slot is None or slot.phase != "making":
        return state, [Remove(job.name, (m.name,))]
    if m.error:
        kept = {name: s for name, s in job.slots.items() if name != m.name}
        text = f"{slot.capacity} bytes of shared memory for rank {slot.rank}: {m.error}"
        hint = "a larger /dev/shm (in containers --shm-size), or a smaller Memory(budget=...)"
        refuse = Refuse(slot.ask, "OutOfSpace", text, hint)
        return _with(state, job, slots=kept), [Remove(job.name, (m.name,)), refuse]
    if not slot.owner:
        empty = replace(slot, phase="empty")
        return _with(state, job, slots=_slots(job, empty)), [Note(job.name, empty)]
    done = replace(slot, phase="filling", ask=0)
    reply = Reply(slot.ask, w.Lease(slot.name, slot.capacity))
    return _with(state, job, slots=_slots(job, done)), [Note(job.name, done), reply]


def _ready(state: State, job: Job, m: w.Ready, ask: int) -> Result:
    slot = job.slots.get(m.name)
    if slot is None or slot.phase != "filling" or slot.attempt != m.attempt:
        text = f"{m.name} is not being filled for attempt {m.attempt}"
        return state, [Refuse(ask, "SegmentLost", text)]
    if not 0 <= m.table <= m.bytes <= slot.capacity:
        return state, [Refuse(ask, "UsageError", f"{m.bytes} bytes in a slot of {slot.capacity}")]
    slot = replace(slot, table=m.table, bytes=m.bytes, ask=ask)
    return _with(state, job, slots=_slots(job, slot)), [Digest(job.name, slot)]


def _protect(state: State, job: Job, m: w.Protect, ask: int) -> Result:
    slot = job.slots.get(m.name)
    if slot is None or slot.phase != "filling" or (slot.attempt, slot.rank) != (m.attempt, m.rank):
        return state, [Refuse(ask, "SegmentLost", f"{m.name} is not kept for attempt {m.attempt}")]
    slot = replace(
        slot, members=tuple(x.rank for x in m.members), num_data=m.num_data,
        num_parity=m.num_parity, table=m.table, bytes=m.bytes, ask=ask,
    )  # fmt: skip
    return _with(state, job, slots=_slots(job, slot)), [Encode(job.name, slot, m)]


def _digested(state: State, job: Job, m: w.Digested) -> Result:
    slot = job.slots.get(m.name)
    if slot is None or slot.phase != "filling" or slot.attempt != m.attempt:
        return state, []
    if m.error or not slot.owner:
        empty = replace(slot, phase="empty", ask=0)
        text = f"{m.name}: {m.error or 'it was given up'}"
        return _with(state, job, slots=_slots(job, empty)), [
            Note(job.name, empty), Refuse(slot.ask, "SegmentLost", text)
        ]  # fmt: skip
    done = replace(slot, phase="ready", digest=m.digest, ask=0)
    return _with(state, job, slots=_slots(job, done)), [
        Note(job.name, done), Reply(slot.ask, m.digest)
    ]  # fmt: skip


def _persist(state: State, job: Job, m: w.Persist, ask: int) -> Result:
    wanted = ("share", m.attempt, m.rank, "ready")
    found = [s for s in job.slots.values() if (s.kind, s.attempt, s.rank, s.phase) == wanted]
    if not found:
        text = f"the image of rank {m.rank} of attempt {m.attempt} is not here"
        return state, [Refuse(ask, "SegmentLost", text)]
    writing = {**job.writing, (m.attempt, m.rank): Writing(m, ask)}
    return _with(state, job, writing=writing), [Write(found[0], m)]


def _wrote(state: State, job: Job, m: w.Wrote) -> Result:
    found = job.writing.get((m.attempt, m.rank))
    if found is None:
        return state, []
    writing = dict(job.writing)
    if m.error or not found.order.claim:
        del writing[m.attempt, m.rank]
    else:
        writing[m.attempt, m.rank] = replace(found, written=True)
    replies: list[Effect] = []
    if found.ask:
        replies = [Refuse(found.ask, m.kind, m.error) if m.error else Reply(found.ask, None)]
    state = _with(state, job, writing=writing)
    late: list[Effect] = []
    if found.order.claim and not m.error and found.order.pid not in job.trainers:
        late = [CommitLate(found.order)]
    return state, [*replies, *late]


def _settled(state: State, job: Job, m: w.Settled, ask: int) -> Result:
    writing = {k: v for k, v in job.writing.items() if k[0] != m.attempt or not v.written}
    for key, one in writing.items():
        if key[0] == m.attempt:  # still being written, and then nobody's to commit
            writing[key] = replace(one, order=msgspec.structs.replace(one.order, claim=b""))
    replies: list[Effect] = [Reply(ask, None)] if ask else []
    return _with(state, job, writing=writing), replies


def _commit(state: State, job: Job, m: w.Commit, ask: int) -> Result:
    if m.run and m.run < job.run:
        text = f"run {m.run} commits a snapshot, but run {job.run} has begun"
        return state, [Refuse(ask, "UsageError", text)]
    if m.attempt == job.newest:
        return state, [Reply(ask, None)]
    here = {s.attempt for s in job.slots.values() if s.phase == "ready"}
    kept = tuple(c for c in job.commits if c[0] in here and c[0] != m.attempt)
    gone = tuple(c[0] for c in job.commits if c[0] not in here)
    if m.attempt not in here:  # another node's images alone: nothing here is to be protected for it
        keep = KeepManifest(job.name, m.attempt, m.step, m.manifest, m.cards)
        return state, [keep, Reply(ask, None)]
    unused = [
        replace(s, phase="empty", ask=0)
        for s in job.slots.values()
        if s.attempt == m.attempt and s.phase == "filling"
    ]  # begun, and not needed in the end
    job = replace(job, slots=_slots(job, *unused))
    used = {(s.kind, s.rank) for s in job.slots.values() if s.attempt == m.attempt}
    job = replace(job, commits=(*kept, (m.attempt, m.step)))
    over = [
        s.name for s in job.slots.values() if _is_free(job, s) and (s.kind, s.rank) not in used
    ]  # of ranks that are here no more
    slots = {name: s for name, s in job.slots.items() if name not in over}
    state = _with(state, job, slots=slots)
    effects: list[Effect] = [KeepManifest(job.name, m.attempt, m.step, m.manifest, m.cards)]
    if gone or over:
        effects.append(Remove(job.name, tuple(over), gone))
    return state, [*effects, Reply(ask, None)]


def _drop(state: State, job: Job, m: w.Drop, ask: int) -> Result:
    dropped = [
        _given_up(s) for s in job.slots.values() if s.attempt == m.attempt and s.phase == "filling"
    ]  # others may know it as committed: what is ready serves until it is given out
    notes: list[Effect] = [Note(job.name, s) for s in dropped if s.phase == "empty"]
    return _with(state, job, slots=_slots(job, *dropped)), [*notes, Reply(ask, None)]


def _given_up(slot: Slot) -> Slot:
    """Empty; or, while this agent still writes to it, nobody's until that ends."""
    if slot.phase == "filling" and slot.ask:
        return replace(slot, owner=0)
    return replace(slot, phase="empty", ask=0)


def _bye(state: State, m: w.Bye, now: float, ask: int) -> Result:
    job = state.jobs.get(m.job)
    if job is None:
        return state, [Reply(ask, None)]
    left = {pid: who for pid, who in job.trainers.items() if pid != m.pid}
    crashed = job.crashed or not m.finished
    if left or crashed:
        changes = {"trainers": left, "crashed": crashed, "seen": now}
        return _with(state, job, **changes), [Reply(ask, None)]
    state, effects = _forget(state, [job.name], now)
    return state, [*effects, Reply(ask, None)]


def _forget(state: State, names: Iterable[str], now: float) -> Result:
    names = tuple(names)
    jobs = {name: job for name, job in state.jobs.items() if name not in names}
    state = replace(state, jobs=jobs, idle_since=now if not jobs else state.idle_since)
    return state, [RemoveJob(name) for name in names]


def _clean(state: State, m: w.Clean, now: float, ask: int) -> Result:
    alive = [n for n, job in state.jobs.items() if job.trainers and m.job in ("", n)]
    if m.job and (m.job in alive or m.job not in state.jobs):
        text = f"job {m.job} " + (
            "has running processes" if m.job in alive else "is not known here"
        )
        return state, [Refuse(ask, "UsageError", text, "`holdfast agent status` lists the jobs")]
    dead = [n for n in state.jobs if m.job in ("", n) and n not in alive]
    state, effects = _forget(state, dead, now)
    return state, [*effects, Reply(ask, dead)]


def _gone(state: State, pids: tuple[int, ...], now: float) -> Result:
    effects: list[Effect] = []
    for job in list(state.jobs.values()):
        lost = set(pids) & job.trainers.keys()
        stopped = [
            _given_up(s) for s in job.slots.values() if s.phase == "filling" and s.owner in pids
        ]
        stopped += [
            replace(s, owner=0, ask=0)
            for s in job.slots.values()
            if s.phase == "making" and s.owner in pids
        ]
        if not lost and not stopped:
            continue
        left = {pid: who for pid, who in job.trainers.items() if pid not in lost}
        state = _with(
            state, job, trainers=left, crashed=True, seen=now, slots=_slots(job, *stopped)
        )
        effects += [Note(job.name, s) for s in stopped if s.phase == "empty"]
        for writing in job.writing.values():
            if writing.written and writing.order.pid in lost:
                effects.append(CommitLate(writing.order))
    return state, effects


def _tick(state: State, now: float) -> Result:
    old = [n for n, job in state.jobs.items() if not job.trainers and now - job.seen > KEEP_S]
    effects: list[Effect] = []
    if old:
        state, effects = _forget(state, old, now)
    for job in list(state.jobs.values()):
        if not job.trainers and job.crashed and 0 < job.flush_s < now - job.seen:
            state, more = _flush(state, job)
            effects += more
    if not state.jobs and not state.stay and now - state.idle_since > LINGER_S:
        effects.append(Exit())
    return state, effects


def _flush(state: State, job: Job) -> Result:
    """Everybody has died and nobody came: the newest snapshot goes to storage, once."""
    attempt, step_number = job.commits[-1] if job.commits else ("", 0)
    if not attempt or job.flushed == attempt:
        return state, []
    writing, effects = dict(job.writing), list[Effect]()
    for slot in job.slots.values():
        if (slot.kind, slot.attempt, slot.phase) == ("share", attempt, "ready"):
            key = f"{step_prefix(step_number)}{attempt}/r{slot.rank:05d}.safetensors"
            order = w.Persist(
                job.name, attempt, slot.rank, 0, job.root, key, FLUSH_DEADLINE_S, job.claim
            )
            writing[attempt, slot.rank] = Writing(order, 0)
            effects.append(Write(slot, order))
    return _with(state, job, writing=writing, flushed=attempt), effects


def adopted(budget: int, jobs: Iterable[Job], now: float, *, stay: bool = False) -> State:
    """The state of an agent that finds what another left: what was being filled is empty."""
    found = {}
    for job in jobs:
        slots = {
            s.name: s if s.phase == "ready" else replace(s, phase="empty", ask=0)
            for s in job.slots.values()
        }
        here = {s.attempt for s in slots.values() if s.phase == "ready"}
        commits = tuple(c for c in job.commits if c[0] in here)
        found[job.name] = replace(
            job, slots=slots, commits=commits, crashed=not job.trainers, seen=now
        )
    return State(budget, stay, found, now)
