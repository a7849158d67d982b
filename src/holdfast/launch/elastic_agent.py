"""The agent of a node: torch's elastic agent, whose workers leave and enter instead of dying and
starting."""

from __future__ import annotations

import signal
import time
from collections import UserString
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from socket import gethostname
from typing import Any

import msgspec
from msgspec import structs
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    WorkerGroup,
    WorkerState,
)
from torch.distributed.elastic.agent.server.api import Worker as Rank
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
)
from torch.distributed.launcher import api as launcher

from holdfast.base.background import ending
from holdfast.base.errors import need
from holdfast.launch.nodes import (
    EndOfRound,
    Introduction,
    RankFailure,
    addresses,
    blamed,
    first_ranks,
    may_be_of_a_peer,
    of_others,
)
from holdfast.launch.rendezvous import Rendezvous, quick, replaced
from holdfast.launch.repeated_failures import SAME, Failures, cause
from holdfast.launch.round import Round
from holdfast.launch.workers import SETTLE_S, Launch, Workers

need(
    "torch", LocalElasticAgent,
    "_assign_worker_ranks", "_monitor_workers", "_rendezvous", "_restart_workers", "_shutdown",
    "_start_workers", "_stop_workers",
)  # fmt: skip

UNSAVED_S = 60.0
"""Seconds to wait for a snapshot of a script that reports no step and saves nothing."""

LAST_S = 5.0
"""Seconds that a node waits for the others at the end if a node was lost; torch would wait for that one
too."""


