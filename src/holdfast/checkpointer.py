"""The one object that a training script holds: `Checkpointer`; and one save or load by itself."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal

import msgspec

from holdfast.addresses import own_address
from holdfast.capture import Capture, Save
from holdfast.checkpoint.claiming import Claim, claim, newest_claim, once_attempt, release
from holdfast.checkpoint.names import Saved, committed
from holdfast.checkpoint.tidying import Keep, sweep
from holdfast.delta.log import Log, tidy_log
from holdfast.delta.options import Delta
from holdfast.delta.replay import Replay, survey
from holdfast.delta.segment import Identity
from holdfast.delta.tier import DeltaTier
from holdfast.durable import Durable
from holdfast.errors import HoldfastError, NotRecoverable, UsageError
from holdfast.events import emit, span
from holdfast.group import Group
from holdfast.interop.detect import detect, split
from holdfast.layout import Mesh
from holdfast.memory.job import job_of
from holdfast.memory.options import Memory
from holdfast.memory.tier import MemoryTier
from holdfast.policy.tuning import Auto
from holdfast.recovery import Candidate, newest_first, newest_good
from holdfast.restoring import load_from, load_snapshot, load_step, open_shared, saved_steps
from holdfast.state.live import Live, State, check_keys, collect
from holdfast.state.putback import RULES
from holdfast.state.restore import alike
from holdfast.state.rng import Rng
from holdfast.state.targets import Options
from holdfast.steering import Every, Steering, fixed_or_tuned
from holdfast.store import LocalStore, Store
from holdfast.store.local import sweep as sweep_unfinished

BEYOND = 0.01
"""The share of node losses that protected snapshots are taken not to survive."""


class HoldfastWarning(UserWarning):
    """A save failed, or a damaged step was passed over; training goes on."""


class Checkpointer:
    """Keeps a training run's state; made once, on every rank, with the same arguments.

    `root` is a path; `state` a dict of modules (or lists of pipeline stages), optimizers, objects with
    `state_dict`/`load_state_dict`, and nested dicts of tensors and plain values.  Plain values are read
    from the dict at each save and put back into it by `restore`.  The random number generators
    are included under the key `rng`, unless the state has one.

    `every`: how often `step` saves; with `Auto`, as often as pays, by what saves are measured to cost.
    `memory`: snapshots in host memory, which survive the training processes.  `delta`: a record of every
    step, from which a restart does the steps after the newest full save again.  `keep`: which steps stay.
    `when_busy`: whether a due save waits for the one in flight (`"queue"`) or is left out (`"skip"`).
    `on_error`: whether a failed save is reported by a warning or raised, at the next call.  `on_resize`:
    by key, what becomes of state that differs between ranks when their number changes (`same`, `rank0`,
    `redistribute`, `fresh`).
    `replicas="verify"` checks before each save that ranks which hold the same data hold the same bytes.
    `mesh`: a DeviceMesh whose axis names the checkpoint shall carry.  `sigterm_s`: on SIGTERM, save
    and stop within that many seconds.  `deadline_s` bounds every wait.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        state: State,
        *,
        every: Every | Auto | None = None,
        memory: Memory | None = None,
        delta: Delta | None = None,
        keep: Keep | None = None,
        when_busy: Literal["queue", "skip"] = "skip",
        on_error: Literal["warn", "raise"] = "warn",
        on_resize: dict[str, str] | None = None,
        replicas: Literal["trust", "verify"] = "trust",
        mesh: Any = None,
        sigterm_s: float | None = None,
        deadline_s: float = 600.0,
    ) -> None:
        check_own(root)
        check_keys(state)
        _check_choice("when_busy", when_busy, ("queue", "skip"))
        _check_choice("on_error", on_error, ("warn", "raise"))
        _check_choice("replicas", replicas, ("trust", "verify"))
        for rule in (on_resize or {}).values():
            _check_choice("on_resize", rule, tuple(RULES.split(", ")))
        fixed_or_tuned(every)
        fixed = every if isinstance(every, Every) else Every()
        if fixed.memory is not None and memory is None:
            raise UsageError("Every(memory=...) needs Checkpointer(memory=holdfast.Memory())")
        if fixed.delta is not None and delta is None:
            raise UsageError("Every(delta=1) needs Checkpointer(delta=holdfast.Delta())")
        self.state = state
        self.every = fixed
        """In force now."""
        self.when_busy = when_busy
        self.on_error = on_error
        self.on_resize = on_resize or {}
        self._mesh = named_mesh(mesh)
        self._rng = {} if "rng" in state else {"rng": Rng()}
        self._saves: list[Save] = []
        self._group = Group(deadline_s)
        self._root = os.fspath(root)
        self._store = open_shared(root, self._group)
        self._claim, crashed = _claim_together(self._store, self._group)
        _sweep_host(self._store)
        self._capture = Capture(
            self._group,
            mesh=self._mesh,
            deadline_s=deadline_s,
            replicas=replicas,
            carry_bytes=0 if memory is None else memory.carry_bytes,
        )
        self._durable = Durable(
            self._store, self._capture, claim=self._claim, run=self._claim.run, keep=keep
        )
        self._memory = None
        if memory is not None:
            job = job_of(self._store, self._group)
            host = os.environ.get("HOLDFAST_HOST") or own_address()
            with alike(self._group, 0):
                self._memory = MemoryTier(self._capture, self._durable, memory, job=job, host=host)
        self._delta = None
        self._told_of: HoldfastError | None = None
        if delta is not None:
            with alike(self._group, 0):
                self._delta = DeltaTier(
                    self._everything,
                    self._group,
                    self._store,
                    delta,
                    run=self._claim.run,
                    mesh=self._mesh,
                    on_resize=self.on_resize,
                    deadline_s=deadline_s,
                )
            self._durable.also_tidy = partial(tidy_log, self._store)
        self._steering = None
        if isinstance(every, Auto):
            tiers = tuple(t for t, on in (("memory", memory), ("delta", delta)) if on is not None)
            alone = memory is None or memory.redundancy == "none" or self._group.size == 1
            self._steering = Steering(
                every, tiers, self._group, self._store, beyond=1.0 if alone else BEYOND, crashed=crashed
            )  # fmt: skip
            self.every = self._steering.at(0)
        self._closed = False
        self._prepared = False
        self._stop = _Stop(self._group, sigterm_s) if sigterm_s is not None else None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if error is not None and self._memory is not None:
            self._memory.leave()
        self._end(None, finished=error is None)

    def _everything(self) -> State:
        return {**self.state, **self._rng}

    # -- saving -----------------------------------------------------------------------------------

    def step(self, step: int) -> None:
        """Call after each optimizer step, with its number: saves if one is due.  Returns at once."""
        self._report()
        if self._stop is not None and self._stop.now(step):
            self._save_and_stop(step)
        if self._steering is not None:
            self.every = self._steering.at(step)
        every = self.every
        due = [n is not None and step % n == 0 for n in (every.durable, every.memory)]
        based = False
        if self._delta is not None and every.delta is not None:
            based = self._record(step, self._delta, due[0])
        elif self._delta is not None:
            self._delta.end("no records are due")
        if based:
            pass  # that is a full save of this step
        elif due[0]:
            self._begin(step, must=self.when_busy == "queue")
        elif due[1] and self._memory is not None:
            with span("snapshot.call", step=step):
                must = self.when_busy == "queue"
                save = self._memory.begin(self._collect, step, durable=False, must=must)
            self._saves.append(save)
            if self._steering is not None:
                self._steering.saving("memory", save)
        elif not self._prepared:
            self._prepare()
        self._prepared = True

    def _record(self, step: int, delta: DeltaTier, durable: bool) -> bool:
        """A record of this step; a full save of it, if records have nothing to lead on from."""
        delta.record(step)
        if self._steering is not None and self._steering.batch is not None:
            delta.rebatch(self._steering.batch)
        failed, told = delta.error, self._told_of
        self._told_of = failed
        if failed is not None and failed is not told:
            failed.hint = failed.hint or "records begin again with the next full save"
            self._complain(failed, f"records end: {failed}")
        if failed is not None and durable:
            delta.revive()
        if not delta.needs_base(step):
            return False
        delta.begin_from((self._claim.run, step), self._begin(step, must=True))
        return True

    def _complain(self, error: BaseException, text: str) -> None:
        if self.on_error == "raise":
            raise error
        warnings.warn(text, HoldfastWarning, stacklevel=4)

    def _prepare(self) -> None:
        """Have memory ready before the first save is due."""
        if self._memory is not None:
            self._saves.append(self._memory.prepare(self._collect))
        elif self.every.durable is not None:
            self._durable.prepare(self._collect)

    def save(self, step: int) -> Save:
        """Save durably now, whatever is due; waits for a save in flight.  Returns a handle."""
        self._report()
        return self._begin(step, must=True)

    def _begin(self, step: int, *, must: bool) -> Save:
        self._check_open()
        with span("save.call", step=step):
            if self._memory is not None:
                save = self._memory.begin(self._collect, step, durable=True, must=must)
            else:
                save = self._durable.begin(self._collect, step, must=must)
        self._saves.append(save)
        if self._steering is not None:
            self._steering.saving("durable", save)
        parent = None if self._delta is None else self._delta.parent
        if self._delta is not None and parent is not None and parent[1] == step:
            if parent[0] != self._claim.run:  # it replaces what records would lead on from
                self._delta.begin_from((self._claim.run, step), save)
        return save

    def _collect(self) -> Live:
        return collect(self._everything(), self.on_resize)

    def _report(self) -> None:
        """Tell the user of saves that have failed since the last call."""
        done = [s for s in self._saves if s.done()]
        self._saves = [s for s in self._saves if not s.done()]
        for save in done:
            if save.skipped and save.kind == "save":  # the next snapshot is a few steps away
                warnings.warn(
                    f"the save of step {save.step} was left out: one was in flight",
                    HoldfastWarning,
                    stacklevel=3,
                )
            if save.error is None or save.told:
                continue
            self._complain(save.error, str(save.error))

    def _save_and_stop(self, step: int) -> None:
        assert self._stop is not None
        emit("stopping", step=step)
        try:
            self._begin(step, must=True).wait(self._stop.left())
        finally:
            self._end(self._stop.left(), finished=False)
        raise SystemExit(128 + signal.SIGTERM)

    # -- restoring --------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        *,
        source: str | os.PathLike[str] | None = None,
        keep_source: bool = False,
        strict: bool = True,
        cast: bool = False,
    ) -> int:
        """Put the newest good step (or step `step`) into the live state; 0 if there is none.

        Works on any layout.  A damaged step is passed over with a warning; NotRecoverable says why if
        there are only damaged ones.  `source`: another root, or a foreign checkpoint (also by a prefix:
        `torch:PATH`), to begin with as long as the own root has no steps.  Without it, a foreign
        checkpoint that lies in the root itself is begun with.  `keep_source` saves what it gave as this
        run's own step at once, in the background: the next restarts read that.  Collective; blocks.
        """
        self._check_open()
        self.wait()
        if self._delta is not None:
            self._delta.settle()
        options = Options(cast=cast, strict=strict, on_resize=self.on_resize, mesh=self._mesh)
        durable = saved_steps(self._store, self._group)
        state = self._everything()
        snapshots = self._memory.survey() if self._memory is not None else None

        reached: dict[str, Identity] = {}

        def attempt(candidate: Candidate) -> None:
            load(candidate)
            reached["state"] = self._replay(log, candidate, state, options, step)

        def load(candidate: Candidate) -> None:
            if candidate.in_memory and snapshots is not None and self._memory is not None:
                tier, manifest = self._memory, snapshots.find(candidate.attempt)
                load_snapshot(
                    snapshots, manifest, self._store, self._group, state, options, tier.survey_again
                )
                tier.adopt(manifest)
            else:
                load_step(self._store, self._group, candidate.step, state, options)

        def passed_over(candidate: Candidate, error: HoldfastError) -> None:
            emit("restore.passed_over", step=candidate.step, error=str(error))
            warnings.warn(f"{candidate} cannot be used: {error}", HoldfastWarning, stacklevel=4)

        in_memory = [] if snapshots is None else snapshots.manifests
        bases = [Candidate(s.run, s.step) for s in durable]
        bases += [Candidate(m.run, m.step, m.attempt) for m in in_memory]
        log = self._survey_log(bases)
        candidates = newest_first(bases if log is None else [_with_tip(c, log) for c in bases])
        origin, taken = None, None
        with span("restore") as fields:
            if not candidates and (origin := self._origin(source)) is not None:
                fields["source"] = origin
                found = load_from(origin, self._group, state, step, options)
            elif step is not None:
                taken = _leading_to(step, candidates, log)
                attempt(taken)
                found = reached["state"][1]
                if found != step:
                    raise NotRecoverable(
                        f"step {step} cannot be reached: the record of the step after {found} is damaged",
                        step=step,
                        hint=f"the live state is that of step {found} now",
                    )
            else:
                taken = newest_good(candidates, attempt, passed_over)
                found = reached["state"][1] if taken is not None else 0
            fields["step"] = found
        if taken is not None and step is None:
            self._warn_of_lost(log, reached["state"])
        again = self._delta is not None and self._group.any(self._delta.recorded)
        if again or (candidates and found != (candidates[0].tip or (0, candidates[0].step))[1]):
            self._leave_behind()
        if self._delta is not None and taken is not None and self.every.delta is not None:
            self._delta.begin_from(reached["state"])
        for key in self.state:
            self.state[key] = state[key]
        if (origin is not None and keep_source) or self._is_unsaved(taken, durable):
            self._begin(found, must=True)
        return found

    def _survey_log(self, bases: list[Candidate]) -> Log | None:
        """The records that may lead on from one of these steps.  Collective."""
        if self._delta is None or not bases:
            return None
        return survey(self._store, self._group, min(c.step for c in bases), self._claim.run)

    def _replay(
        self, log: Log | None, base: Candidate, state: State, options: Options, until: int | None
    ) -> Identity:
        """Do the recorded steps after `base` again, as many as are sound; the state that this leads to."""
        steps = [] if log is None else log.after((base.run, base.step))
        if until is not None:
            steps = [s for s in steps if s.step <= until]
        if log is None or self._delta is None or not steps:
            return base.run, base.step
        with self._delta.pause():
            last = Replay(log, self._group, state, options).run(steps)
        return (base.run, base.step) if last is None else last.identity

    @staticmethod
    def _warn_of_lost(log: Log | None, reached: Identity) -> None:
        """Records behind one that is missing or damaged lead nowhere."""
        behind = [] if log is None else log.behind(reached)
        if behind:
            warnings.warn(
                f"the record of the step after {reached[1]} is missing or damaged: records up to step "
                f"{behind[-1]} are there and cannot be used",
                HoldfastWarning,
                stacklevel=4,
            )

    def _is_unsaved(self, taken: Candidate | None, durable: list[Saved]) -> bool:
        """Whether what was taken from memory is to be made durable at once."""
        if taken is None or not taken.in_memory or self.every.durable is None:
            return False
        return all(s.step != taken.step for s in durable)

    def _origin(self, source: str | os.PathLike[str] | None) -> str | None:
        """What a run without steps begins with; rank 0 sees what lies in the root."""
        if source is not None:
            return os.fspath(source)
        found = self._group.from_rank0(lambda: (detect(self._root) or "").encode())
        return self._root if found else None

    def _leave_behind(self) -> None:
        """The run went back: as a run of its own, what it saves now is newer than what it left."""
        if self._memory is not None:
            self._memory.settle(self._group.deadline_s)
        self._durable.settle(self._group.deadline_s)
        self._claim, _ = _claim_together(self._store, self._group)
        self._durable.adopt(self._claim)
        if self._delta is not None:
            self._delta.adopt(self._claim.run)
        if self._memory is not None:
            self._memory.hello()

    # -- ending -----------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> None:
        """Wait for every save under way; failures are reported as `on_error` says.  Records are with their
        writer then, which outlives this process.

        Deadline if they are not done after `timeout` seconds.
        """
        until = None if timeout is None else time.monotonic() + timeout
        for save in list(self._saves):
            try:
                save.wait(None if until is None else max(until - time.monotonic(), 0.0))
            except Exception:
                if not save.done():
                    raise
                save.told = False  # reported just below
        if self._delta is not None:
            self._delta.handed_over(timeout)
        self._report()

    def close(self, timeout: float | None = None) -> None:
        """Wait for what is pending and end.  Safe to call twice.  Deadline if that takes longer than
        `timeout` seconds (`deadline_s` if none are given).  Snapshots in memory are freed."""
        self._end(timeout, finished=True)

    def _end(self, timeout: float | None, *, finished: bool) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            with ExitStack() as last:
                last.callback(self._durable.close, timeout)
                if self._memory is not None:
                    last.callback(self._memory.close, timeout, finished=finished)
                if self._delta is not None:
                    last.callback(self._tidy_log)
                    self._delta.close(self._group.deadline_s if timeout is None else timeout)
        finally:
            self._capture.close()
            if self._steering is not None:
                self._steering.close()
            if self._stop is not None:
                self._stop.close()
            if self._group.rank == 0:
                try:
                    release(self._store, self._claim)
                except HoldfastError as error:
                    emit("release.failed", error=str(error))
            self._group.close()
        self._report()

    def _tidy_log(self) -> None:
        """Records that were written after the last save had tidied up."""
        if self._group.rank == 0:
            try:
                tidy_log(self._store)
            except HoldfastError as error:
                emit("tidy.failed", error=str(error))

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this Checkpointer is closed", hint="make a new one")


