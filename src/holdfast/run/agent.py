"""The agent of a node: torch's, but that its workers leave and enter where torch's die and are born."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api as launcher

from holdfast.background import ending
from holdfast.run.workers import Launch, Workers

SAME = 3
"""How often the same step may fail in the same way, before the run ends."""


class Agent(LocalElasticAgent):  # type: ignore[misc]
    """Recovers in place where it can."""

    def __init__(self, launch: Launch, **known: Any) -> None:
        super().__init__(**known)
        self._launch = launch
        self._failed: list[tuple[object, ...]] = []
        self._since: float | None = None
        """When the last failure was seen."""
        self._gives_up = False
        """No restart is left."""

    @property
    def workers(self) -> Workers | None:
        context = self._pcontext
        assert context is None or isinstance(context, Workers)
        return context

    def begin(self, **known: Any) -> Workers:
        """What torch calls to start a set of processes: go on with the one there is, if any."""
        workers = self.workers
        if workers is not None:
            workers.enter(known["envs"])
            return workers
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
        """Meet the other nodes, with a new store for the ranks: torch's handler would keep the one it has,
        with the addresses of the attempt before, and ranks keep none of their keys apart."""
        for name in ("_shared_tcp_store_server", "_bootstrap_store_info"):
            if hasattr(self._rdzv_handler, name):
                setattr(self._rdzv_handler, name, None)
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with _replaced(local_elastic_agent, "start_processes", self.begin):
            ids: dict[int, Any] = super()._start_workers(worker_group)
        if self._since is not None and self.workers is not None:
            took_s, self._since = time.monotonic() - self._since, None
            self._launch.say(
                f"attempt {self.workers.attempt} begins {took_s:.2f} s after the failure"
            )
        return ids

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        workers, self._pcontext = self.workers, None
        super()._shutdown()  # what torch has beside the workers
        self._pcontext = workers
        if workers is not None:
            if self._gives_up:
                workers.give_up()
            else:
                workers.leave()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            self._since = time.monotonic()
            self._tell(result)
            self._gives_up = self._remaining_restarts == 0
        elif self.workers is not None:
            self.workers.pause(worker_group.spec.monitor_interval)
        return result

    def _tell(self, result: RunResult) -> None:
        """Say what failed; let no restart be left if it was the same three times."""
        workers = self.workers
        assert workers is not None
        rank, failure = min(result.failures.items())
        worker = next((w for w in workers.everyone if w.pid == failure.pid), None)
        step = worker.step if worker is not None else 0
        left = worker.left if worker is not None else None
        how = left.kind if left is not None else f"it {ending(failure.exitcode)}"
        raised = failure.error_file_data.get("message", "<NONE>")
        if left is None and raised != "<NONE>":  # as torch has it where there is no file
            how = str(raised["message"] if isinstance(raised, dict) else raised)
        who = rank if failure.exitcode < 0 else None  # all ranks fail alike: each may be the first
        self._failed = [*self._failed[1 - SAME :], (who, step, how)]
        self._launch.say(f"rank {rank} (process {failure.pid}) failed after step {step}: {how}")
        if left is not None:
            self._launch.say(left.error)
        if len(self._failed) == SAME and len(set(self._failed)) == 1:
            self._launch.say(f"this was the {SAME}rd time in the same way, so the run ends")
            self._remaining_restarts = 0


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def in_place_of_torchs(launch: Launch) -> Iterator[None]:
    """In this block torch's launcher makes agents of this kind: it names the class itself."""
    with _replaced(launcher, "LocalElasticAgent", partial(Agent, launch)):
        yield
