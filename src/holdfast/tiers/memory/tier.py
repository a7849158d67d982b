"""The memory tier in a training process: it takes snapshots into the agent's shared memory."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress

import msgspec

from holdfast.base.errors import Deadline, HoldfastError, RankErrors, need
from holdfast.base.events import emit, span
from holdfast.base.storage_deadlines import slowest
from holdfast.base.threads import Worker
from holdfast.base.wire import WireError, decode_msgpack, rank_errors
from holdfast.core.checkpoint.names import step_prefix
from holdfast.core.format.manifest import FileEntry, Manifest, encode_manifest
from holdfast.live.every import Every
from holdfast.live.saving import Draft, Request, Save, SaveOperation, Saver
from holdfast.live.saving.blocking_saves import is_bypassed
from holdfast.live.saving.commit import build_manifest, written
from holdfast.live.saving.durable import Durable
from holdfast.live.saving.messages import Written
from holdfast.live.saving.operation import Replica
from holdfast.live.saving.progress import TierProgress
from holdfast.live.state.recognising import State
from holdfast.live.state.snapshot import CopyTap, PrivateBuffer
from holdfast.live.tier import Asked, Collect, Tier
from holdfast.tiers.memory.decision import Decision, Filled, decided, exactness_note
from holdfast.tiers.memory.feed import Feed
from holdfast.tiers.memory.node import messages as w
from holdfast.tiers.memory.options import Memory
from holdfast.tiers.memory.own_agent import OwnAgent
from holdfast.tiers.memory.protecting import Protector
from holdfast.tiers.memory.recompute import RecomputedStates, recomputed_states
from holdfast.tiers.memory.shelf import MEMORY, SnapshotShelf
from holdfast.tiers.memory.slots import SlotBuffer, Slots, lease_of
from holdfast.tiers.memory.storing import Storing

LEAVE_S = 5.0
"""Seconds for which a process that ends early waits until its snapshot is complete, or its save
has reached the agents."""
LOOK_S = 0.2
"""Seconds between looks whether ranks were lost, in that time."""


class Turns:
    """The order of snapshots: one at a time fills memory."""

    def __init__(self) -> None:
        self.num_pending = 0
        """Number of snapshots that have begun and not given their turn back."""
        self._lock = threading.Lock()
        self._is_free = threading.Event()
        self._is_free.set()

    def line_up(self) -> None:
        with self._lock:
            self.num_pending += 1

    def take(self, limit_s: float, handed_over: threading.Event) -> None:
        """Wait until the previous snapshot has ended, and is `handed_over` if it goes to storage: until
        then it must stay the newest.  Deadline after `limit_s` for both."""
        until = time.monotonic() + limit_s
        for event in (self._is_free, handed_over):
            if not event.wait(max(until - time.monotonic(), 0.0)):
                raise Deadline(f"the previous snapshot did not end within {limit_s:g} s")
        self._is_free.clear()

    def give_back(self, op: SaveOperation) -> None:
        with self._lock:
            self.num_pending -= 1
        if op.has_memory:
            self._is_free.set()


class MemoryTier(Tier):
    """Snapshots into shared memory.  Every method is collective: all ranks call it in the same order."""

    name = MEMORY
    kind = "snapshot"
    carries = True

    def __init__(
        self,
        saver: Saver,
        durable: Durable,
        options: Memory,
        *,
        job: str,
        host: str,
        state: Callable[[], State],
    ) -> None:
        recomputed = recomputed_states(state()) if options.recomputes else None
        self.saver = saver
        self.durable = durable
        self.news: list[str] = []
        """Warnings for the user."""
        self._feed = None
        if options.feed == "gradient":
            self._feed = Feed(state, saver.group.rank, saver.deadline_s, options.prove_every)
        self.worker = Worker("holdfast-memory")
        self._spare = PrivateBuffer()
        """Memory of this process, for a save when the agent has none to give."""
        self.progress: TierProgress = TierProgress()
        self._turns = Turns()
        self._is_closed = False
        self._last_save = 0, False
        """Number of the newest durable save that is over, and whether it failed."""
        self._storing = Storing(self)
        self.agent = OwnAgent(durable, options, self.news, job=job, host=host)
        self.slots = Slots(self.agent.client.root / "jobs" / job, saver.planner.forget)
        self._protector = Protector(self, options.redundancy, recomputed)
        _tiers.add(self)

    @property
    def _followers(self) -> list[RecomputedStates | Feed]:
        return [one for one in (self._protector.recomputed, self._feed) if one is not None]

    # -- training thread --------------------------------------------------------------------------

    def due(self, step: int, every: Every) -> bool:
        return every.memory is not None and step % every.memory == 0

    def begin(self, collect: Collect, step: int, *, must: bool) -> Save:
        """Start a snapshot.  Unless it `must` be made, it is left out if another one is in flight."""
        with span("snapshot.call", step=step):
            return self._begin(collect, Asked(step, must=must), durable=False)

    def carry(self, collect: Collect, asked: Asked) -> Save:
        """Start a snapshot that goes on to storage."""
        return self._begin(collect, asked, durable=True)

    def _begin(self, collect: Collect, asked: Asked, *, durable: bool) -> Save:
        step = asked.step
        step_prefix(step)
        is_waiting = self._turns.num_pending > 0 or not self._storing.handed_over.is_set()
        busy = not asked.must and (self.durable.steps.is_saving if durable else is_waiting)
        request = Request(step, busy=busy, durable=durable, attached=asked.attached)
        op = self.saver.operation(self, request, companion=self, on_end=self._ended)
        self._turns.line_up()
        if durable:
            self.durable.steps.watch_over(op)
        if durable and self._feed is not None:
            self._feed.proof.count_durable(must_prove=asked.live)
        with self.durable.held.by(op.kind, step):
            save = self.saver.begin(op, self._arranged(collect))
        (self.progress.watch_through if durable else self.progress.watch)(save)
        return save

    def mark(self, op: SaveOperation) -> None:
        """Mark this point of the training for those that follow it."""
        for follower in self._followers:
            follower.mark(op.number)

    def _arranged(self, collect: Collect) -> Collect:
        """Return what reads the state in the order in which it is to be shared among ranks."""
        feed = self._feed
        return collect if feed is None else lambda: feed.arranged(collect())

    def prepare(self, collect: Collect, every: Every) -> Save:
        """Begin to plan a snapshot and to get memory for it.  Returns at once."""
        op = self.saver.operation(self, Request(0, is_rehearsal=True))
        self._turns.line_up()
        return self.saver.begin(op, self._arranged(collect))

    def replica(self, op: SaveOperation) -> Replica | None:
        """Return the replica that gradients keep current; None if a snapshot cannot be taken from it, as it
        may have missed steps."""
        if self._feed is None or self.saver.verifies:
            return None
        if is_bypassed(self.saver, op.live):
            return None
        follows = self._feed.follows(op.live, durable=op.request.durable)
        return self._feed if follows else None

    def settle(self, limit_s: float) -> None:
        """Wait until nothing is under way; Deadline if that takes longer."""
        until = time.monotonic() + limit_s
        try:
            self.saver.settle(limit_s)
            for worker in (self.worker, self._storing.worker):
                worker.settle(max(until - time.monotonic(), 0.1))
        except TimeoutError:
            awaited = self.saver.group.awaited
            raise Deadline(
                f"a snapshot was still under way after {limit_s:.3g} s"
                + (f": {awaited}" * bool(awaited)),
                hint=slowest(),
            ) from None

    def leave(self) -> None:
        """End early: wait at most `LEAVE_S`, then abort every wait.  Agents finish what they were told."""
        if not self.saver.group.lost:
            self._settle_early()
        self._abort_waits()

    def leave_unclosed(self) -> None:
        """Do as `leave` does, for a tier that is not closed when Python ends.  But if nothing is under
        way any more, abort no wait: the ranks may still tell each other what became of the last save."""
        if not self._settle_early():
            self._abort_waits()

    def _settle_early(self) -> bool:
        """Wait for `LEAVE_S` at most, or until ranks are lost; True if nothing is under way then."""
        if self._is_closed or not (self.durable.steps.is_saving or self._turns.num_pending):
            return True
        until = time.monotonic() + LEAVE_S
        while not self.saver.group.lost and time.monotonic() < until:
            with suppress(Deadline):
                self.settle(min(LOOK_S, LEAVE_S))
                return True
        return False

    def _abort_waits(self) -> None:
        self.agent.client.abort_waits()
        self.saver.group.abort_waits()

    def close(self, limit_s: float, *, finished: bool, is_asked: bool) -> None:
        """Wait for what is under way.  `finished`: the snapshots may be freed, if the last save is in
        storage."""
        self._is_closed, is_settled = True, False
        with ExitStack() as last:  # each of these is done, even if another is interrupted
            last.callback(lambda: self._say_bye(finished=finished and is_settled))
            last.callback(self._spare.close)
            last.callback(self.slots.close)
            for follower in self._followers:
                last.callback(follower.twins.close, LEAVE_S)
            last.callback(self._storing.worker.shutdown)
            last.callback(self.worker.shutdown)
            try:
                self.settle(limit_s)
                is_settled = True
            except BaseException:  # the agents finish; ranks have `LEAVE_S` to agree on that
                self._abort_waits()
                with suppress(Deadline):
                    self.settle(LEAVE_S)
                raise

    def _say_bye(self, *, finished: bool) -> None:
        if finished and self._last_save[1]:
            finished = False
            self.news.append(
                "the last save failed: what is in memory stays there for a day (the next start "
                "restores and saves it, `holdfast agent clean` frees it)"
            )
        with suppress(HoldfastError):
            self.agent.say_bye(finished=finished and not self._storing.left_to_agents)

    # -- restoring --------------------------------------------------------------------------------

    def there(self) -> str:
        steps = [c.step for c in self.shelf().candidates]
        return f"step {max(steps)} in host memory" if steps else ""

    def shelf(self) -> SnapshotShelf:
        """Return what the agents of all nodes hold of this job.  Collective."""
        for follower in self._followers:
            follower.restart()
        return SnapshotShelf(self)

    def take_over(self, manifest: Manifest, cards: tuple[w.Card, ...]) -> None:
        """Tell this node's agent that the restored snapshot is the newest here, too.  `cards`: those of the
        agents that hold it; by them the next restart finds it."""
        decision = Decision({}, encode_manifest(manifest), cards)
        self.agent.adopt(self._commit_of(manifest.step, manifest.attempt, decision))

    def announce(self, run: int) -> None:
        self.agent.hello()

    def _commit_of(self, step: int, attempt: str, decision: Decision) -> w.Commit:
        run = self.durable.run
        return w.Commit(self.agent.job, attempt, step, decision.manifest, decision.cards, run)

    # -- saving thread ----------------------------------------------------------------------------

    def take(self, op: SaveOperation) -> SlotBuffer:
        """Wait for the previous snapshot, then return memory for this one.

        So every rank knows the previous one as the newest before this one begins.  If its image goes to
        storage, this waits until it is on its way there.
        """
        with self.durable.held.because(op.step, "for the previous snapshot"):
            self._turns.take(self.saver.deadline_s, self._storing.handed_over)
        if op.request.durable:
            self.durable.steps.make_room(op)
        spare = self._spare if op.request.durable else None
        return SlotBuffer(self.slots, lambda size: self.lease(op, "share", size), spare)

    def lease(self, op: SaveOperation, kind: str, size: int) -> w.Lease:
        """Lease memory of the agent for an image (`share`) or a guard (`guard`)."""
        with self.durable.held.because(op.step, "for memory of the agent"):
            return self.agent.lease(kind, self.attempt(op), op.step, size)

    def attempt(self, op: SaveOperation) -> str:
        return self.durable.attempt_of(op)

    def beside(self, op: SaveOperation, draft: Draft) -> CopyTap | None:
        """Return what makes this rank's guard in the window; None if it cannot be made there."""
        return self._protector.begin(op, draft)

    # -- memory thread ----------------------------------------------------------------------------

    def keep(self, op: SaveOperation, draft: Draft) -> None:
        """Have the agent digest the image, then commit together with all ranks.

        A rehearsal allocates all the memory that snapshots will need, and gives it back.
        """
        if op.request.is_rehearsal:
            self._rehearse(op, draft)
            return
        try:
            file, decision = self._kept(op, draft)
        except BaseException:
            self.agent.drop(self.attempt(op))
            op.release()
            raise
        if decision.directly:
            self._store_directly(op, draft, decision.directly)
            return
        self._commit(op, decision)
        if op.request.durable:
            self.progress.keep(op.step, op.took_s, op.save.image_bytes)
            emit("snapshot.committed", step=op.step, seconds=round(op.took_s, 3))
            self._storing.begin(op, file, decision.manifest)
        op.release()
        if not op.request.durable:
            op.end()

    def _rehearse(self, op: SaveOperation, draft: Draft) -> None:
        size = draft.image.total_bytes if draft.image is not None else 0
        refusal = None if op.error is None else WireError.of(op.error)
        try:
            mine = self._filled(draft, b"", size, refusal)
            decision = self.agree("warmed", op, mine, self._judge_room)
            self._protector.reserve(op, draft, decision)
        finally:
            self.agent.drop(self.attempt(op))
        op.release()
        op.end()

    @staticmethod
    def _judge_room(answers: list[bytes]) -> Decision:
        """Decide, on rank 0, whether every rank could plan its image."""
        filled = [decode_msgpack(a, Filled) for a in answers]
        errors = {r: f.refusal for r, f in enumerate(filled) if f.refusal}
        return Decision(errors) if errors else decided(filled)

    def _kept(self, op: SaveOperation, draft: Draft) -> tuple[FileEntry | None, Decision]:
        """Return the entry of this rank's digested image, and the decision about the snapshot."""
        file = None
        try:
            with span("snapshot.digest", step=op.step):
                file = self._digested(op, draft)
        except Exception as failed:
            op.error = failed
        size, given = file.bytes if file else 0, written(op, draft, file)
        mine = self._filled(draft, given, size, _refusal(draft))
        decision = self.agree("filled", op, mine, lambda a: self._decide(op, draft, a))
        if not decision.directly:
            decision = self._protected(op, draft, decision)
        return file, decision

    def _digested(self, op: SaveOperation, draft: Draft) -> FileEntry | None:
        """Return the entry of the image in the agent's memory; None if there is none."""
        draft.filling.conclude()
        if self._feed is not None:
            self._feed.filled(op, draft)
        image, lease = draft.image, lease_of(draft.buffer)
        if image is None or lease is None:
            return None
        attempt, rank = self.attempt(op), self.saver.group.rank
        message = w.Ready(self.agent.job, lease.name, attempt, image.table_start, image.total_bytes)
        digest = self.agent.client.ask(message, str)
        return FileEntry(
            rank, f"{attempt}/r{rank:05d}.safetensors", image.total_bytes, image.data_start,
            image.extras_start, image.table_start, digest,
        )  # fmt: skip

    def _filled(self, draft: Draft, given: bytes, size: int, refusal: WireError | None) -> bytes:
        holding = self._protector.holding(draft)
        memory = draft.plan.image.memory_bytes if draft.plan.image is not None else 0
        agent = self.agent
        return w.encode(
            Filled(
                given,
                _with_secrets(agent.card, self.saver.group.hide),
                holding,
                size,
                agent.budget_bytes,
                refusal,
                draft.exactness,
                memory,
            )
        )

    def agree(
        self,
        what: str,
        op: SaveOperation,
        mine: bytes,
        decide: Callable[[list[bytes]], Decision],
    ) -> Decision:
        """Return rank 0's decision on the messages of all ranks, of which `mine` is this rank's; RankErrors
        if it names errors."""
        answer = self.saver.group.ask(
            f"{what}/{op.number}",
            mine,
            lambda answers: msgspec.msgpack.encode(decide(answers)),
            self.saver.deadline_s,
            f"{what} its part of {op.in_words}",
        )
        decision = decode_msgpack(answer, Decision)
        if decision.errors:
            text = f"{op.kind} of step {op.step}"
            raise rank_errors(text, decision.errors, op.step) from op.error
        cards = tuple(_with_secrets(card, self.saver.group.reveal) for card in decision.cards)
        return msgspec.structs.replace(decision, cards=cards)

    def _decide(self, op: SaveOperation, draft: Draft, answers: list[bytes]) -> Decision:
        """Decide about a snapshot, on rank 0: its manifest is in the decision if every rank has its
        image."""
        filled = [decode_msgpack(a, Filled) for a in answers]
        given = [decode_msgpack(f.written, Written) for f in filled]
        errors = {r: g.error for r, g in enumerate(given) if g.error is not None}
        if errors:
            return Decision(errors)
        refusals = [f"rank {r}: {f.refusal.text}" for r, f in enumerate(filled) if f.refusal]
        if refusals:
            return Decision({}, directly=refusals[0])
        notes = exactness_note(f.exactness for f in filled)
        try:
            manifest = build_manifest(
                draft,
                given,
                step=op.step,
                run=self.durable.run,
                attempt=self.attempt(op),
                notes=notes,
                attached=op.request.attached,
                line=self.durable.steps.line,
            )
            return decided(filled, encode_manifest(manifest))
        except Exception as error:
            return Decision({0: WireError.of(error)})

    def _protected(self, op: SaveOperation, draft: Draft, decision: Decision) -> Decision:
        """Return the decision once all ranks have their guards.  A durable save does not depend on these:
        without them it goes to storage without the agents."""
        try:
            self._protector.protect(op, draft, decision)
        except RankErrors as error:  # the same on every rank
            if not op.request.durable:
                raise
            op.error = None
            return Decision({}, directly=error.message)
        return decision

    def _store_directly(self, op: SaveOperation, draft: Draft, why: str) -> None:
        """Write the image to storage from this process: the agents cannot, as `why` says."""
        emit("snapshot.failed", step=op.step, error=why)
        self.progress.fail(op.step, why)
        try:
            self.durable.write_and_commit(op, draft)
        finally:
            self.agent.drop(self.attempt(op))

    def _commit(self, op: SaveOperation, decision: Decision) -> None:
        """Tell the agent here that the snapshot is the newest.  It is committed even if the agent cannot be
        told."""
        try:
            self.agent.commit(self._commit_of(op.step, self.attempt(op), decision))
        except Exception as failed:
            if not op.request.durable:
                raise
            op.error = failed  # the other ranks wait to hear of it

    # -- any thread -------------------------------------------------------------------------------

    def release(self, op: SaveOperation) -> None:
        """Let the next snapshot begin."""
        for follower in self._followers:
            follower.twins.go_on(op.number)
        self._turns.give_back(op)

    def _ended(self, op: SaveOperation, error: BaseException | None) -> None:
        """Note that an operation is over."""
        if op.request.durable:
            self.durable.steps.let_go(op, error)
        if op.request.durable and not op.save.skipped:
            self._last_save = max(self._last_save, (op.number, error is not None))


def _with_secrets(card: w.Card, changed: Callable[[str], str]) -> w.Card:
    """Return a card whose token and fingerprint are `changed`: hidden, or revealed."""
    token, fingerprint = changed(card.token), changed(card.fingerprint)
    return msgspec.structs.replace(card, token=token, fingerprint=fingerprint)


def _refusal(draft: Draft) -> WireError | None:
    """Return why this rank's image is not in the agent's memory; None if it is."""
    refusal = draft.buffer.refusal if isinstance(draft.buffer, SlotBuffer) else None
    return None if refusal is None else WireError.of(refusal)


_tiers: weakref.WeakSet[MemoryTier] = weakref.WeakSet()
"""The tiers of this process."""


def _at_exit() -> None:
    """End the tiers that nobody has closed.  The main thread has ended, perhaps by an error: Python waits
    for the other threads now, which would wait for ranks that are dead."""
    for one in tuple(_tiers):
        one.leave_unclosed()


# a forked child that ends must not end its parent's tiers
os.register_at_fork(after_in_child=_tiers.clear)
(_register_atexit,) = need("Python", threading, "_register_atexit")
with suppress(RuntimeError):  # imported when Python is ending already
    _register_atexit(_at_exit)
