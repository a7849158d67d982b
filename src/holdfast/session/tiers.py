"""The tiers of a run: the table that makes them from the user's options, and the parts that they share.

`MAKERS` is the table: a new tier needs a `Tier` (`live/tier.py`), and a line here.  A tier's module is
imported only if the tier is switched on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from holdfast.base.arguments import instance_of, path_of
from holdfast.base.errors import Deadline, HoldfastError, UsageError
from holdfast.base.events import emit
from holdfast.base.notices import Notices
from holdfast.base.storage_deadlines import within
from holdfast.core.checkpoint.claiming import Claim, release
from holdfast.core.checkpoint.lineage import Lineage
from holdfast.core.checkpoint.tidying import Keep
from holdfast.core.group import Group
from holdfast.core.layout import Mesh
from holdfast.live.roots import claim_root, open_shared, sweep_host
from holdfast.live.saving import Saver
from holdfast.live.saving.durable import Durable
from holdfast.live.state.recognising import State
from holdfast.live.tier import Tier
from holdfast.session.root import ROOT, RootTier

if TYPE_CHECKING:
    from holdfast.tiers.memory.options import Memory
    from holdfast.tiers.records.options import Delta

LEAST_S = 0.1
RELEASE_S = 5.0
"""Seconds beyond its limit in which `close` releases the root."""


@dataclass(frozen=True, slots=True)
class TierOptions:
    """The arguments of a Checkpointer for its tiers; see there."""

    root: str
    keep: Keep | None
    upload: str | os.PathLike[str] | None
    upload_keep: Keep | None
    memory: Memory | None
    delta: Delta | None

    @property
    def best(self) -> tuple[str, str] | None:
        """The metric, and `min` or `max`, by which a rule keeps the best steps; None without one."""
        rules = [k.best for k in (self.keep, self.upload_keep) if k is not None and k.best]
        return (rules[0][0], rules[0][-1]) if rules else None  # type: ignore[return-value]

    def checked(self) -> TierOptions:
        """Return the options with `upload` as a URL.  UsageError for wrong types or combinations."""
        for name, kind, module in (
            ("memory", "Memory", "holdfast.tiers.memory.options"),
            ("delta", "Delta", "holdfast.tiers.records.options"),
            ("keep", "Keep", "holdfast.core.checkpoint.tidying"),
            ("upload_keep", "Keep", "holdfast.core.checkpoint.tidying"),
        ):
            if (given := getattr(self, name)) is not None:
                cls, what = getattr(import_module(module), kind), f"a holdfast.{kind}(...), or None"
                instance_of(given, cls, "Checkpointer", name, what)
        if self.upload is None and self.upload_keep is None:
            return self
        from holdfast.tiers.mirror.homes import check_homes

        upload = None if self.upload is None else path_of(self.upload, "Checkpointer", "upload")
        check_homes(self.root, upload, self.upload_keep)
        return replace(self, upload=upload)


class Tiers:
    """The tiers of a run, from the farthest to the nearest.  All ranks make all calls in the same order."""

    root = ROOT

    def __init__(
        self,
        group: Group,
        state: Callable[[], State],
        options: TierOptions,
        notices: Notices,
        *,
        mesh: Mesh | None,
        replicas: Literal["once", "verify", "trust"],
        on_resize: dict[str, str],
        is_tuned: bool,
    ) -> None:
        """Claims the root for this run, and the home behind it.  Collective; blocks.  `state`: returns the
        live state.  `is_tuned`: frequencies follow measurements."""
        self.group = group
        self.state = state
        self.notices = notices
        self.mesh = mesh
        self.on_resize = on_resize
        self.is_tuned = is_tuned
        homes = (options.root,) if options.upload is None else (options.root, options.upload)
        self.homes = [open_shared(home, group) for home in homes]
        """The root, and the home behind it if there is one."""
        self.store = self.homes[0]
        self._best = options.best
        self.claim, self.crashed, self.there = self._take()
        """`crashed`: the previous run did not close; `there`: the steps in the root, in words."""
        self._check_homes()
        sweep_host(self.store)
        self.saver = Saver(
            group,
            mesh=mesh,
            deadline_s=group.deadline_s,
            replicas=replicas,
            carry_bytes=0 if options.memory is None else options.memory.carry_bytes,
        )
        self.durable = Durable(
            self.store, self.saver, claim=self.claim, run=self.run, keep=options.keep
        )
        self.unsound: dict[tuple[object, ...], HoldfastError] = {}
        """Errors of steps and records that `find` had found and that could not be restored; `find` passes
        over them."""
        self._tiers: dict[str, Tier] = {}
        for name, make in MAKERS.items():
            if (tier := make(self, options)) is not None:
                self._tiers[name] = tier

    def __iter__(self) -> Iterator[Tier]:
        return iter(self._tiers.values())

    def __reversed__(self) -> Iterator[Tier]:
        return reversed(self._tiers.values())

    def get(self, name: str) -> Any:
        """Return the tier of a name; None if it is not switched on."""
        return self._tiers.get(name)

    @property
    def carrier(self) -> Tier:
        """The tier that durable saves go through: the nearest that can carry them."""
        return next(tier for tier in reversed(self) if tier.carries)

    # -- the homes --------------------------------------------------------------------------------

    def _take(self) -> tuple[Claim, bool, str]:
        """Claim the homes of the run.  Collective."""
        if len(self.homes) == 1:
            return claim_root(self.store, self.group, self._best)
        from holdfast.tiers.mirror.claims import claim_both

        root, behind = self.homes
        return claim_both(root, behind, self.group, self._best)

    def _check_homes(self) -> None:
        """UsageError unless all ranks have the homes that rank 0 has claimed.  Collective."""
        if self.group.size == 1:
            return
        from holdfast.live.saving.same_root import check_claimed

        try:
            for store in self.homes:
                check_claimed(self.group, store, self.claim)
        except UsageError:
            self.release()
            raise

    def release(self) -> None:
        """Release the homes, if storage answers."""
        for store in self.homes if self.group.rank == 0 else ():
            try:
                with within(RELEASE_S):
                    release(store, self.claim)
            except HoldfastError as error:
                emit("release.failed", error=str(error))

    @property
    def run(self) -> int:
        return self.claim.run

    def own(self, line: Lineage) -> None:
        """Let the run delete its own steps and those of its lineage, and no others."""
        self.durable.steps.line = line

    # -- a restart --------------------------------------------------------------------------------

    def have_moved_on(self) -> bool:
        """True if a tier of any rank has kept newer steps than a restart's survey may show.  Collective if
        a tier follows steps."""
        followers = [tier for tier in self if tier.follows_steps]
        return bool(followers) and self.group.any(any(t.has_moved_on() for t in followers))

    def leave_behind(self, base: int | None) -> None:
        """Go on as a new run after going back to the full step `base` and its records, so that later saves
        are newer than the abandoned ones.  Collective; blocks."""
        for tier in reversed(self):
            tier.settle(self.group.deadline_s)
        with ExitStack() as paused:
            for tier in self:
                paused.enter_context(tier.pause())
            self.claim, *_ = self._take()
            for tier in self:
                tier.adopt(self.claim, base)
        for tier in reversed(self):
            tier.announce(self.run)

    # -- the end ----------------------------------------------------------------------------------

    def close(self, timeout: float | None, *, finished: bool) -> None:
        """Wait for pending work and end, the nearest tier first, because its state goes on to the others.
        Deadline after `timeout`, or `deadline_s`, for all tiers together.  `finished`: snapshots are no
        longer needed."""
        limit_s = self.group.deadline_s if timeout is None else timeout
        until = time.monotonic() + limit_s

        def close(tier: Tier) -> None:
            left_s = max(until - time.monotonic(), LEAST_S)
            tier.close(left_s, finished=finished, is_asked=timeout is not None)

        try:
            with ExitStack() as last:
                for tier in self:
                    last.callback(close, tier)
        except Deadline as late:
            late.message = (
                f"not all was saved when close() had waited {limit_s:g} s: {late.message}"
            )
            raise
        finally:
            self.saver.close()


# -- the table ------------------------------------------------------------------------------------


def _upload(run: Tiers, options: TierOptions) -> Tier | None:
    if options.upload is None:
        return None
    from holdfast.tiers.mirror.upload import Upload

    keep = options.upload_keep or Keep()
    return Upload(run.durable.steps, run.homes[1], run.group, run.claim, keep)


def _memory(run: Tiers, options: TierOptions) -> Tier | None:
    if options.memory is None:
        return None
    from holdfast.tiers.memory.starting import start

    return start(options.memory, run.saver, run.durable, run.state)


def _delta(run: Tiers, options: TierOptions) -> Tier | None:
    if options.delta is None:
        return None
    from holdfast.core.checkpoint.peers import raise_on_all
    from holdfast.tiers.records.log import mark_log
    from holdfast.tiers.records.tier import DeltaTier

    with raise_on_all(run.group, 0):
        tier = DeltaTier(
            run.state,
            run.group,
            run.durable.steps,
            options.delta,
            run.notices,
            run=run.run,
            mesh=run.mesh,
            on_resize=run.on_resize,
            is_tuned=run.is_tuned,
        )
    run.durable.steps.also_tidy = partial(mark_log, max_bytes=options.delta.bound)
    if (upload := run.get("upload")) is not None:
        upload.keep_records(options.delta, tier.way.flush)
    return tier


MAKERS: dict[str, Callable[[Tiers, TierOptions], Tier | None]] = {
    "upload": _upload,
    ROOT: lambda run, options: RootTier(run.durable),
    "memory": _memory,
    "delta": _delta,
}
"""The makers of tiers, from the farthest to the nearest: each returns None unless its tier is asked for."""
