"""`Checkpointer`, the object that a training script holds.

It decides when to save, and reports failures.  `tiers` has the places that a state is kept in, `restart`
the choice of what a run begins with, `ending` the ends of saves.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from holdfast.base import events
from holdfast.base.arguments import (
    choice_of,
    flag_of,
    function_of,
    named_step_of,
    path_of,
    patterns_of,
    rules_of,
    seconds_of,
    step_of,
    timeout_of,
    unfit,
)
from holdfast.base.entry import public
from holdfast.base.errors import HoldfastError, UsageError
from holdfast.base.events import emit, span
from holdfast.base.notices import Notices
from holdfast.core.checkpoint.tidying import Keep
from holdfast.core.group import Group, meet
from holdfast.core.layout import Mesh
from holdfast.live.collecting import RunState
from holdfast.live.every import Every, every_of
from holdfast.live.roots import require_native_root
from holdfast.live.saving import Save
from holdfast.live.state.encoding import RESIZE_RULES
from holdfast.live.state.loaded import loaded_states
from holdfast.live.state.named import Collected
from holdfast.live.state.recognising import State, check_keys
from holdfast.live.state.rng import Rng
from holdfast.live.state.window import rest, resting
from holdfast.live.tier import Asked, Tier
from holdfast.live.training_checks import Noticing
from holdfast.session.beginning import Beginning
from holdfast.session.ending import LINGER_S, Ending, Saves
from holdfast.session.tiers import ROOT, Homes, Switch, Switched, Tiers

if TYPE_CHECKING:
    from holdfast.live.restore.result import Found, Restored
    from holdfast.live.saving.attaching import Attached, AttachedFiles, FileSource
    from holdfast.live.saving.noting import Noting
    from holdfast.policy.tuning import Auto
    from holdfast.session.restart import Restart
    from holdfast.session.sigterm import SigtermStop
    from holdfast.session.status import RunStatus
    from holdfast.session.steering import Steering
    from holdfast.tiers.memory.options import Memory
    from holdfast.tiers.records.options import Delta


NEAR: dict[str, Switch] = {
    "memory": Switched(
        "memory", "holdfast.tiers.memory.options:Memory", "holdfast.tiers.memory.starting"
    ),
    "delta": Switched(
        "delta", "holdfast.tiers.records.options:Delta", "holdfast.tiers.records.starting"
    ),
}
"""The tiers nearer than the root, from the farthest to the nearest, by name.  A new tier is a module with
a `Tier` (`live/tier.py`) and its `start`, an argument of `Checkpointer`, and a line here.  What is to
outlast a lost root is no such tier: it has claims of its own, as `upload` has."""


class Checkpointer:
    """Keeps a training run's state.  Made once, on every rank, with the same arguments.

    `path` is the root of the run's steps, a folder that all ranks reach; `state` a dict of modules (or
    lists of pipeline stages), optimizers, objects with `state_dict`/`load_state_dict`, and nested dicts of
    tensors and plain values.  Plain values are read from the dict at each save and put back into it by
    `restore`.  The random number generators are included under the key `rng`, unless the state has one.
    Objects that do not exist yet may be added to `Checkpointer.state` before `restore` or the first save.

    `every`: how often `step` saves: a number of steps between durable saves, an `Every` with a number for
    each tier, or `Auto`, which tunes them by measured costs.
    `memory`: snapshots in host memory, which survive the training processes.  `delta`: a record of every
    step, from which a restart replays the steps after the newest full save.  `keep`: which steps stay.
    `upload`: a second store, to which committed steps and records are copied in the background;
    `upload_keep`: which steps stay there.
    `when_busy`: a save that is due while another is in flight waits for that (`"queue"`) or is left out
    (`"skip"`).  By default snapshots in memory are left out, and durable saves wait, unless storage has not
    answered the save in flight for 30 s.
    `on_error`: a failed save is a warning (`"warn"`) or an exception (`"raise"`) at the next call.
    `on_resize`: by key, the rule for state that differs between ranks when their number changes (`same`,
    `rank0`, `redistribute`, `fresh`).
    `replicas`: ranks that share a tensor compare its bytes: all at its first save and a sample at later
    ones (`once`), all at each save (`verify`), or none (`trust`).  If they differ, the save fails with a
    LayoutError.
    `files`: small files that are kept beside each durable step, by name: a path, bytes, or a function that
    returns them; see `files`.
    `mesh`: a DeviceMesh over all ranks; the checkpoint gets its axis names.  `sigterm_s`: on SIGTERM, save
    and stop within that many seconds.  `deadline_s` bounds every wait for a rank or for storage.
    `anew`: begin without `restore` in a root that has steps of earlier runs, with any step numbers: a step
    of the same number is replaced, no other is deleted.  Collective; blocks.  UsageError if another run of
    this host uses the root.
    """

    @public
    def __init__(
        self,
        path: str | os.PathLike[str],
        state: State | None = None,
        *,
        every: Every | Auto | int | None = None,
        memory: Memory | None = None,
        delta: Delta | None = None,
        keep: Keep | None = None,
        upload: str | os.PathLike[str] | None = None,
        upload_keep: Keep | None = None,
        when_busy: Literal["queue", "skip"] | None = None,
        on_error: Literal["warn", "raise"] = "warn",
        on_resize: dict[str, str] | None = None,
        replicas: Literal["once", "verify", "trust"] = "once",
        files: Mapping[str, FileSource] | None = None,
        mesh: Any = None,
        sigterm_s: float | None = None,
        deadline_s: float = 600.0,
        anew: bool = False,
    ) -> None:
        call = "Checkpointer"
        root = path_of(path, call, "path")
        require_native_root(root)
        state = {} if state is None else state
        if not isinstance(state, dict) or state:
            check_keys(state)
        _check_choices(call, when_busy, on_error, replicas, anew)
        near = _switched(memory=memory, delta=delta)
        homes = Homes(root, keep, upload, upload_keep).checked()
        known = (*state, "rng") if state else None
        on_resize = rules_of(on_resize, RESIZE_RULES, known, call, "on_resize")
        every = every_of(every, memory=memory is not None, delta=delta is not None)
        deadline_s = seconds_of(deadline_s, call, "deadline_s")
        sigterm_s = _checked_sigterm(sigterm_s, call)
        named = _named_mesh(mesh)
        self._files = _attached_files(files) if files is not None else None
        self.when_busy, self._root = when_busy, root
        self._state, self._notices = RunState(state, on_resize), Notices(on_error)
        self._pid, self._prepared = os.getpid(), False
        self._restored: Restored | None = None
        self._metrics: dict[int, Mapping[str, float]] = {}
        """The metrics that the last `step` was given, by its number."""
        group = meet(deadline_s, "Checkpointer()")
        self._saves = Saves(group, self._notices)
        self._tiers = Tiers(
            group,
            self._state.everything,
            homes,
            near,
            self._notices,
            mesh=named,
            replicas=replicas,
            on_resize=on_resize,
            is_tuned=not (every is None or isinstance(every, Every)),
        )
        self._beginning = Beginning(self._tiers, self._state, self._notices, anew=bool(anew))
        self._steering = _steering(every, self._tiers)
        self.every = _in_force(every, self._steering)
        """The frequencies in force now."""
        self._stop = None if sigterm_s is None else _stop_at_sigterm(group, sigterm_s)
        outliving = [tier.unheard for tier in self._tiers if tier.outlives]
        self._ending = Ending(group, self._saves.untold, self._unheard, outliving)
        self._noticing = Noticing(self._state, self._notices)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        try:
            for tier in self._tiers if error is not None and self._is_open else ():
                tier.leave()
        finally:  # also if this rank learns only now that another is lost
            self._end(None, finished=error is None, error=error)

    @property
    def state(self) -> State:
        """The dict that was handed over; it may be filled until `restore` or the first save."""
        return self._state.given

    @property
    def files(self) -> AttachedFiles:
        """The files that are kept beside each durable step, by name: `ckpt.files["config.json"] = path`, or
        bytes, or a function that returns them.

        Rank 0 reads them when a durable save begins; at most 64 MiB in all.  A file that cannot be read is
        left out, and reported as `on_error` says.  Snapshots in memory have no files.
        """
        if self._files is None:
            self._files = _attached_files(None)
        return self._files

    # -- saving -----------------------------------------------------------------------------------

    @public
    def step(self, step: int, *, metrics: Mapping[str, float] | None = None) -> None:
        """Call after each optimizer step, with its number: begins the saves that are due, and reports
        failures of earlier ones (`on_error`).

        `metrics`: numbers by name, for `Keep(best=)`; those of rank 0 count.  They are stored with the step
        if this call saves it durably, also as the last one at SIGTERM, or if `save(step)` does before the
        next `step`.  A step that is not saved has no metrics, and a snapshot in memory has none, unless a
        durable save goes through it.

        A save copies buffers and plain values, then returns.  Blocks also for a full queue of records, with
        `Auto` at each tenth step for rank 0, and for the whole copy if steps are in a CUDA graph.
        After SIGTERM, with `sigterm_s`, it saves and raises SystemExit(143).
        """
        step = step_of(step, "Checkpointer.step")
        if metrics is not None:
            _check_metrics(metrics, "Checkpointer.step")
        self._metrics = {} if metrics is None else {step: metrics}
        self._check_ready()
        self._beginning.check_decided()
        self._saves.in_vain.at(step)
        events.last_step = step
        self._tiers.saver.gate.look(step)
        self._noticing.look(step)
        rest()
        self._look_back()
        if self._stop is not None and self._stop.now(step):
            self._save_and_stop(step, self._stop)
        if self._steering is not None:
            self.every = self._steering.at(step)
        due = self.every.durable is not None and step % self.every.durable == 0
        own = [tier for tier in self._tiers if tier.due(step, self.every)]
        if due or own:
            self._check_newer(step)
        elif any(tier.follows_steps for tier in self._tiers):
            self._beginning.check(step, self._noticing)
        if not (due or own or self._prepared):
            self._beginning.look_for_late(is_save=False)
        is_base = self._act(step)
        if is_base and not due:
            self._beginning.look_for_late()
        if is_base or due:
            self._begin(
                step,
                must=is_base or self.when_busy != "skip",
                yields=self.when_busy is None and not is_base,
                live=is_base,
            )
            own = [tier for tier in own if tier is not self._tiers.carrier]
        for tier in own:
            self._begin_own(tier, step)
        if not (is_base or due or own or self._prepared):
            self._prepare()
            self._warn_if_never_due()
        self._prepared = True
        self._notices.tell()

    def _check_newer(self, step: int) -> None:
        """UsageError if this step may not be saved after the restored one."""
        self._beginning.check(step, self._noticing)
        self._beginning.look_for_late()

    def _act(self, step: int) -> bool:
        """Have tiers record the step.  True if a record has to lead on from a durable save of this step."""
        needs_save = [tier.act(step, self.every) for tier in self._tiers]
        if self._steering is not None:
            self._steering.acted()
        return any(needs_save)

    def _begin_own(self, tier: Tier, step: int) -> None:
        """Begin a save that is a tier's own."""
        self._noticing.saving(step)
        save = tier.begin(self._collect, step, must=self.when_busy == "queue")
        self._saves.untold.append(save)
        self._beginning.refuse(save)
        if self._steering is not None:
            self._steering.saving(tier.name, save)

    def _warn_if_never_due(self) -> None:
        if self.every == Every() and self._steering is None and self._stop is None:
            self._notices.warn(
                "step() saves nothing, because no every= was given; every=1000 saves each 1000 steps"
            )

    def _prepare(self) -> None:
        """Have memory ready before the first save is due."""
        rehearsal = self._tiers.carrier.prepare(self._collect, self.every)
        if rehearsal is not None:
            self._saves.rehearsed(rehearsal)
            self._beginning.refuse(rehearsal)

    @public
    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        files: Mapping[str, FileSource] | None = None,
    ) -> Save:
        """Begin a durable save now, whether due or not; return its handle.  It follows a save in flight.
        Blocks as `step`.

        `metrics`: numbers by name, for `Keep(best=)`, which are added to those that `step` was given for
        this number; `files`: more files for this step, which take precedence over `Checkpointer.files`.
        Those of rank 0 count.
        """
        step = step_of(step, "Checkpointer.save")
        if metrics is not None:
            _check_metrics(metrics, "Checkpointer.save")
        self._check_ready()
        self._check_newer(step)
        self._report()
        return self._begin(step, must=True, added=self._attached(step, metrics, files))

    def _attached(self, step: int, metrics: Any = None, files: Any = None) -> Attached | None:
        """Return what a durable save that begins now adds to its step."""
        metrics = {**self._metrics.get(step, {}), **(metrics or {})} or None
        if not self._files and metrics is None and files is None:
            return None
        from holdfast.live.saving.attaching import attached

        def complain(error: BaseException) -> None:
            self._notices.complain(error, f"the step is saved without a file: {error}")

        is_first = self._tiers.group.rank == 0
        call = "Checkpointer.save"
        return attached(self._files or {}, files, metrics, call, complain, reads=is_first)

    def _begin(
        self,
        step: int,
        *,
        must: bool,
        live: bool = False,
        yields: bool = False,
        added: Attached | None = None,
    ) -> Save:
        """Begin a save.  `must`: wait for a save in flight; `yields`: except if that hangs on storage.
        `live`: copy the live state, not a replica, which could be lost meanwhile."""
        self._check_open()
        self._noticing.saving(step)
        asked = Asked(
            step, must=must, yields=yields, live=live, attached=added or self._attached(step)
        )
        for tier in self._tiers:
            tier.check_save(step)
        with span("save.call", step=step):
            save = self._tiers.carrier.carry(self._collect, asked)
        self._saves.untold.append(save)
        self._saves.in_vain.begun(step)
        self._saves.numbers.look(self.state, step)
        self._beginning.refuse(save)
        if self._steering is not None:
            self._steering.saving(ROOT, save)
        for tier in self._tiers:
            tier.saving(save)
        return save

    def _collect(self) -> Collected:
        with self._beginning.collecting():
            self._noticing.check_in_backward()
            return self._state.collect()

    def _report(self) -> None:
        """Report saves that have failed since the last call, and the news of tiers."""
        self._look_back()
        self._notices.tell()

    def _look_back(self) -> None:
        """Collect the texts to report."""
        for news in (self._tiers.saver.news, *(tier.news for tier in reversed(self._tiers))):
            while news:
                self._notices.warn(news.pop(0))
        self._saves.look_back()

    def _unheard(self) -> list[str]:
        """Return the texts that the next call would report, besides failed saves."""
        tiers = [tier for tier in self._tiers if not tier.outlives]
        return self._notices.texts + [text for tier in tiers for text in tier.unheard()]

    def _save_and_stop(self, step: int, stop: SigtermStop) -> None:
        emit("stopping", step=step)
        self._notices.only_warn()  # the process ends because of the signal
        self._tiers.saver.is_last = True
        try:
            self._check_newer(step)
            self._begin(step, must=True, live=True).wait(stop.left())
        finally:
            self._end(stop.left(), finished=False)
        raise SystemExit(128 + signal.SIGTERM)

    # -- committed steps --------------------------------------------------------------------------

    @public
    def on_commit(self, call: Callable[[int], object]) -> None:
        """Call `call(step)` for each step that is saved durably: on every rank, in the training thread, at
        the next `step`, `save`, `wait` or `close` after its commit.

        A save that failed or was left out makes no call.  When `wait` or `close` returns, all calls have
        been made.  An exception of `call` is reported as `on_error` says.
        """
        what = "that takes the number of a step"
        self._check_open()
        self._saves.calls.append(function_of(call, "Checkpointer.on_commit", "call", what, 1))

    @public
    def pin(self, step: int | str, label: str) -> None:
        """Let `label` name this step, and no other.  A step with a label is never deleted automatically.
        `step` may be a label, `"best"` or `"newest"`, too, of the steps that are committed.

        If the step is still being saved, the label moves at its commit; if that save fails, or the process
        is killed first, the label stays where it was.  An error of storage, or a save that has failed
        already, is reported like a failed save (`on_error`).  NotFound for a step that `step` and `save`
        have not come to yet.  Collective; blocks for a few requests to storage.
        """
        with self._saves.in_vain.told(lambda: f"the label {label!r} names no step {step}", step):
            self._noting().pin(step, label)

    @public
    def unpin(self, label: str) -> None:
        """Remove a label, if there is one of that name.  Collective; blocks as `pin`."""
        with self._saves.in_vain.told(lambda: f"the label {label!r} is not removed"):
            self._noting().unpin(label)

    @public
    def metrics(self, step: int | str, **values: float) -> None:
        """Note metrics of a step after an evaluation, `metrics(100, loss=0.3)`, for `Keep(best=)`.
        `step` as in `pin`.

        They are added to the step's metrics, and replace those of the same name.  Fails and blocks as
        `pin`. Collective; the values of rank 0 count.
        """
        with self._saves.in_vain.told(lambda: f"metrics of step {step} are not kept", step):
            self._noting().measure(step, values)

    def _noting(self) -> Noting:
        from holdfast.live.saving.noting import Noting

        self._check_open()
        saving = [s.step for s in self._saves.untold if s.kind == "save" and not s.done()]
        tiers, steps = self._tiers, self._tiers.durable.steps
        return Noting(tiers.group, steps, dict.fromkeys(saving, tiers.run))

    # -- how it stands ----------------------------------------------------------------------------

    def status(self) -> RunStatus:
        """Return how far each tier has come, as this rank knows it: `print(ckpt.status())`, or fields of
        `RunStatus`.  Asks neither storage nor other ranks, and does not wait; from any thread, also after
        `close`."""
        from holdfast.session.status import RunStatus

        told = {tier.name: status for tier in self._tiers if (status := tier.status()) is not None}
        last = self._saves.in_vain.last
        is_open = not self._ending.is_closed
        return RunStatus(self._tiers.store.url, self._tiers.run, last, is_open, told)

    def __repr__(self) -> str:
        if "_noticing" not in vars(self):
            return "<Checkpointer that is not made yet>"
        return f"<Checkpointer of {str(self.status()).splitlines()[0]}>"

    # -- restoring --------------------------------------------------------------------------------

    @public
    def find(self, step: int | str | None = None) -> Found | None:
        """Return the step that `restore()`, or `restore(step)`, would reach, with its tier and plain
        values; None if the run has saved nothing.  The state may still be empty.

        Looks at all tiers, but reads no tensors: damage is only found in manifests, headers of records and
        lengths of files; such steps are passed over with a warning.  Collective; blocks.
        """
        step = None if step is None else named_step_of(step, "Checkpointer.find")
        self._check_open()
        return self._restart("find()").find(step)

    @public
    def restore(
        self,
        step: int | str | Found | None = None,
        *,
        source: str | os.PathLike[str] | None = None,
        keep_source: bool = False,
        only: str | Sequence[str] | None = None,
        cast: bool = False,
        strict: bool = True,
        verify: bool = True,
    ) -> Restored:
        """Put the newest good step (or step `step`) into the live state, in place and on any layout; return
        its number, 0 if there is none.  `Restored`, an int, also has the tier and other facts.  `step`: a
        number, a label, or `"best"`: the step with that label, else the best by `Keep(best=)`; NotFound.

        A damaged step is passed over with a warning; if all are damaged, NotRecoverable gives the reasons.
        With a result of `find`, exactly that state is restored, whatever was saved since: NotRecoverable if
        it is damaged, and the next `find` passes over it.

        `source`: another root, or a foreign checkpoint (also with a prefix: `torch:PATH`), which is read
        while the run's own root has no steps.  Without `source`, that is a foreign checkpoint in the root
        itself.
        `keep_source`: at once save the state from `source` as this run's own step, in the background, for
        later restarts.  `cast`, `strict` and `verify` as in `load`; also `only`, but only with `source`,
        because a run's own steps are restored whole.  Collective; blocks.
        """
        from holdfast.live.restore.result import Found
        from holdfast.session.restart import origin_of

        call = "Checkpointer.restore"
        found, step = (step, None) if isinstance(step, Found) else (None, step)
        step = None if step is None else named_step_of(step, call)
        source = None if source is None else path_of(source, call, "source")
        patterns = None if only is None else patterns_of(only, call, "only")
        if patterns is not None and source is None:
            raise UsageError(
                "restore(only=...) needs source=...: a run's own steps are restored whole"
            )
        flags = {"keep_source": keep_source, "strict": strict, "cast": cast, "verify": verify}
        for name, flag in flags.items():
            flag_of(flag, call, name)
        self._check_ready()
        self._restored, self._metrics = None, {}
        self._beginning.forget()
        restart = self._restart("restore()", cast=cast, strict=strict, verify=verify)
        origin = None
        if found is None and not restart.survey.candidates:
            origin = origin_of(self._root, source, self._tiers.group)
        if self._steering is not None:
            self._steering.lost(*restart.survey.lost_with_nodes())
        with loaded_states.noted(), span("restore") as fields:
            if origin is not None:
                fields["source"] = origin
                restored = restart.from_source(origin, step, patterns)
            else:
                restored = restart.to(step if found is None else found)
            fields["step"] = int(restored)
            loaded_states.ask()
            self._go_on_from(restart, restored, must_save=keep_source and origin is not None)
        is_asked = step not in (None, "newest") if found is None else restart.is_back
        is_elsewhere = origin is not None and not keep_source
        self._beginning.went_on(restored, restart.origin(), is_asked=is_asked or is_elsewhere)
        self._restored = restored
        return restored

    @public
    def restore_rng(self) -> None:
        """Restore the random number generators once more to their state in the restored step.

        Call it after everything that draws from them at the start of a run: each `iter()` of a DataLoader
        draws from torch's default generator.  UsageError if nothing was restored, or not the generators, as
        on another number of ranks.
        """
        from holdfast.session.restart import restore_generators

        self._check_open()
        restore_generators(self._state.generators, self._restored)

    def _restart(
        self, call: str, *, cast: bool = False, strict: bool = True, verify: bool = True
    ) -> Restart:
        """Wait for all saves under way, and survey all tiers.  Collective; blocks."""
        from holdfast.live.restore.targets import RestoreOptions
        from holdfast.session.restart import Restart

        self.wait()
        for tier in self._tiers:
            tier.flush()
        self._tiers.group.together(call)  # all ranks' records are there when rank 0 lists them
        options = RestoreOptions(
            cast=cast, strict=strict, on_resize=self._state.on_resize, mesh=self._tiers.mesh
        )
        return Restart(self._tiers, self._state.everything(), options, verify=verify)

    def _go_on_from(self, restart: Restart, restored: Restored, *, must_save: bool) -> None:
        """Make tiers go on from the restored state.  Save it if `must_save`, or if it is only in the nodes'
        memory, so that the next restart finds it."""
        self._tiers.saver.copy_timing.forget()
        self._noticing.begin(int(restored))
        if restart.leaves_behind():
            self._tiers.leave_behind(None if restart.taken is None else restart.taken.step)
        for name, step, since in restart.standing():
            self._tiers.get(name).found(step, since)
        restart.take_line()
        reached = restart.summary()
        leading = [tier for tier in self._tiers if tier.go_on(reached, self.every)]
        self._saves.numbers.went_on(self.state, restart.state, found=restored.found)
        for key in self.state:
            self.state[key] = restart.state[key]
        # records need the step that they lead on from
        is_lasting = self.every.durable is not None or bool(leading)
        generators = Rng().state_dict()
        if must_save or (is_lasting and restart.is_unsaved(is_recording=bool(leading))):
            make = partial(self._attached, int(restored))
            added = restart.attached(make, self._files or (), self._notices.warn)
            self._begin(int(restored), must=True, added=added)
        elif (unprotected := restart.unprotected()) is not None:
            self._begin_own(unprotected, int(restored))
        for tier in leading:
            tier.ready()
        Rng().load_state_dict(generators)  # state_dict() of a loader that was not loaded may draw

    # -- ending -----------------------------------------------------------------------------------

    @public
    def wait(self, timeout: float | None = None) -> None:
        """Block until every save under way has ended, and records are with their writer, which outlives
        this process.  Failures are reported as `on_error` says.

        Deadline if they have not ended after `timeout` seconds.  Without `timeout` the wait also ends,
        because a save fails if storage or another rank does not answer for `deadline_s`.
        """
        timeout = timeout_of(timeout, "Checkpointer.wait")
        self._check_ours()
        until = None if timeout is None else time.monotonic() + timeout
        self._saves.wait(until)
        for tier in self._tiers:
            tier.wait(None if until is None else max(until - time.monotonic(), 0.0))
        self._report()

    @public
    def close(self, timeout: float | None = None) -> None:
        """Block until all saves have ended, and release the root.  Safe to call twice.  Deadline after
        `timeout` seconds (default: `deadline_s`) and up to half a minute to inform other ranks.  Snapshots
        in memory are freed, unless the last durable save failed."""
        self._end(timeout_of(timeout, "Checkpointer.close"), finished=True)

    def _end(
        self, timeout: float | None, *, finished: bool, error: BaseException | None = None
    ) -> None:
        if not self._is_open:
            return
        if error is None:
            try:
                timeout = self._call_the_last(timeout)
            except BaseException as interrupt:
                self._notices.only_warn()  # other failures must not replace the interrupt
                self._end(timeout, finished=False, error=interrupt)
                raise
        self._ending.close()
        try:
            with ExitStack() as last:
                # after an error the others may be in a collective that only this rank's end will end
                last.callback(self._tiers.group.close, None if error is None else LINGER_S)
                last.callback(self._tiers.release)
                last.callback(self._noticing.close)
                if self._stop is not None:
                    last.callback(self._stop.close)
                if self._steering is not None:
                    last.callback(self._steering.close, error)
                with resting():
                    self._tiers.close(timeout, finished=finished)
        except BaseException:
            self._look_back()
            self._notices.only_warn()
            self._notices.tell_all()  # beside the error: there is no next call
            raise
        self._look_back()
        self._notices.tell_all()

    def _call_the_last(self, timeout: float | None) -> float | None:
        """Make the calls of `on_commit` while all is open; return the seconds that are left."""
        if not self._saves.calls:
            return timeout
        until = time.monotonic() + (self._tiers.group.deadline_s if timeout is None else timeout)
        with suppress(HoldfastError):  # it is reported at the end
            self._saves.wait(until)
        self._look_back()
        return None if timeout is None else max(until - time.monotonic(), 0.0)

    @property
    def _is_open(self) -> bool:
        """True if this process has to close it."""
        return self._is_ours and not self._ending.is_closed

    @property
    def _is_ours(self) -> bool:
        """True unless this is a forked child, which also runs its parent's `__exit__`."""
        return os.getpid() == self._pid

    def _check_ours(self) -> None:
        if not self._is_ours:
            raise UsageError(
                f"this Checkpointer is of process {self._pid}, not of its forked child {os.getpid()}",
                hint="let the training process step, save and restore",
            )

    def _check_open(self) -> None:
        self._check_ours()
        if self._ending.is_closed:
            raise UsageError("this Checkpointer is closed", hint="make a new one")

    def _check_ready(self) -> None:
        """UsageError unless it is open and has a state."""
        self._check_open()
        if not self._state.is_complete:
            self._state.check()
            for tier in self._tiers:
                tier.complete()
            self._state.is_complete = True


