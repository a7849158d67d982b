"""The tiers of a run, and the parts that they share: its homes, and the saves to them.

The root is always there, and behind it there may be a second home.  The nearer tiers are made by switches,
which `session/checkpointer.py` has beside the arguments.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol

from holdfast.base.arguments import instance_of, path_of
from holdfast.base.errors import Deadline, HoldfastError, UsageError
from holdfast.base.events import emit
from holdfast.base.notices import Notices
from holdfast.base.storage_deadlines import within
from holdfast.core.checkpoint.claiming import Claim, release
from holdfast.core.checkpoint.tidying import Keep
from holdfast.core.group import Group
from holdfast.core.layout import Mesh
from holdfast.live.every import Every
from holdfast.live.roots import claim_root, open_shared, sweep_host
from holdfast.live.saving import Save, Saver
from holdfast.live.saving.durable import Durable
from holdfast.live.saving.progress import TierProgress
from holdfast.live.state.recognising import State
from holdfast.live.tier import Asked, Collect, RunParts, Tier

if TYPE_CHECKING:
    from holdfast.live.shelves import Shelf

ROOT = "durable"
LEAST_S = 0.1
RELEASE_S = 5.0
"""Seconds beyond its limit in which `close` releases the root."""


class Switch(Protocol):
    """Makes a tier of what a user gives for it."""

    def check(self, given: Any) -> None:
        """UsageError if this cannot be given.  `given`: None if the user has not named the tier."""

    def start(self, run: RunParts, given: Any) -> Tier | None:
        """Return the tier, of what was checked; None if it is not asked for.  Collective."""


@dataclass(frozen=True, slots=True)
class Switched(Switch):
    """A tier that is made if its argument of a Checkpointer is given, and whose modules are imported then.

    `options`: the class of the argument.  `module`: has `start(run, given)`.
    """

    argument: str
    options: str
    """As `module:name`."""
    module: str

    def check(self, given: Any) -> None:
        if given is not None:
            _check_options(given, self.argument, self.options)

    def start(self, run: RunParts, given: Any) -> Tier | None:
        tier: Tier | None = None if given is None else import_module(self.module).start(run, given)
        return tier


def _check_options(given: Any, argument: str, options: str) -> None:
    module, _, name = options.partition(":")
    cls, what = getattr(import_module(module), name), f"a holdfast.{name}(...), or None"
    instance_of(given, cls, "Checkpointer", argument, what)


@dataclass(frozen=True, slots=True)
class Homes:
    """The arguments of a Checkpointer for its root, and for the home behind it; see there."""

    root: str
    keep: Keep | None
    upload: str | os.PathLike[str] | None
    upload_keep: Keep | None

    @property
    def best(self) -> tuple[str, str] | None:
        """The metric, and `min` or `max`, by which a rule keeps the best steps; None without one."""
        rules = [k.best for k in (self.keep, self.upload_keep) if k is not None and k.best]
        return (rules[0][0], rules[0][-1]) if rules else None  # type: ignore[return-value]

    def checked(self) -> Homes:
        """Return the options with `upload` as a URL.  UsageError for wrong types or combinations."""
        for name in ("keep", "upload_keep"):
            if (given := getattr(self, name)) is not None:
                _check_options(given, name, "holdfast.core.checkpoint.tidying:Keep")
        if self.upload is None and self.upload_keep is None:
            return self
        from holdfast.tiers.mirror.homes import check_homes

        upload = None if self.upload is None else path_of(self.upload, "Checkpointer", "upload")
        check_homes(self.root, upload, self.upload_keep)
        return replace(self, upload=upload)


class RootTier(Tier):
    """The steps of the root.  The session decides when a durable save is due."""

    name = ROOT
    carries = True

    def __init__(self, durable: Durable) -> None:
        self.news = durable.news
        self._durable = durable
        self.progress: TierProgress = TierProgress()

    def prepare(self, collect: Collect, every: Every) -> Save | None:
        return None if every.durable is None else self._durable.prepare(collect)

    def carry(self, collect: Collect, asked: Asked) -> Save:
        return self._durable.begin(
            collect,
            asked.step,
            must=asked.must,
            yields=asked.yields,
            attached=asked.attached,
        )

    def saving(self, save: Save) -> None:
        self.progress.watch(save)

    def shelf(self) -> Shelf:
        from holdfast.live.shelves import StoredShelf

        durable = self._durable
        known = durable.steps.known
        return StoredShelf(
            durable.store, durable.group, tier=ROOT, is_root=True, known=known, records=True
        )

    def settle(self, limit_s: float) -> None:
        self._durable.settle(limit_s)

    def adopt(self, claim: Claim, base: int | None) -> None:
        self._durable.adopt(claim)

    def close(self, limit_s: float, *, finished: bool, is_asked: bool) -> None:
        self._durable.close(limit_s)


class Tiers(RunParts):
    """The tiers of a run, from the farthest to the nearest.  All ranks make all calls in the same order."""

    root = ROOT

    def __init__(
        self,
        group: Group,
        state: Callable[[], State],
        homes: Homes,
        switched: Mapping[str, tuple[Switch, Any]],
        notices: Notices,
        *,
        mesh: Mesh | None,
        replicas: Literal["once", "verify", "trust"],
        on_resize: dict[str, str],
        is_tuned: bool,
    ) -> None:
        """Claims the root for this run, and the home behind it.  Collective; blocks.  `state`: returns the
        live state.  `switched`: the switches of nearer tiers, by name, and what is given for them.
        `is_tuned`: frequencies follow measurements."""
        self.group = group
        self.state = state
        self.notices = notices
        self.mesh = mesh
        self.on_resize = on_resize
        self.is_tuned = is_tuned
        urls = (homes.root,) if homes.upload is None else (homes.root, homes.upload)
        self.homes = [open_shared(url, group) for url in urls]
        """The root, and the home behind it if there is one."""
        self.store = self.homes[0]
        self._best = homes.best
        self.claim, self.crashed, self.there = self._take()
        """`crashed`: the previous run did not close; `there`: the steps in the root, in words."""
        self._check_homes()
        sweep_host(self.store)
        self.saver = Saver(group, mesh=mesh, deadline_s=group.deadline_s, replicas=replicas)
        self.durable = Durable(
            self.store, self.saver, claim=self.claim, run=self.run, keep=homes.keep
        )
        self.unsound: dict[tuple[object, ...], HoldfastError] = {}
        """Errors of steps and records that `find` had found and that could not be restored; `find` passes
        over them."""
        self._tiers: dict[str, Tier] = {}
        if len(self.homes) > 1:
            self._tiers["upload"] = self._behind(homes.upload_keep or Keep())
        self._tiers[ROOT] = RootTier(self.durable)
        for name, (switch, given) in switched.items():
            if (tier := switch.start(self, given)) is not None:
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

    def _behind(self, keep: Keep) -> Tier:
        """Return the tier of the home behind the root."""
        from holdfast.tiers.mirror.upload import Upload

        return Upload(self.durable.steps, self.homes[1], self.group, self.claim, keep)

    def _take(self) -> tuple[Claim, bool, str]:
        """Claim the homes of the run.  Collective."""
        if len(self.homes) == 1:
            return claim_root(self.store, self.group, self._best)
        from holdfast.tiers.mirror.homes import claim_both

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
