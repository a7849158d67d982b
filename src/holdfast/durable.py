"""The durable tier: one save from the call to the commit, off the training thread.

```
training thread   call: name, place, encode extras, set buffers aside ──► next step ──► hook waits
capture thread          agree with all ranks ──► copy into the image ──────────────────┘
persist thread                                     digest and write ──► report ──► commit
```
*Agree*: every rank posts the digest of its description and of each extra; rank 0 answers which extras are
common and whether a new plan is needed.  *Commit*: every rank posts its file or its error; rank 0 writes
the manifest only if all have succeeded and its claim on the root still stands.
A failed save leaves no manifest, its files are deleted, and the next save starts afresh.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from holdfast.checkpoint.committing import (
    Claim,
    Keep,
    attempt_of,
    commit,
    discard,
    prune,
    sweep,
)
from holdfast.checkpoint.names import step_prefix
from holdfast.checkpoint.reading import in_threads
from holdfast.codec.digest import ALGORITHM, CHUNK_BYTES, digest_chunks, hexdigest, num_chunks
from holdfast.errors import Deadline, HoldfastError, RankErrors, RuleError, UsageError
from holdfast.events import count, emit, span
from holdfast.format.image import ALIGN, Image, plan_image
from holdfast.format.manifest import VERSION, FileEntry, Manifest
from holdfast.group import Group
from holdfast.layout import Mesh, Placement
from holdfast.state.agreed import Agreement, describe, merge
from holdfast.state.live import INLINE_BYTES, Live
from holdfast.state.protocol import Outcome, Ready, Verdict, Written, merge_extras, sort_extras
from holdfast.state.replicas import check_replicas, replica_digests
from holdfast.state.snapshot import (
    MAX_RETAKES,
    Copies,
    Filling,
    Gate,
    Memory,
    Moment,
    Refilled,
    Window,
    copy_steadily,
    fingerprint,
    set_aside,
    touch,
)
from holdfast.store import Store, Writer
from holdfast.version import __version__

WRITE_BYTES = 8 << 20
WRITE_THREADS = 4


class Save:
    """A save under way.  `wait` raises what went wrong; `skipped` tells that another was in flight."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.skipped = False
        self.told = False
        """Whether the caller of `wait` has been given the failure."""
        self._future: Future[bool] = Future()

    def done(self) -> bool:
        """Whether it is committed, failed or skipped."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        """Block until the step is committed.  Raises the failure, or Deadline after `timeout` s."""
        try:
            self._future.result(timeout)
        except (FutureTimeout, TimeoutError):
            if self._future.done():
                self.told = True
                raise
            raise Deadline(
                f"the save of step {self.step} is not done after {timeout:g} s", step=self.step
            ) from None
        except BaseException:
            self.told = True
            raise

    @property
    def error(self) -> BaseException | None:
        """The failure of a save that is done; None if it succeeded or is still under way."""
        return self._future.exception() if self._future.done() else None


@dataclass
class _Plan:
    """An agreement and what follows from it for this rank."""

    agreement: Agreement
    digest: str
    placement: Placement
    image: Image | None = None
    copies: Copies | None = None
    fingerprint: Any = None
    description: bytes = b""


@dataclass
class _Job:
    """One save on this rank."""

    number: int
    step: int
    save: Save
    window: Window | None
    moment: Moment
    busy: bool
    description: bytes = b""
    holds_image: bool = False
    error: BaseException | None = None
    plan: _Plan | None = None
    replaced: str | None = None
    """On rank 0: the attempt that the step had before."""
    verdict: Verdict | None = None
    started: float = field(default_factory=time.perf_counter)

    @property
    def live(self) -> Live:
        return self.moment.live

    def close_window(self) -> None:
        """The next optimizer step may go ahead."""
        if self.window is not None:
            self.window.done()


class Durable:
    """Saves to a store.  Every method is collective: all ranks call it in the same order."""

    def __init__(
        self,
        store: Store,
        group: Group,
        *,
        claim: Claim | None,
        run: int,
        attempt: str | None = None,
        keep: Keep | None = None,
        mesh: Mesh | None = None,
        deadline_s: float = 600.0,
        replicas: Literal["trust", "verify"] = "trust",
    ) -> None:
        self.store = store
        self.replicas = replicas
        self.group = group
        self.claim = claim
        self.run = run
        self.attempt = attempt
        self.keep = keep or Keep()
        self.mesh = mesh
        self.deadline_s = deadline_s
        self._number = 0
        self._gate = Gate()
        self._lock = threading.Lock()
        self._committing = threading.Lock()
        self._pending: list[int] = []
        """Steps of saves that have begun and not ended, on this rank."""
        self._memory = Memory()
        self._aside: dict[str, torch.Tensor] = {}
        self._plan: _Plan | None = None
        self._proposed: list[str] = []
        self._kinds: list[str] | None = None
        """On rank 0: the digests of the descriptions that the plan was made from, by rank."""
        self._free = threading.Event()
        self._free.set()
        self._capture = ThreadPoolExecutor(1, "holdfast-capture")
        self._persist = ThreadPoolExecutor(1, "holdfast-persist")
        self._tidying = ThreadPoolExecutor(1, "holdfast-tidy")

    # -- training thread --------------------------------------------------------------------------

    def begin(self, describe_live: Callable[[], Live], step: int, *, must: bool) -> Save:
        """Start a save of the live state.  `must`: wait for the one in flight, do not skip.

        Blocks for what the next forward pass may change; the rest is copied until the next
        optimizer step.
        """
        step_prefix(step)
        window = Window(step)
        with self._lock:
            busy = not must and bool(self._pending)
            self._pending.append(step)
        job = self._new_job(describe_live, step, window, busy=busy)
        self._gate.window = window
        self._capture.submit(self._guarded, self._do_capture, job)
        return job.save

    def prepare(self, describe_live: Callable[[], Live]) -> None:
        """Plan a save and have the memory for it ready.  Returns at once."""
        job = self._new_job(describe_live, 0, None, busy=False)
        self._capture.submit(self._guarded, self._do_capture, job)

    def _new_job(
        self, describe_live: Callable[[], Live], step: int, window: Window | None, *, busy: bool
    ) -> _Job:
        """A job; what goes wrong here is its error, so that the other ranks learn of it."""
        self._number += 1
        job = _Job(self._number, step, Save(step), window, Moment.of(Live()), busy)
        try:
            live = describe_live()
            if not busy:
                self._settle()
                set_aside(live, self._aside)
            job.moment = Moment.of(live)
        except Exception as error:
            job.error = error
        return job

    def _settle(self) -> None:
        """Wait for earlier captures: what was set aside for them must have gone into the image."""
        self._capture.submit(lambda: None).result()

    def close(self, timeout: float | None = None) -> None:
        """Wait for what is under way, for `deadline_s` unless told otherwise; Deadline after that."""
        limit = self.deadline_s if timeout is None else timeout
        try:
            self.settle(limit)
            self._memory.close()
        finally:
            self._gate.close()
            for pool in self._pools:
                pool.shutdown(wait=False)

    @property
    def _pools(self) -> tuple[ThreadPoolExecutor, ...]:
        return self._capture, self._persist, self._tidying

    def settle(self, limit_s: float) -> None:
        """Wait until nothing is under way; Deadline if that takes longer."""
        until = time.monotonic() + limit_s
        for pool in self._pools:
            try:
                pool.submit(lambda: None).result(max(until - time.monotonic(), 0.1))
            except (FutureTimeout, TimeoutError):
                raise Deadline(
                    f"a save was still under way after {limit_s:g} s",
                    hint="the storage may hang; the step is committed only if `holdfast ls` shows it",
                ) from None

    def adopt(self, claim: Claim) -> None:
        """Go on as another run: what is saved from now on is newer than all that was."""
        self.claim, self.run = claim, claim.run

    # -- capture thread ---------------------------------------------------------------------------

    def _guarded(self, work: Any, job: _Job) -> None:
        try:
            work(job)
        except BaseException as error:
            job.close_window()
            self._release(job)
            if not job.save.done():
                self._finish(job, error)

    def _release(self, job: _Job) -> None:
        """The image may be filled again."""
        if job.holds_image:
            job.holds_image = False
            self._free.set()

    def _end(self, job: _Job) -> None:
        with self._lock:
            if job.window is not None and job.step in self._pending:
                self._pending.remove(job.step)

    def _finish(self, job: _Job, error: BaseException | None) -> None:
        self._end(job)
        if error is None:
            took = time.perf_counter() - job.started
            emit("save.committed", step=job.step, seconds=round(took, 3))
            job.save._future.set_result(True)
        else:
            if isinstance(error, HoldfastError) and error.step is None:
                error.step = job.step
            what = "save.failed" if job.window is not None else "prepare.failed"
            emit(what, step=job.step, error=str(error))
            job.save._future.set_exception(error)

    def _do_capture(self, job: _Job) -> None:
        self._ready(job)
        verdict = self._agree(job)
        if verdict.errors:
            raise self._alike(f"save of step {job.step}", verdict.errors, job)
        if not verdict.go:
            self._skip(job)
            return
        job.verdict = verdict
        if verdict.describe:
            self._make_plan(job, verdict.describe)
        if job.window is None:
            self._persist.submit(self._guarded, self._touch, job)
            return
        self._check_replicas(job)
        job.plan = self._plan
        filling = Filling()
        image = self._try(lambda: self._lay_out(job), filling)
        self._persist.submit(self._guarded, self._persister(image, filling), job)
        if image is not None:
            self._fill(job, image, filling)
        job.close_window()

    def _ready(self, job: _Job) -> None:
        """Describe the state and take the image; an error is kept for the others to learn of."""
        try:
            job.description = describe(job.live)
            if not job.busy:
                self._take(job)
        except Exception as error:
            job.error = job.error or error

    def _alike(self, what: str, errors: dict[int, str], job: _Job) -> BaseException:
        """The error of a failed save on this rank: its own if it is alone, else all ranks'."""
        if self.group.size == 1 and job.error is not None:
            return job.error
        together = RankErrors(what, errors, step=job.step)
        together.__cause__ = job.error
        return together

    @staticmethod
    def _try(work: Callable[[], Image], filling: Filling) -> Image | None:
        try:
            return work()
        except Exception as error:
            filling.fail(error)
            return None

    def _touch(self, job: _Job) -> None:
        """Make memory for the image real, so that the first save does not have to."""
        self._lay_out(job)
        touch(self._memory.view)
        self._release(job)

    def _check_replicas(self, job: _Job) -> None:
        """If asked to: LayoutError on every rank if some replicas differ."""
        if self.replicas == "trust" or self.group.size == 1:
            return
        assert self._plan is not None
        placement = self._plan.placement
        mine = replica_digests(job.live, self._aside, placement, self.group.rank)
        names = placement.table.names
        self.group.ask(
            f"replicas/{job.number}", mine, lambda a: check_replicas(a, names), self.deadline_s
        )

    def _fill(self, job: _Job, image: Image, filling: Filling) -> None:
        """Copy the live tensors into the image; a failure is the writer's to report."""
        try:
            assert self._plan is not None and self._plan.copies is not None
            retakes = MAX_RETAKES if self.group.size == 1 else 0
            copy_steadily(self._plan.copies, job.moment, filling, step=job.step, retakes=retakes)
            filling.advance(image.table_start)
            filling.complete()
        except BaseException as error:
            filling.fail(error)

    def _take(self, job: _Job) -> None:
        """Wait for the image: the save before may still be writing it."""
        if not self._free.is_set():
            emit("save.queued", step=job.step)
        if not self._free.wait(self.deadline_s):
            raise Deadline(f"the save before did not end within {self.deadline_s:g} s")
        self._free.clear()
        job.holds_image = True

    def _skip(self, job: _Job) -> None:
        self._release(job)
        job.close_window()
        self._end(job)
        job.save.skipped = True
        emit("save.skipped", step=job.step)
        job.save._future.set_result(False)

    def _agree(self, job: _Job) -> Verdict:
        extras = {
            k: (
                hexdigest(msgspec.json.encode([v, job.live.contents.get(k, [])])),
                job.live.rules.get(k, ""),
            )
            for k, v in job.live.extras.items()
        }
        held = self._plan.digest if self._plan else ""
        error = None if job.error is None else _text(job.error)
        ready = Ready(job.step, job.busy, hexdigest(job.description), held, extras, error)
        answer = self.group.ask(
            f"agree/{job.number}", msgspec.msgpack.encode(ready), self._judge, self.deadline_s
        )
        return msgspec.msgpack.decode(answer, type=Verdict)

    def _judge(self, answers: list[bytes]) -> bytes:
        """Rank 0: may this save go on, and how?"""
        ready = [msgspec.msgpack.decode(a, type=Ready) for a in answers]
        for rank, r in enumerate(ready):
            if r.step != ready[0].step:
                raise UsageError(f"rank {rank} saves step {r.step}, rank 0 step {ready[0].step}")
        errors = {rank: r.error for rank, r in enumerate(ready) if r.error is not None}
        if errors:
            return msgspec.msgpack.encode(Verdict(False, [], {}, {}, errors))
        if any(r.busy for r in ready):
            return msgspec.msgpack.encode(Verdict(False, [], {}, {}))
        kinds = [r.description for r in ready]
        describing: list[int] = []
        held = {r.agreement for r in ready}
        if kinds != self._kinds or len(held) != 1 or "" in held:
            describing = [kinds.index(k) for k in dict.fromkeys(kinds)]
            self._kinds, self._proposed = None, kinds  # the plan holds when all ranks have it
        per_rank, send = sort_extras(ready)
        return msgspec.msgpack.encode(Verdict(True, describing, per_rank, send))

    def _make_plan(self, job: _Job, describing: list[int]) -> None:
        mine = job.description if self.group.rank in describing else b""
        data = self.group.ask(
            f"plan/{job.number}",
            mine,
            lambda answers: self._merge([answers[rank] for rank in describing], describing),
            self.deadline_s,
        )
        agreement = msgspec.msgpack.decode(data, type=Agreement)
        self._plan = new_plan(agreement, hexdigest(data), self.run)
        self._plan.description = job.description

    def _merge(self, docs: list[bytes], describing: list[int]) -> bytes:
        kinds = self._proposed
        order = {kinds[rank]: i for i, rank in enumerate(describing)}
        agreement = merge(docs, [order[k] for k in kinds], self.mesh)
        self._kinds = kinds
        return msgspec.msgpack.encode(agreement)

    def _lay_out(self, job: _Job) -> Image:
        """The image for this save: the last one, if nothing that it depends on has changed."""
        plan, verdict = self._plan, job.verdict
        assert plan is not None and verdict is not None
        if plan.description != job.description:
            raise HoldfastError("the state differs from what the ranks have planned together")
        own = {k: v for k, v in job.live.extras.items() if k in verdict.per_rank}
        for key in own.keys() & job.live.contents.keys():
            raise RuleError(
                f"{key!r} differs between ranks and holds tensors of more than {INLINE_BYTES} bytes",
                hint="declare a rule for it (on_resize), or save such tensors under names per rank",
            )
        kept = plan.image is not None and plan.image.extras_bytes > 0
        data = msgspec.json.encode(own) if own or kept else b""
        image = plan.image
        if image is None or len(data) > image.extras_bytes:
            room = -(-len(data) * 5 // 4 // ALIGN) * ALIGN if data else 0
            pieces = plan.placement.pieces(self.group.rank)
            image = plan.image = plan_image(plan.agreement.tensors, pieces, extras_bytes=room)
            plan.copies = None
        old = len(self._memory.view)
        memory = self._memory.reserve(-(-image.total_bytes // ALIGN) * ALIGN)
        if len(memory) != old:
            self._memory.pin(job.live)
            plan.copies = None
        mark = fingerprint(job.live)
        if plan.copies is None or mark != plan.fingerprint:
            plan.copies = Copies.plan(image, plan.agreement.tensors, job.live, self._aside, memory)
            plan.fingerprint = mark
        memory[image.extras_start : image.table_start] = data.ljust(image.extras_bytes)
        return image

    # -- persist thread ---------------------------------------------------------------------------

    def _persister(self, image: Image | None, filling: Filling) -> Callable[[_Job], None]:
        return lambda job: self._write_and_commit(job, image, filling)

    def _write_and_commit(self, job: _Job, image: Image | None, filling: Filling) -> None:
        assert job.verdict is not None and job.plan is not None
        file = None
        attempt = self.attempt or f"{self.run:04d}-{job.number:06d}"
        try:
            with span("persist", step=job.step, bytes=image.total_bytes if image else 0):
                file = self._write(job, image, filling, attempt)
        except Exception as failed:
            job.error = failed
        mine = self.group.rank
        extras = {k: job.live.extras[k] for k, ranks in job.verdict.send.items() if mine in ranks}
        written = Written(None if job.error is None else _text(job.error), file, extras)
        try:
            answer = self.group.ask(
                f"commit/{job.number}",
                msgspec.msgpack.encode(written),
                lambda answers: self._decide(job, attempt, answers),
                self.deadline_s,
            )
        finally:
            self._release(job)
        outcome = msgspec.msgpack.decode(answer, type=Outcome)
        if outcome.errors:
            self._discard(job.step, attempt)
            raise RankErrors(
                f"save of step {job.step}", outcome.errors, step=job.step
            ) from job.error
        self._finish(job, None)
        if mine == 0:
            self._tidying.submit(self._tidy, job)

    def _write(
        self, job: _Job, image: Image | None, filling: Filling, attempt: str
    ) -> FileEntry | None:
        """Digest and write the image while it is being filled; None if this rank has nothing."""
        if image is None or not (image.pieces.total_bytes or image.extras_bytes):
            filling.conclude()
            return None
        path = f"{attempt}/r{self.group.rank:05d}.safetensors"
        while True:
            writer = self.store.create(step_prefix(job.step) + path, image.total_bytes)
            try:
                table = self._stream(writer, image, filling, filling.turn)
                writer.finish()
                break
            except Refilled:
                writer.abort()
            except BaseException:
                writer.abort()
                raise
        count("written.bytes", image.total_bytes)
        return FileEntry(
            self.group.rank,
            path,
            image.total_bytes,
            image.data_start,
            image.extras_start,
            image.table_start,
            hexdigest(table),
        )

    def _stream(self, writer: Writer, image: Image, filling: Filling, turn: int) -> bytes:
        """Write every block as soon as it is filled, the digest table last; returns the table."""
        memory = self._memory.view
        table = np.empty(num_chunks(image.table_start), "<u8")
        last = image.table_start // WRITE_BYTES * WRITE_BYTES

        def one(start: int) -> None:
            stop = min(start + WRITE_BYTES, image.table_start)
            filling.wait(stop, turn)
            view = memory[start:stop]
            first = start // CHUNK_BYTES
            digest_chunks(view, table[first : first + num_chunks(len(view))])
            if start < last:
                writer.write(start, view)

        in_threads(one, list(range(0, image.table_start, WRITE_BYTES)), WRITE_THREADS)
        filling.settle(turn)
        memory[image.table_start : image.total_bytes] = table.tobytes()
        writer.write(last, memory[last : image.total_bytes])
        return table.tobytes()

    def _decide(self, job: _Job, attempt: str, answers: list[bytes]) -> bytes:
        """Rank 0: commit if every rank has written."""
        written = [msgspec.msgpack.decode(a, type=Written) for a in answers]
        errors = {r: w.error for r, w in enumerate(written) if w.error is not None}
        if not errors:
            try:
                manifest = self._manifest(job, attempt, written)
                with self._committing:
                    job.replaced = attempt_of(self.store, job.step)
                    commit(self.store, manifest, self.claim)
            except Exception as error:
                errors = {0: f"commit: {_text(error)}"}
        return msgspec.msgpack.encode(Outcome(errors))

    def _manifest(self, job: _Job, attempt: str, written: list[Written]) -> Manifest:
        assert job.plan is not None and job.verdict is not None
        plan = job.plan.agreement
        extras = {k: v for k, v in job.live.extras.items() if k not in job.verdict.per_rank}
        for key, ranks in job.verdict.send.items():
            versions_ = [extras[key]] if key in extras else []
            versions_ += [written[r].extras[key] for r in ranks if r != 0]
            extras[key] = merge_extras(key, versions_)
        return Manifest(
            holdfast=VERSION,
            step=job.step,
            run=self.run,
            attempt=attempt,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            software={"holdfast": __version__, "torch": str(torch.__version__)},
            mesh=plan.mesh,
            chunk_bytes=CHUNK_BYTES,
            algorithm=ALGORITHM,
            shardings=plan.shardings,
            tensors=plan.tensors,
            aliases=plan.aliases,
            files=tuple(w.file for w in written if w.file is not None),
            extras=extras,
            per_rank=job.verdict.per_rank,  # type: ignore[arg-type]
        )

    def _discard(self, step: int, attempt: str) -> None:
        """Best effort: what stays behind is swept after the next save that succeeds."""
        try:
            if self.group.rank == 0:
                discard(self.store, step, attempt)
        except HoldfastError as error:
            emit("discard.failed", step=step, error=str(error))

    def _tidy(self, job: _Job) -> None:
        """After a commit: what it replaced, what `keep` lets go, what crashes left behind."""
        try:
            with span("tidy", step=job.step):
                if job.replaced is not None:
                    discard(self.store, job.step, job.replaced)
                prune(self.store, self.keep, spare=tuple(self._pending), lock=self._committing)
                if self.claim is not None:
                    sweep(self.store, self.claim, job.number)
        except Exception as error:
            emit("tidy.failed", error=str(error))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def new_plan(agreement: Agreement, digest: str, run: int) -> _Plan:
    """The closed form of where everything goes, from an agreement."""
    shell = Manifest(
        VERSION, 0, run, "", "", {}, agreement.mesh, CHUNK_BYTES, ALGORITHM,
        agreement.shardings, agreement.tensors, agreement.aliases, (), {}, {},
    )  # fmt: skip
    return _Plan(agreement, digest, shell.placement)
