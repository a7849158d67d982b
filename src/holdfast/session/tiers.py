"""The tiers that keep a run's state: storage always, host memory and records where that is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Literal

from holdfast.base.errors import Deadline, HoldfastError, UsageError
from holdfast.base.events import emit
from holdfast.base.patience import within
from holdfast.core.checkpoint.claiming import Claim, release
from holdfast.core.checkpoint.lineage import Line
from holdfast.core.checkpoint.tidying import Keep
from holdfast.core.group import Group
from holdfast.core.layout import Mesh
from holdfast.core.store import Store
from holdfast.live.roots import claim_root, sweep_host
from holdfast.live.saving import Saver
from holdfast.live.saving.durable import Durable
from holdfast.live.state.recognising import State

if TYPE_CHECKING:
    from holdfast.tiers.memory.options import Memory
    from holdfast.tiers.memory.tier import MemoryTier
    from holdfast.tiers.mirror.upload import Upload
    from holdfast.tiers.records.options import Delta
    from holdfast.tiers.records.tier import DeltaTier

LEAST_S = 0.1
RELEASE_S = 5.0
"""Seconds that `close` may take beyond its time to give up the root."""
UNFINISHED_S = 30.0
"""Seconds that a run which ends by an error may wait for its upload."""


class Tiers:
    """The tiers of a run.  All ranks call its methods in the same order."""

    def __init__(
        self,
        store: Store,
        group: Group,
        state: Callable[[], State],
        *,
        keep: Keep | None,
        mesh: Mesh | None,
        replicas: Literal["once", "verify", "trust"],
        carry_bytes: int,
        upload: Store | None = None,
        upload_keep: Keep | None = None,
    ) -> None:
        """Takes the root for this run, and `upload`, the home behind it.  Collective.  `state`: gives the
        live state."""
        self.store = store
        self.group = group
        self.state = state
        self.mesh = mesh
        self._behind = upload
        self.claim, self.crashed, self.there = self._take()
        """`crashed`: the run before did not end by closing; `there`: the steps of before, in words."""
        self._check_roots()
        sweep_host(store)
        self.saver = Saver(
            group,
            mesh=mesh,
            deadline_s=group.deadline_s,
            replicas=replicas,
            carry_bytes=carry_bytes,
        )
        self.durable = Durable(store, self.saver, claim=self.claim, run=self.run, keep=keep)
        self.memory: MemoryTier | None = None
        self.delta: DeltaTier | None = None
        self.upload: Upload | None = None
        self.unsound: dict[tuple[object, ...], HoldfastError] = {}
        """Why steps and records that `find` found could not be restored; it passes over them."""
        if upload is not None:
            from holdfast.tiers.mirror.upload import Upload

            self.upload = Upload(
                self.durable.steps, upload, group, self.claim, upload_keep or Keep()
            )

    def _take(self) -> tuple[Claim, bool, str]:
        """Take the homes of the run.  Collective."""
        if self._behind is None:
            return claim_root(self.store, self.group)
        from holdfast.tiers.mirror.claims import claim_both

        return claim_both(self.store, self._behind, self.group)

    def _check_roots(self) -> None:
        """UsageError unless all ranks have the homes that rank 0 has taken.  Collective."""
        if self.group.size == 1:
            return
        from holdfast.live.saving.same_root import check_claimed

        try:
            for store in filter(None, (self.store, self._behind)):
                check_claimed(self.group, store, self.claim)
        except UsageError:
            self.release()
            raise

    @property
    def run(self) -> int:
        return self.claim.run

    def keep(self, memory: Memory | None, delta: Delta | None, on_resize: dict[str, str]) -> None:
        """Begin to keep snapshots in host memory, and a record of every step.  Collective."""
        if memory is not None:
            from holdfast.tiers.memory.starting import start

            self.memory = start(memory, self.saver, self.durable, self.state)
        if delta is not None:
            self._keep_records(delta, on_resize)

    def _keep_records(self, options: Delta, on_resize: dict[str, str]) -> None:
        from holdfast.core.checkpoint.peers import raise_on_all
        from holdfast.tiers.records.log import mark_log
        from holdfast.tiers.records.tier import DeltaTier

        with raise_on_all(self.group, 0):
            self.delta = DeltaTier(
                self.state,
                self.group,
                self.store,
                options,
                run=self.run,
                mesh=self.mesh,
                on_resize=on_resize,
                deadline_s=self.group.deadline_s,
            )
        self.durable.steps.also_tidy = partial(mark_log, max_bytes=options.bound)
        if self.upload is not None:
            self.upload.keep_records(options, self.delta.way.flush)

    def leave_behind(self, base: int | None) -> None:
        """Go on as a new run, after going back to a full step, `base`, and records: what it saves now is
        newer than what it left."""
        if self.memory is not None:
            self.memory.settle(self.group.deadline_s)
        self.durable.settle(self.group.deadline_s)
        with nullcontext() if self.upload is None else self.upload.home.committing:
            self.claim, *_ = self._take()
            self.durable.adopt(self.claim)
            if self.upload is not None:
                self.upload.home.go_on(self.claim, base)
        if self.delta is not None:
            self.delta.adopt(self.run)
        if self.memory is not None:
            self.memory.agent.hello()

    def own(self, line: Line) -> None:
        """Let the run delete steps of the runs that it went on from, and of no others."""
        self.durable.steps.line = line
        if self.upload is not None:
            self.upload.home.line = line

    def close(self, timeout: float | None, *, finished: bool) -> None:
        """Wait for what is pending and end: within `timeout`, or `deadline_s`, for all tiers together.
        `finished`: snapshots are needed no more."""
        limit_s = self.group.deadline_s if timeout is None else timeout
        until = time.monotonic() + limit_s

        def left_s() -> float:
            return max(until - time.monotonic(), LEAST_S)

        try:
            with ExitStack() as last:
                if (upload := self.upload) is not None:
                    most_s = limit_s if finished or timeout is not None else UNFINISHED_S
                    last.callback(lambda: upload.close(min(left_s(), most_s)))
                last.callback(lambda: self.durable.close(left_s()))
                if (memory := self.memory) is not None:
                    last.callback(lambda: memory.close(left_s(), finished=finished))
                if self.delta is not None:
                    last.callback(lambda: self._tidy_log(left_s()))
                    self.delta.close(left_s())
        except Deadline as late:
            late.message = (
                f"not all was saved when close() had waited {limit_s:g} s: {late.message}"
            )
            raise
        finally:
            self.saver.close()

    def _tidy_log(self, limit_s: float) -> None:
        """Tidy up records that were written after the last save had tidied up."""
        if self.group.rank == 0:
            try:
                with within(limit_s):
                    self.durable.steps.tidy_log()
            except HoldfastError as error:
                emit("tidy.failed", error=str(error))

    def release(self) -> None:
        """Give up the root, and the home behind it, if storage answers."""
        for store in (self.store, self._behind) if self.group.rank == 0 else ():
            try:
                with within(RELEASE_S):
                    if store is not None:
                        release(store, self.claim)
            except HoldfastError as error:
                emit("release.failed", error=str(error))
