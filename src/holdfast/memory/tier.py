"""The memory tier's side in a training process: snapshots into the agent's shared memory."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec

from holdfast.capture import Capture, Save, SaveJob
from holdfast.capture.capture import finish, guarded
from holdfast.capture.exactness import of_all
from holdfast.capture.together import manifest_of, written
from holdfast.checkpoint.names import step_prefix
from holdfast.durable import Durable
from holdfast.errors import (
    AgentUnreachable,
    Deadline,
    HoldfastError,
    RankErrors,
    SegmentLost,
    UsageError,
)
from holdfast.events import emit, span
from holdfast.format.image import Image
from holdfast.format.manifest import FileEntry, Manifest, encode
from holdfast.here import started
from holdfast.memory.asking import tell_all, tell_finished
from holdfast.memory.decision import Decision, Filled, decided
from holdfast.memory.feed import Feed
from holdfast.memory.loading import load_snapshot
from holdfast.memory.node import words as w
from holdfast.memory.node.client import Client
from holdfast.memory.node.holdings import Holdings
from holdfast.memory.options import Memory
from holdfast.memory.protecting import Protector
from holdfast.memory.recompute import Shadow, shadow_of
from holdfast.memory.slots import SlotBuffer, Slots
from holdfast.memory.storing import Storing
from holdfast.patience import slowest
from holdfast.restore.targets import RestoreOptions
from holdfast.state.live import Live, State
from holdfast.state.protocol import Written
from holdfast.state.snapshot import Beside, Filling, Kept, Moment, PrivateBuffer
from holdfast.threads import Worker
from holdfast.wire import WireError, rank_errors

LEAVE_S = 5.0
"""Seconds that a process that ends early stays for a snapshot to be complete, or a save to reach
the agents."""


class MemoryTier:
    """Snapshots into shared memory.  Every method is collective: all ranks call it in the same order."""

    name = "snapshot"

    def __init__(
        self,
        capture: Capture,
        durable: Durable,
        options: Memory,
        *,
        job: str,
        host: str,
        state: Callable[[], State],
    ) -> None:
        self.capture = capture
        self.durable = durable
        self.group = capture.group
        self.deadline_s = capture.deadline_s
        self.options = options
        self.job = job
        self.host = host
        self.client = Client(deadline_s=self.deadline_s)
        self.held_in = self.client.root / "jobs" / job
        self.slots = Slots(self.held_in, capture.planner.forget)
        self.news: list[str] = []
        """Texts that the user is to be warned with."""
        self._budget = 0
        """Bytes of memory that this job may take on this node."""
        self._shadow = shadow_of(state()) if options.recomputes else None
        self._feed = None
        if options.feed == "gradient":
            self._feed = Feed(state, self.group.rank, self.deadline_s, options.prove_every)
        self._spare = PrivateBuffer()
        self._lock = threading.Lock()
        self._untold: w.Commit | None = None
        """The commit that the others know of and this node's agent does not yet; None if there is
        none."""
        self._pending = 0
        self._closed = False
        self._last_save = 0, False
        """Number of the newest durable save that is over, and whether it failed."""
        self._free = threading.Event()
        self._free.set()
        self._thread = Worker("holdfast-memory")
        self._storing = Storing(self)
        self.hello()
        self._protector = Protector(self, self._shadow)
        threading._register_atexit(partial(_at_exit, weakref.ref(self), os.getpid()))  # type: ignore[attr-defined]

    @property
    def run(self) -> int:
        return self.durable.run

    @property
    def _followers(self) -> list[Shadow | Feed]:
        return [one for one in (self._shadow, self._feed) if one is not None]

    def hello(self) -> None:
        """Have an agent, and be known to it."""
        tls = self.options.tls
        self.client.start(self.host, self.options.budget_bytes, tls=tls)
        try:
            self._introduce()
        except AgentUnreachable:  # it has just left
            self.client.start(self.host, self.options.budget_bytes, tls=tls)
            self._introduce()
        if tls and not self.card.fingerprint:
            raise UsageError(
                "Memory(tls=True): the agent of this node serves without TLS",
                hint="`holdfast agent stop`, then start again; by hand: `holdfast agent start --tls`",
            )

    def _introduce(self) -> None:
        pid = os.getpid()
        message = w.Hello(
            self.job,
            self.durable.store.url,
            self.run,
            self.group.rank,
            pid,
            started(pid) or "0",
            msgspec.json.encode(self.durable.claim),
            self.options.flush_after_s or 0.0,
            self.options.bytes_per_s,
            self.host,
            self.options.budget_bytes,
        )
        card = self.client.ask(message, w.Card)
        if not self._budget or card != self.card:
            of_all = self.client.ask(w.Status(), w.AgentReport).budget
            self._budget = min(of_all, self.options.budget_bytes or of_all)
        self.card: w.Card = card

    def held(self) -> w.Held:
        """Return what the agent of this node holds of this job."""
        held: w.Held = self.client.ask(w.Ask(self.job), w.Held)
        return held

    # -- training thread --------------------------------------------------------------------------

    def begin(
        self,
        describe_live: Callable[[], Live],
        step: int,
        *,
        durable: bool,
        must: bool = False,
        live: bool = False,
    ) -> Save:
        """Start a snapshot, which with `durable` goes on to storage.  Blocks as `Capture.begin`.

        It is left out if another one is in flight, unless it `must` be.  `live`: it is not made from a
        replica.
        """
        step_prefix(step)
        with self._lock:
            waiting = self._pending > 0 or not self._storing.handed_over.is_set()
            busy = not must and (self.durable.busy if durable else waiting)
            self._pending += 1
        if durable:
            self.durable.watch_over(step)
        if durable and self._feed is not None:
            self._feed.count_durable(must_prove=live)
        for follower in self._followers:
            follower.mark(self.capture.next_number)
        return self.capture.begin(describe_live, step, self, busy=busy, durable=durable)

    def arranged(self, live: Live) -> Live:
        """Return the state in the order in which it is to be shared among ranks."""
        return live if self._feed is None else self._feed.arranged(live)

    def prepare(self, describe_live: Callable[[], Live]) -> Save:
        """Plan a snapshot and have the memory for it ready.  Returns at once."""
        with self._lock:
            self._pending += 1
        return self.capture.prepare(describe_live, self)

    def settle(self, limit_s: float) -> None:
        """Wait until nothing is under way; Deadline if that takes longer."""
        until = time.monotonic() + limit_s
        try:
            self.capture.settle(limit_s)
            for pool in (self._thread, self._storing.thread):
                pool.settle(max(until - time.monotonic(), 0.1))
        except TimeoutError:
            awaited = self.group.awaited
            raise Deadline(
                f"a snapshot was still under way after {limit_s:.3g} s"
                + (f": {awaited}" * bool(awaited)),
                hint=slowest(),
            ) from None

    def leave(self) -> None:
        """The training ends early: wait for nobody any more.  What agents were told to do, they do."""
        self._settle_early()
        self._hurry()

    def leave_unclosed(self) -> None:
        """Do as `leave` does, if something is still under way in the end: Python ends, and nobody
        has closed this.  Else nobody waits any more, and the ranks may yet tell each other what
        became of the last save."""
        if not self._settle_early():
            self._hurry()

    def _settle_early(self) -> bool:
        """True if nothing is under way, after waiting for a moment."""
        if not self._closed and (self.durable.busy or self._pending):
            try:
                self.settle(LEAVE_S)
            except Deadline:
                return False
        return True

    def _hurry(self) -> None:
        self.client.hurry()
        self.group.hurry()

    def close(self, timeout: float | None, *, finished: bool) -> None:
        """Wait for what is under way.  `finished`: the snapshots are needed no more, if the last save is in
        storage."""
        self._closed = True
        try:
            self.settle(self.deadline_s if timeout is None else timeout)
        except BaseException:
            finished = False  # what is under way is for the agents to end, as long as ranks hear each other
            self._hurry()
            with suppress(Deadline):
                self.settle(LEAVE_S)
            raise
        finally:
            self._thread.shutdown()
            self._storing.thread.shutdown()
            for follower in self._followers:
                follower.twins.close(LEAVE_S)
            self.slots.close()
            self._spare.close()
            if finished and self._last_save[1]:
                finished = False
                self.news.append(
                    "the last save failed: what is in memory stays there for a day (the next start "
                    "restores and saves it, `holdfast agent clean` frees it)"
                )
            with suppress(HoldfastError):
                self._say_bye(finished and not self._storing.left_to_agents)

    def _say_bye(self, finished: bool) -> None:
        """Say bye to the agent; if it has died, to its successor, if there is something to be
        freed."""
        try:
            self._leave_agents(finished)
        except AgentUnreachable:
            if not finished or not self.held_in.exists() or self.client.look() != "nobody":
                raise
            self.client.start(self.host, self.options.budget_bytes, tls=self.options.tls)
            self._leave_agents(finished)

    def _leave_agents(self, finished: bool) -> None:
        """Rank 0 has the last word, and all agents hear it: what the others left serves until then."""
        last = finished and self.group.rank == 0
        others = self.client.ask(w.Ask(self.job), w.Held, timeout_s=10.0).peers if last else ()
        self.client.ask(w.Bye(self.job, os.getpid(), finished), timeout_s=10.0)
        tell_finished(self.job, self.run, [c for c in others if c.agent != self.card.agent])

    # -- restoring --------------------------------------------------------------------------------

    def survey(self) -> Holdings:
        """Return what the agents of all nodes hold of this job.  Collective.

        Also those of nodes that this job no longer runs on, if they still answer.
        """
        for follower in self._followers:
            follower.restart()
        return Holdings(self.job, *self._asked())

    def survey_again(self, holdings: Holdings) -> None:
        """Survey again, where an agent may have died since, and renew `holdings`.  Collective."""
        holdings.renew(*self._asked())

    def _asked(self) -> tuple[list[w.Held], str]:
        """Return what every agent answers, and the name of this node's agent."""
        mine = None
        self.client.ask_again()
        with suppress(HoldfastError):
            self.hello()
            mine = self.client.ask(w.Ask(self.job), w.Held, timeout_s=self.deadline_s)
        agent = mine.card.agent.encode() if mine is not None else b""
        first = self.group.share(agent).index(agent)  # one rank says it for its node
        helds = tell_all(self.group, self.job, mine if self.group.rank == first else None)
        return helds, mine.card.agent if mine is not None else ""

    def load(
        self,
        holdings: Holdings,
        attempt: str,
        state: State,
        options: RestoreOptions,
        *,
        verify: bool,
    ) -> Manifest:
        """Read a snapshot into the live state; return its manifest.  Collective; see `load_snapshot`."""
        manifest = holdings.find(attempt)
        load_snapshot(
            holdings,
            manifest,
            self.durable.store,
            self.group,
            state,
            options,
            self.survey_again,
            verify=verify,
        )
        self.adopt(manifest, holdings.cards(attempt))
        return manifest

    def adopt(self, manifest: Manifest, cards: tuple[w.Card, ...]) -> None:
        """Tell this node's agent that what was restored is the newest snapshot here, too: it must
        not be given out.  `cards`: those of the agents that hold it, with whom the next restart
        finds it."""
        self._untold = None
        with suppress(HoldfastError):
            decision = Decision({}, encode(manifest), cards)
            self.client.ask(self._commit(manifest.step, manifest.attempt, decision))

    def _commit(self, step: int, attempt: str, decision: Decision) -> w.Commit:
        return w.Commit(self.job, attempt, step, decision.manifest, decision.cards, self.run)

    # -- capture thread ---------------------------------------------------------------------------

    def take(self, job: SaveJob) -> SlotBuffer:
        """Wait for the snapshot before, then return memory: every rank knows that one as the newest
        before the next begins.

        Also until its image is on its way to storage, if that is where it goes.
        """
        for event in (self._free, self._storing.handed_over):
            if not event.wait(self.deadline_s):
                raise Deadline(f"the snapshot before did not end within {self.deadline_s:g} s")
        self._free.clear()
        spare = self._spare if job.durable else None
        return SlotBuffer(self.slots, lambda size: self.lease(job, "share", size), spare)

    def release(self, job: SaveJob) -> None:
        """Let the next snapshot begin."""
        with self._lock:
            self._pending -= not job.released
            job.released = True
        for follower in self._followers:
            follower.twins.go_on(job.number)
        if job.buffer is not None:
            job.buffer = None
            self._free.set()

    def ended(self, job: SaveJob, error: BaseException | None) -> None:
        """Note that the job is over."""
        if job.durable:
            self.durable.let_go(job)
        if job.durable and not job.save.skipped:
            self._last_save = max(self._last_save, (job.number, error is not None))

    def attempt(self, job: SaveJob) -> str:
        return f"{self.run:04d}-{job.number:06d}"

    def lease(self, job: SaveJob, kind: str, size: int) -> w.Lease:
        """Return a lease of memory of the agent; if there is no agent any more, of a new one."""
        message = w.Take(
            self.job, os.getpid(), kind, self.group.rank, self.attempt(job), job.step, size
        )
        if kind == "share":
            self._greet(job)
        try:
            lease: w.Lease = self.client.ask(message, w.Lease)
        except (AgentUnreachable, SegmentLost):
            self._greet(job)
            lease = self.client.ask(message, w.Lease)
        return lease

    def _greet(self, job: SaveJob) -> None:
        """Say hello, for the agent may be another one than before, and tell it the commit that it
        was not told."""
        before = self.card
        self.hello()
        if before != self.card:
            emit("agent.restarted", step=job.step)
        if self._untold is not None and self._untold.run == self.run:
            self.client.ask(self._untold)
        self._untold = None

    def warm(self, job: SaveJob) -> None:
        """Once the agent has made the memory real: have all that snapshots will need, and give it
        back."""
        self._thread.submit(guarded, self._give_back, job, self)

    def _give_back(self, job: SaveJob, _: object) -> None:
        image = job.plan.image if job.plan is not None else None
        size = 0 if image is None or _is_empty(image) else image.total_bytes
        mine = self._filled(job, b"", size, WireError.of(job.error) if job.error else None)
        try:
            decision = self.agree("warmed", job, mine, self._judge_room)
            self._protector.reserve(job, decision)
        finally:
            self._drop(job)
        self.release(job)
        finish(job, self, None)

    @staticmethod
    def _judge_room(_: SaveJob, answers: list[bytes]) -> Decision:
        """Decide, on rank 0, whether every rank could plan its image."""
        filled = [msgspec.msgpack.decode(a, type=Filled) for a in answers]
        errors = {r: f.refusal for r, f in enumerate(filled) if f.refusal}
        return Decision(errors) if errors else decided(filled)

    def beside(self, job: SaveJob, image: Image, aside: Kept) -> Beside | None:
        """Return what makes, in the window, what this rank keeps for its group; None where it
        cannot be."""
        return None if job.follows else self._protector.begin(job)

    def follows(self, job: SaveJob) -> bool:
        if self._feed is None or self.capture.replicas.mode == "verify":
            return False
        return self._feed.follows(job.live, durable=job.durable)

    def moment(self, job: SaveJob) -> Moment:
        assert self._feed is not None
        job.exactness = self._feed.exactness
        return self._feed.moment(job)

    def write(self, job: SaveJob, image: Image | None, filling: Filling) -> None:
        """Have the agent digest the image, then commit together."""
        self._thread.submit(guarded, lambda j, _: self._keep(j, image, filling), job, self)

    # -- memory thread ----------------------------------------------------------------------------

    def _keep(self, job: SaveJob, image: Image | None, filling: Filling) -> None:
        file = None
        try:
            with span("snapshot.digest", step=job.step):
                file = self._digested(job, image, filling)
        except Exception as failed:
            job.error = failed
        try:
            mine = self._filled(
                job,
                written(job, file, self.group.rank),
                file.bytes if file else 0,
                self._refusal(job),
            )
            decision = self.agree("filled", job, mine, self._decide)
            if not decision.directly:
                decision = self._protected(job, decision)
        except BaseException:
            self._drop(job)
            self.release(job)
            raise
        if decision.directly:
            emit("snapshot.failed", step=job.step, error=decision.directly)
            try:
                self.durable.write_and_commit(job, image, filling, self)
            finally:
                self._drop(job)
            return
        try:
            self._tell(self._commit(job.step, self.attempt(job), decision))
        except Exception as failed:  # it counts, whether this agent could be told or not
            if not job.durable:
                raise
            job.error = failed  # the other ranks wait to hear of it
        if job.durable:
            emit("snapshot.committed", step=job.step)
            self._storing.begin(job, file, decision.manifest)
        self.release(job)
        if not job.durable:
            finish(job, self, None)

    def _filled(self, job: SaveJob, given: bytes, size: int, refusal: WireError | None) -> bytes:
        holding = self._protector.holding(job)
        image = job.plan.image if job.plan is not None else None
        memory = image.memory_bytes if image is not None else 0
        return w.encode(
            Filled(given, self.card, holding, size, self._budget, refusal, job.exactness, memory)
        )

    def _tell(self, commit: w.Commit) -> None:
        """Tell the agent here of a commit that others know of, another agent if need be, before it
        gives out memory again."""
        self._untold = commit
        try:
            self.client.ask(commit)
        except AgentUnreachable:
            emit("agent.restarted", step=commit.step)
            self.hello()
            self.client.ask(commit)
        self._untold = None

    def _protected(self, job: SaveJob, decision: Decision) -> Decision:
        """Return the decision, when all ranks have what they keep.  A save does not depend on that:
        else it goes to storage without the agents."""
        try:
            self._protector.protect(job, decision)
        except RankErrors as error:  # the same on every rank
            if not job.durable:
                raise
            job.error = None
            return Decision({}, directly=error.message)
        return decision

    @staticmethod
    def _refusal(job: SaveJob) -> WireError | None:
        """Why this rank's image is not in the agent's memory; None if it is."""
        refusal = job.buffer.refusal if isinstance(job.buffer, SlotBuffer) else None
        return None if refusal is None else WireError.of(refusal)

    def agree(
        self,
        what: str,
        job: SaveJob,
        mine: bytes,
        decide: Callable[[SaveJob, list[bytes]], Decision],
    ) -> Decision:
        """Rank 0's decision from what all ranks say; RankErrors if something failed anywhere."""
        answer = self.group.ask(
            f"{what}/{job.number}",
            mine,
            lambda answers: msgspec.msgpack.encode(decide(job, answers)),
            self.deadline_s,
            f"{what} its part of {job.in_words}",
        )
        decision = msgspec.msgpack.decode(answer, type=Decision)
        if decision.errors:
            text = f"{job.kind(self.name)} of step {job.step}"
            raise rank_errors(text, decision.errors, job.step) from job.error
        return decision

    def _digested(self, job: SaveJob, image: Image | None, filling: Filling) -> FileEntry | None:
        filling.conclude()
        if self._feed is not None:
            self._feed.filled(job, image)
        if image is None or _is_empty(image):
            return None
        if self._refusal(job):
            return None
        assert isinstance(job.buffer, SlotBuffer) and job.buffer.lease is not None
        attempt = self.attempt(job)
        message = w.Ready(
            self.job, job.buffer.lease.name, attempt, image.table_start, image.total_bytes
        )
        digest = self.client.ask(message, str)
        path = f"{attempt}/r{self.group.rank:05d}.safetensors"
        return FileEntry(
            self.group.rank, path, image.total_bytes, image.data_start, image.extras_start,
            image.table_start, digest,
        )  # fmt: skip

    def _decide(self, job: SaveJob, answers: list[bytes]) -> Decision:
        """Decide, on rank 0: the manifest, if every rank has its image."""
        filled = [msgspec.msgpack.decode(a, type=Filled) for a in answers]
        given = [msgspec.msgpack.decode(f.written, type=Written) for f in filled]
        errors = {r: g.error for r, g in enumerate(given) if g.error is not None}
        if errors:
            return Decision(errors)
        job.notes = of_all(f.exactness for f in filled)
        refusals = [f"rank {r}: {f.refusal.text}" for r, f in enumerate(filled) if f.refusal]
        if refusals:
            return Decision({}, directly=refusals[0])
        try:
            manifest = encode(manifest_of(job, self.run, self.attempt(job), given))
        except Exception as error:
            return Decision({0: WireError.of(error)})
        return decided(filled, manifest)

    def _drop(self, job: SaveJob) -> None:
        """Free the memory of a snapshot that failed.  Best effort: an agent that is gone has
        nothing to drop."""
        with suppress(HoldfastError):
            self.client.ask(w.Drop(self.job, self.attempt(job)), timeout_s=10.0)


def _is_empty(image: Image) -> bool:
    return not (image.pieces.total_bytes or image.extras_bytes)


def _at_exit(tier: weakref.ref[MemoryTier], pid: int) -> None:
    """The main thread has ended, perhaps by an error: Python waits for the other threads now, and they
    would wait for ranks that are dead.  A forked child that ends leaves its parent's calls alone."""
    one = tier()
    if one is not None and os.getpid() == pid:
        one.leave_unclosed()