def save(
    url: str | os.PathLike[str], state: State, *, step: int, deadline_s: float = 600.0
) -> None:
    """Save once, and wait until it is durable.  Collective; RankErrors if it failed anywhere."""
    check_own(url)
    check_keys(state)
    group = Group(deadline_s)
    store = open_shared(url, group)
    _sweep_host(store)
    run, attempt = msgspec.json.decode(group.from_rank0(lambda: _once(store)))
    capture = Capture(group, deadline_s=deadline_s)
    durable = Durable(store, capture, claim=None, run=run, attempt=attempt)
    try:
        durable.begin(lambda: collect(state), step, must=True).wait()
    finally:
        durable.close()
        capture.close()
        group.close()


def _once(store: Store) -> bytes:
    held = newest_claim(store)
    run = max([held.run if held else 0, *(s.run for s in committed(store))])
    try:
        sweep(store)
    except HoldfastError as error:
        emit("sweep.failed", error=str(error))
    return msgspec.json.encode((run, once_attempt()))


def load(
    url: str | os.PathLike[str],
    state: State,
    step: int | None = None,
    *,
    only: str | Sequence[str] | None = None,
    cast: bool = False,
    strict: bool = True,
    on_resize: dict[str, str] | None = None,
    verify: bool = True,
    deadline_s: float = 600.0,
) -> int:
    """Load step `step` (or the newest) into the live objects of `state`; returns its number.

    Only what `state` names is loaded: `{"model": model}` loads weights alone.  `only`: patterns of
    tensor names (`model.h.0.*`).  `cast`: convert dtypes.  Collective; blocks.  NotRecoverable if
    there is no step.  Foreign checkpoints are read where they lie, as `holdfast.open` finds them.
    """
    patterns = None if only is None else (only,) if isinstance(only, str) else tuple(only)
    options = Options(patterns, cast, strict, on_resize or {})
    group = Group(deadline_s)
    try:
        return load_from(os.fspath(url), group, state, step, options, verify=verify)
    finally:
        group.close()