class NodeAgent(LocalElasticAgent):  # type: ignore[misc]
    """torch's agent, with recovery in place where the script allows it."""

    _remaining_restarts: int
    """torch's count."""

    def __init__(self, launch: Launch, **known: Any) -> None:
        super().__init__(**known)
        self._launch = launch
        need(
            "torch", self,
            "_exit_barrier_timeout", "_pcontext", "_rdzv_handler", "_remaining_restarts", "_worker_group",
        )  # fmt: skip
        handler = self._rdzv_handler
        self._nodes = handler if isinstance(handler, Rendezvous) else None
        """The place where this node meets others; None if it is the only one."""
        self._again, self._causes = Failures(), frozenset[str]()
        self._failed_at: float | None = None
        self._waits_since: tuple[float, int] | None = None
        """Since when a change (a node to take in, a ready process) waits for a snapshot, and the commits
        then."""
        self._blamed: RankFailure | None = None
        """The failure on this node that all nodes blame for the end of the round."""
        self._begins_anew = False
        """All ranks have left, and no failure on this node was to blame."""
        self._gives_up = False
        """No restart is left."""
        self._log_line_prefixes: dict[int, UserString] = {}
        """The text that torch writes before each line of a slot.  It may name the rank, which may
        change."""
        self._leaves = False
        """The others go on without this node."""
        self._in_kernel = set[int]()
        """Processes stuck in the kernel for longer than TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT."""

    @property
    def workers(self) -> Workers | None:
        context: Workers | None = self._pcontext
        return context

    @property
    def _running(self) -> Workers:
        """The workers; an error before they have begun."""
        workers = self.workers
        if workers is None:
            raise RuntimeError("no workers have begun")
        return workers

    def begin(self, **known: Any) -> Workers:
        """Start the processes for torch; if there are some already, have these enter the next attempt."""
        workers = self.workers
        prefixes = known.get("log_line_prefixes") or {}
        if workers is not None:
            for rank, text in prefixes.items():
                self._log_line_prefixes[workers.slots[rank]].data = text
            workers.enter(known["envs"])
            return workers
        self._log_line_prefixes = {rank: UserString(text) for rank, text in prefixes.items()}
        known["log_line_prefixes"] = self._log_line_prefixes
        expected = {
            name: known[name]
            for name in ("name", "entrypoint", "args", "envs", "logs_specs", "log_line_prefixes",
                         "duplicate_stdout_filters", "duplicate_stderr_filters")
            if name in known
        }  # fmt: skip
        workers = Workers(self._launch, **expected)
        workers.start()
        return workers

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other nodes, with a new store for the ranks.

        torch's handler would keep the store of the previous attempt, and the ranks' keys in it would clash.
        """
        for name in ("_shared_tcp_store_server", "_bootstrap_store_info"):
            if hasattr(self._rdzv_handler, name):
                setattr(self._rdzv_handler, name, None)
        self._launch.spare_files.free()
        if self.workers is not None:
            worker_group.spec.local_world_size = self.workers.choose_slots()
        if self._nodes is not None:
            num_ranks = worker_group.spec.local_world_size
            role = worker_group.spec.role
            self._nodes.introduction = Introduction(
                gethostname(), num_ranks, addresses(), role=role
            )
        try:
            super()._rendezvous(worker_group)
        except (RendezvousClosedError, RendezvousGracefulExitError):
            if self.workers is not None:
                self.workers.give_up()
            raise

    def _assign_worker_ranks(self, store: Any, node: int, count: int, spec: Any) -> list[Any]:
        """Number the ranks from the introductions of all nodes, without asking the store."""
        if self._nodes is None or self._nodes.round is None:
            ranks: list[Any] = super()._assign_worker_ranks(store, node, count, spec)
            return ranks
        nodes = self._nodes.round.nodes
        *firsts, size = first_ranks(nodes)
        of_role = [n.num_ranks if n.role == nodes[node].role else 0 for n in nodes]
        return [
            Rank(
                local_rank=local,
                global_rank=firsts[node] + local,
                role_rank=sum(of_role[:node]) + local,
                world_size=size,
                role_world_size=sum(of_role),
            )
            for local in range(spec.local_world_size)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with replaced(local_elastic_agent, "start_processes", self.begin):
            ids: dict[int, Any] = super()._start_workers(worker_group)
        workers, nodes = self._running, self._nodes
        self._waits_since = None
        if nodes is not None and nodes.round is not None:
            workers.hosts = of_others(nodes.round.nodes, nodes.round.me)
            workers.may_end = partial(nodes.are_all, "done")
        if self._failed_at is not None:
            took_s, self._failed_at = time.monotonic() - self._failed_at, None
            size = worker_group.workers[0].world_size
            self._launch.say(
                f"attempt {workers.attempt} begins with {size} ranks, {took_s:.2f} s after the last ended"
            )
        return ids

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        workers, self._pcontext = self.workers, None
        super()._shutdown()  # torch's own state beside the workers
        self._pcontext = workers
        if workers is not None:
            if self._gives_up:
                workers.give_up()
            else:
                workers.leave()
        if self._leaves and self._nodes is not None:
            self._nodes.leave()

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run to the end.  A node that waited in vain to be taken in ends with success."""
        try:
            result = super().run(role)
        except SignalException:
            if self._nodes is not None:
                self._nodes.leave()  # the others need not find out
            raise
        return result or RunResult(state=WorkerState.SUCCEEDED)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result, workers = super()._monitor_workers(worker_group), self._running
        if result.state == WorkerState.UNHEALTHY:
            result = self._have_failed_in_the_kernel()
        if self._nodes is not None:
            self._nodes.check()
            result = self._seen_together(self._nodes, result)
        if result.state == WorkerState.FAILED:
            self._failed_at = self._failed_at or time.monotonic()
            self._consider(result)
        elif result.state == WorkerState.HEALTHY:
            if self._nodes is None:
                grows = workers.can_grow and not workers.has_ended
                self._begins_anew = self._is_saved("a process is ready" if grows else "")
            if self._begins_anew:
                self._begins_anew = False
                self._failed_at = self._failed_at or time.monotonic()
                self._restart_workers(worker_group)
            if workers.entered_s > SETTLE_S:
                self._launch.spare_files.hold()
            workers.pause(worker_group.spec.monitor_interval)
        return result

    # -- several nodes ----------------------------------------------------------------------------

    def _seen_together(self, nodes: Rendezvous, result: RunResult) -> RunResult:
        """Judge the ranks of this node together with those of the other nodes."""
        workers, of, view = self._running, nodes.current, nodes.view
        if result.state == WorkerState.SUCCEEDED and nodes.are_all("out"):
            if of.lost(view) or not nodes.view.are_out:
                self._exit_barrier_timeout = LAST_S
            nodes.say_it_ended_well()
            return result
        failures, lost = self._failures(result), [] if view.are_done else of.lost(view)
        is_over = view.ends or bool(failures or lost)
        if not is_over and not view.are_done:
            is_awaited = view.waiting and of.me == 0
            ready = "a process is ready" if workers.can_grow else ""
            is_over = self._is_saved("a node waits to be taken in" if is_awaited else ready)
        if not is_over:
            return RunResult(state=WorkerState.HEALTHY)
        self._failed_at = time.monotonic()
        is_calm = not failures and not lost and (view.is_calm or not view.ends)
        is_first = nodes.end_round(is_calm=is_calm)
        workers.leave(is_calm=is_calm)
        known = {failure.pid for failure in failures}
        late = [self._failure(rank) for rank in workers.failed()]
        failures += [structs.replace(f, is_late=True) for f in late if f.pid not in known]
        nodes.say("card", msgspec.json.encode(EndOfRound(failures, is_first())))
        cards, lost = nodes.cards()
        behind = blamed(cards, lost)
        if behind is not None and behind[0] == of.me:
            self._blamed = behind[1]
            failed = {behind[1].rank: workers.failure(self._local(behind[1].pid))}
            return RunResult(state=WorkerState.FAILED, failures=failed)
        self._tell_of_others(of, behind, lost)
        self._begins_anew = True
        return RunResult(state=WorkerState.HEALTHY)

    def _tell_of_others(
        self, of: Round, behind: tuple[int, RankFailure] | None, lost: list[int]
    ) -> None:
        if of.me in lost:
            self._launch.say("the other nodes have gone on without this one; it joins them again")
        elif lost:
            self._launch.say(f"{of.named(lost)} is lost; the other nodes go on")
        elif behind is not None:
            host, failure = of.nodes[behind[0]].host, behind[1]
            self._again.note(failure, host, -1, self._running.entered_s)
            self._launch.say(
                f"rank {failure.rank} on {host} failed after step {failure.step}: {failure.how}"
            )
            if failure.doubtful_s:
                self._running.doubt(failure.doubtful_s)

    def _is_saved(self, why: str) -> bool:
        """Tell whether a new snapshot has completed since a change began to wait for one.

        `why` names the change; empty: there is none.  A script that reports no step and has saved nothing
        may never save, so the wait ends after `UNSAVED_S`; for an unmarked script there is no wait.
        """
        workers, now = self._running, time.monotonic()
        if not why:
            self._waits_since = None
            return False
        if self._waits_since is None:
            self._waits_since = now, workers.commits
            if workers.is_marked:
                self._launch.say(f"{why}: at the next snapshot all ranks begin anew")
        since, commits = self._waits_since
        is_late = not workers.are_counting and now - since > UNSAVED_S
        return workers.commits > commits or is_late or not workers.is_marked

    # -- failures ---------------------------------------------------------------------------------

    def _have_failed_in_the_kernel(self) -> RunResult:
        """Return the ranks stuck in the kernel for longer than torch's limit, as failures.

        torch sets the restarts to zero, and its result names no rank.
        """
        limit_s, begun = need(
            "torch", self, "_uninterruptible_state_timeout", "_uninterruptible_state_first_seen"
        )
        now = time.monotonic()
        self._in_kernel = {pid for pid, since in begun.items() if now - since >= limit_s}
        failures = {
            self._worker_group.workers[local].global_rank: self._running.failure(local)
            for local, pid in self._running.pids().items()
            if pid in self._in_kernel
        }
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _local(self, pid: int) -> int:
        return next(local for local, of in self._running.pids().items() if of == pid)

    def _failures(self, result: RunResult) -> list[RankFailure]:
        """Return the failures of this node's ranks, by global rank."""
        failed = [failure for _, failure in sorted(result.failures.items())]
        return [self._failure(self._local(failure.pid)) for failure in failed]

    def _failure(self, local: int) -> RankFailure:
        """Return how a rank of this node failed."""
        worker = self._running.worker(local)
        rank = self._worker_group.workers[local].global_rank
        left, status = worker.left, worker.status
        if worker.pid in self._in_kernel:
            how = "it waits in the kernel and cannot be interrupted (state D)"
            return RankFailure(rank, worker.pid, worker.step, how, True)
        if left is not None:
            is_sure = not may_be_of_a_peer(left.kind)
            return RankFailure(rank, worker.pid, worker.step, left.kind, is_sure, True, left.error)
        if status is None:
            how, doubtful_s = "it hangs", worker.doubtful_s
            return RankFailure(rank, worker.pid, worker.step, how, False, doubtful_s=doubtful_s)
        is_sure = status != -signal.SIGABRT and (status < 0 or worker.is_marked)
        raised = self._running.failure(local).error_file_data.get("message", "<NONE>")
        how = f"it {ending(status)}"
        if raised != "<NONE>":  # as torch has it where there is no file
            how = str(raised["message"] if isinstance(raised, dict) else raised)
        return RankFailure(rank, worker.pid, worker.step, how, is_sure, is_of_script=status > 0)

    def _consider(self, result: RunResult) -> None:
        """Report the failure; if it has repeated, leave out its slot or this node, or end the run."""
        workers, failure = self._running, self._blamed or self._failures(result)[0]
        self._blamed = None
        self._launch.say(
            f"rank {failure.rank} (process {failure.pid}) failed after step {failure.step}: "
            f"{failure.how}"
        )
        if failure.error:
            self._launch.say(failure.error)
        slot = workers.slots[self._local(failure.pid)]
        self._again.note(failure, gethostname(), slot, workers.entered_s)
        if failure.doubtful_s:
            workers.doubt(failure.doubtful_s)
            self._remaining_restarts += (
                1  # torch subtracts one, but a script at work has not failed
            )
        elif self._again.are_of_a_slot and workers.may_leave_out(slot) and self._is_new(failure):
            workers.left_out.add(slot)
            self._again.forget()
            self._launch.say(
                f"local rank {slot} failed {SAME} times at once: it is left out from now on"
            )
        elif self._again.are_of_a_node and self._may_leave() and self._is_new(failure):
            self._launch.say(
                f"ranks of {gethostname()} failed {SAME} times at once: this node leaves the run"
            )
            self._leaves = True
            self._remaining_restarts = 0
        elif self._again.are_same:
            self._launch.say(f"this was the {SAME}rd time in the same way, so the run ends")
            self._remaining_restarts = 0
        self._gives_up = self._remaining_restarts == 0

    def _may_leave(self) -> bool:
        """Tell whether the run has enough nodes without this one."""
        nodes = self._nodes
        return nodes is not None and nodes.round is not None and nodes.num_others >= nodes.least

    def _is_new(self, failure: RankFailure) -> bool:
        """Tell whether nothing was left out for this cause yet; otherwise the script is to blame."""
        known = cause(failure)
        if self._nodes is not None:
            return self._nodes.is_new(known)
        is_new, self._causes = known not in self._causes, self._causes | {known}
        return is_new


@contextmanager
def in_place_of_torchs(launch: Launch) -> Iterator[None]:
    """In this block torch's launcher makes `NodeAgent`s: torch has no option for the class."""
    with replaced(launcher, "LocalElasticAgent", partial(NodeAgent, launch)), quick(launch.say):
        yield
