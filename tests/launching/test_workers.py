"""The workers of a node from one attempt to the next, without processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from holdfast.launch.channel import Beat, LauncherEnd, Left
from holdfast.launch.forkserver import ForkServer
from holdfast.launch.workers import Launch, RankProcess, Workers


class Idle:
    """A fork server of which nobody wants anything."""

    def ended(self) -> dict[int, int]:
        return {}


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    """One marked worker, which has left its function."""
    known: dict[str, Any] = {"entrypoint": "", "args": {0: ()}, "envs": {0: {}}}
    launch = Launch(cast(ForkServer, Idle()), ["script.py"], is_module=False)
    found = Workers(launch, name="worker", logs_specs=DefaultLogsSpecs(str(tmp_path)), **known)
    left = Left(attempt=1, step=3, kind="ValueError", error="", is_own=True)
    found._workers[0] = RankProcess(0, LauncherEnd(), 1, is_marked=True, left=left)
    yield found
    found._workers[0].end.close()
    found._workers[0].end.other.close()


def test_who_was_stuck_is_not_in_the_next_attempt(workers: Workers) -> None:
    workers.worker(0).is_stuck = True
    workers.enter({0: {}})
    assert workers.worker(0).left is None
    assert not workers.worker(0).is_stuck


def test_the_step_of_the_attempt_before_is_one_when_it_is_done_again(workers: Workers) -> None:
    worker = workers.worker(0)
    workers._note(worker, Beat(attempt=1, step=3))
    assert worker.progress.reached == 3
    workers.enter({0: {}})
    for late in (Beat(attempt=1, step=3), Beat(attempt=2, step=0)):
        workers._note(worker, late)
        assert worker.progress.reached == 0
    assert worker.step == 3  # at which it failed, as far as anybody knows
    workers._note(worker, Beat(attempt=2, step=3))
    assert worker.progress.reached == 3


def test_nothing_but_a_file_is_deleted_as_the_report_of_an_error(
    workers: Workers, tmp_path: Path
) -> None:
    report, other = tmp_path / "error.json", tmp_path / "fifo"
    report.write_text("{}")
    os.mkfifo(other)  # in place of the null device, which torch names where logs go there
    for path in (report, other):
        workers.error_files = {0: str(path)}
        workers.worker(0).is_done = True
        workers.enter({0: {}})
    assert not report.exists()
    assert other.exists()


def test_where_logs_go_nowhere_a_worker_has_no_file_for_its_error(workers: Workers) -> None:
    assert workers._environment(0)["TORCHELASTIC_ERROR_FILE"] == workers.error_files[0]
    workers.error_files = {0: os.devnull}
    assert workers._environment(0)["TORCHELASTIC_ERROR_FILE"] == ""