def _claim_together(store: Store, group: Group) -> tuple[Claim, bool]:
    """Rank 0 takes the root for all, and deletes what dead runs left.  Also: whether the run before did
    not end by closing.

    A run on another host may be dead or not: what it left stays until this one has committed a step.
    """

    def take() -> bytes:
        held = newest_claim(store)
        mine = claim(store)
        if held is None or held.is_over():
            sweep(store, mine, 0)
        return msgspec.json.encode((mine, held is not None and held.started != "closed"))

    return msgspec.json.decode(group.from_rank0(take), type=tuple[Claim, bool])


def _sweep_host(store: Store) -> None:
    """Files that dead processes of this host were writing: nobody else can tell that they are dead."""
    if isinstance(store, LocalStore) and os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            sweep_unfinished(store.root)
        except HoldfastError as error:
            emit("sweep.failed", error=str(error))


def check_own(url: str | os.PathLike[str]) -> None:
    """UsageError for a root that a prefix calls a foreign checkpoint."""
    prefix = split(os.fspath(url))[0]
    if prefix:
        raise UsageError(
            f"{url} names a {prefix} checkpoint; holdfast saves in its own format",
            hint=f"give a root of its own, and restore(source={os.fspath(url)!r})",
        )


def named_mesh(mesh: Any) -> Mesh | None:
    """A DeviceMesh over all ranks as names and sizes."""
    if mesh is None:
        return None
    names = mesh.mesh_dim_names
    if not names:
        raise UsageError("mesh: a DeviceMesh with mesh_dim_names is needed")
    return Mesh(tuple(zip(names, mesh.mesh.shape)))


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name}={value!r}: must be one of {', '.join(choices)}")