def _switched(**given: Any) -> dict[str, tuple[Switch, Any]]:
    """Return the switches of nearer tiers, each with its argument.  UsageError for what it cannot be."""
    for name, switch in NEAR.items():
        switch.check(given.get(name))
    return {name: (switch, given.get(name)) for name, switch in NEAR.items()}


def _check_metrics(given: object, call: str) -> None:
    from holdfast.core.checkpoint.notes import metrics_of

    metrics_of(given, call)


def _check_choices(
    call: str, when_busy: object, on_error: object, replicas: object, anew: object
) -> None:
    flag_of(anew, call, "anew")
    if when_busy is not None:
        choice_of(when_busy, ("queue", "skip"), call, "when_busy")
    choice_of(on_error, ("warn", "raise"), call, "on_error")
    choice_of(replicas, ("once", "verify", "trust"), call, "replicas")


def _checked_sigterm(given: Any, call: str) -> float | None:
    if given is None:
        return None
    from holdfast.session.sigterm import checked_grace

    return checked_grace(given, call)


def _attached_files(given: Any) -> AttachedFiles:
    from holdfast.live.saving.attaching import AttachedFiles

    return AttachedFiles(given, "Checkpointer")


def _stop_at_sigterm(group: Group, sigterm_s: float) -> SigtermStop:
    from holdfast.session.sigterm import SigtermStop

    return SigtermStop(group, sigterm_s)


def _steering(every: Every | Auto | None, tiers: Tiers) -> Steering | None:
    """Make the tuning of this run; None unless `every` is an `Auto`."""
    if every is None or isinstance(every, Every):
        return None
    from holdfast.session.steering import steering_of

    return steering_of(every, tiers)


def _in_force(every: Every | Auto | None, steering: Steering | None) -> Every:
    given = every if isinstance(every, Every) else Every()
    return given if steering is None else steering.every


def _named_mesh(mesh: Any) -> Mesh | None:
    """Return the axis names and sizes of a DeviceMesh over all ranks."""
    if mesh is None:
        return None
    names = getattr(mesh, "mesh_dim_names", None)
    if not names:
        raise unfit("Checkpointer", "mesh", mesh, "a DeviceMesh with mesh_dim_names")
    return Mesh(tuple(zip(names, mesh.mesh.shape)))
