"""An object is replaced only while it is the one that was seen: against other processes, and stuck ones."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import warnings
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from builders import FSDP_TP, build, describe, transformer
from holdfast.core.checkpoint.committing import commit
from holdfast.core.checkpoint.names import manifest_key, read_manifest
from holdfast.core.checkpoint.verifying import verify
from holdfast.core.format.manifest import encode_manifest
from holdfast.errors import Exists, HoldfastWarning, NotFound, Unavailable, UsageError
from holdfast.store import LocalStore, Store, replacing
from holdfast.testing import Faulty
from holdfast.testing.stores import raised

SPAWN = multiprocessing.get_context("spawn")
WAIT_S = 300
NUM_ROUNDS = 20


def count_up(root: str, start: Barrier) -> None:
    """Add one to a number, again and again, without losing what others add."""
    store, done = LocalStore(root), 0
    start.wait(WAIT_S)
    while done < NUM_ROUNDS:
        seen = store.get("count")
        try:
            store.put("count", str(int(seen) + 1).encode(), replacing=seen)
            done += 1
        except Exists:
            continue


def run_all(target: Any, *each: tuple[Any, ...]) -> list[int]:
    """Processes to their end; their exit codes."""
    processes = [SPAWN.Process(target=target, args=args) for args in each]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(WAIT_S)
    finally:
        for process in processes:
            process.kill()
    return [p.exitcode if p.exitcode is not None else -1 for p in processes]


def test_processes_lose_no_replacement(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("count", b"0")
    start = SPAWN.Barrier(3)
    assert run_all(count_up, *[(str(tmp_path), start)] * 3) == [0, 0, 0]
    assert store.get("count") == str(3 * NUM_ROUNDS).encode()
    assert [p.name for p in tmp_path.iterdir()] == ["count"]


class Meeting:
    """A store whose user waits for the other process, when it has seen the manifest."""

    def __init__(self, store: Store, key: str, both: Barrier) -> None:
        self._store, self._key, self._both = store, key, both

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        first, self._key = key == self._key, self._key if key != self._key else ""
        try:
            return self._store.get(key)
        finally:
            if first:
                self._both.wait(WAIT_S)


def commit_anew(root: str, run: int, both: Barrier, wins: Any) -> None:
    """Commit step 5, which had been seen by both processes before either commits."""
    store = LocalStore(root)
    manifest = describe(FSDP_TP, {}, step=5, run=run)
    try:
        commit(Meeting(store, manifest_key(5), both), manifest)  # type: ignore[arg-type]
        wins.put((run, None))
    except UsageError as error:
        wins.put((run, str(error)))


@pytest.mark.parametrize("there", [False, True], ids=["new", "replaced"])
def test_of_two_processes_that_commit_one_step_one_does(tmp_path: Path, there: bool) -> None:
    store = LocalStore(tmp_path)
    if there:
        build(store, FSDP_TP, transformer(), step=5, run=1)
    both, wins = SPAWN.Barrier(2), SPAWN.Queue()
    codes = run_all(commit_anew, *((str(tmp_path), run, both, wins) for run in (7, 8)))
    assert codes == [0, 0]
    told = dict(wins.get(timeout=WAIT_S) for _ in range(2))
    (winner,) = (run for run, error in told.items() if error is None)
    (error,) = (error for error in told.values() if error is not None)
    assert "another process has saved step 5" in error and "which is not committed" in error
    assert read_manifest(store, 5).run == winner


def test_a_step_that_is_deleted_meanwhile_is_not_committed(tmp_path: Path) -> None:
    inner = LocalStore(tmp_path)
    build(inner, FSDP_TP, transformer(), step=5)
    store = Faulty(inner, lambda op, key: inner.delete(manifest_key(5)) if op == "put" else None)
    error = raised(UsageError, commit, store, describe(FSDP_TP, transformer(), step=5, run=2))
    assert "another process has deleted step 5" in str(error)


def test_a_damaged_manifest_is_replaced_and_the_same_commit_may_be_said_again(
    tmp_path: Path,
) -> None:
    store = LocalStore(tmp_path)
    manifest = build(store, FSDP_TP, transformer(), step=5)
    for damaged in (b"", b"{", encode_manifest(manifest)):
        store.put(manifest_key(5), damaged)
        commit(store, manifest)
        assert verify(store, 5).good
    calls: list[str] = []

    def before(op: str, key: str) -> None:
        if op == "put" and not calls:  # another process says the same commit in this moment
            calls.append(key)
            store.put(key, encode_manifest(manifest))

    store.put(manifest_key(5), b"")
    commit(Faulty(store, before), manifest)
    assert calls and verify(store, 5).good


STUCK = """
import sys, time
from holdfast.core.store.replacing import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_stopped_process_is_not_waited_for_for_ever(
    tmp_path: Path,
) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"first")
    holder = subprocess.Popen(
        [sys.executable, "-c", STUCK, str(tmp_path / "a")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGSTOP)
        waiting = pytest.raises(Unavailable, match="being replaced by another process")
        with waiting, replacing.locked(str(tmp_path / "a"), deadline_s=0.05):
            pass
        assert store.get("a") == b"first"
    finally:
        holder.kill()
        holder.wait()
    store.put("a", b"second", replacing=b"first")  # the kernel has dropped the lock of the dead
    assert store.get("a") == b"second"
    holder.stdout.close()


def test_where_there_are_no_locks_it_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, flags: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    store = LocalStore(tmp_path)
    store.put("a", b"first")
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(HoldfastWarning, match="has no locks"):
        store.put("a", b"second", replacing=b"first")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        raised(Exists, store.put, "a", b"third", replacing=b"first")
        raised(NotFound, store.put, "b", b"third", replacing=b"first")
    assert store.get("a") == b"second"