def _with_tip(base: Candidate, log: Log) -> Candidate:
    steps = log.after((base.run, base.step))
    return replace(base, tip=steps[-1].identity) if steps else base


def _leading_to(step: int, candidates: list[Candidate], log: Log | None) -> Candidate:
    """That step, or the nearest from which records lead to it."""
    found = next((c for c in candidates if c.step == step), None)
    if found is None and log is not None:
        leading = [c for c in candidates if step in [s.step for s in log.after((c.run, c.step))]]
        found = max(leading, key=lambda c: c.step, default=None)
    return found or Candidate(0, step)


class _Stop:
    """SIGTERM on any rank becomes one step at which all ranks save and stop.

    The rank that was told posts the next step's number; every rank that completes that step has by
    then exchanged gradients with the poster, so it finds the post and stops at the same step.
    """

    def __init__(self, group: Group, grace_s: float) -> None:
        self._group = group
        self._grace_s = grace_s
        self._told_at: float | None = None
        self._posted = False
        self._old = signal.signal(signal.SIGTERM, self._told)

    def _told(self, *_: Any) -> None:
        self._told_at = self._told_at or time.monotonic()

    def now(self, step: int) -> bool:
        """Whether this is the step to stop at."""
        found = self._group.peek("stop")
        if found is None and self._told_at is not None and not self._posted:
            self._posted = True
            at = step if self._group.size == 1 else step + 1
            self._group.post("stop", str(at).encode())
            found = str(at).encode()
        return found is not None and step >= int(found)

    def left(self) -> float:
        """Seconds of grace that are left."""
        since = time.monotonic() - self._told_at if self._told_at else 0.0
        return max(self._grace_s - since, 1.0)

    def close(self) -> None:
        signal.signal(signal.SIGTERM, self._old)
