"""What is deleted after a commit: never a file that another rank is writing for the next one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

import holdfast
from builders import Tensor, build
from holdfast import Keep
from holdfast.core.checkpoint.claiming import claim, once_attempt
from holdfast.core.checkpoint.names import manifest_key, read_manifest, run_of_log
from holdfast.core.checkpoint.pruning import delete_step, prune
from holdfast.core.checkpoint.tidying import discard, sweep
from holdfast.core.checkpoint.verifying import verify
from holdfast.core.codec.digest import hexdigest
from holdfast.errors import NotFound
from holdfast.layout import Mesh
from holdfast.store import LocalStore, Store, open_store
from holdfast.testing import Counting
from holdfast.tiers.records.log import tidy_log
from holdfast.tiers.records.segment import plan_key, segment_key
from holdfast.tiers.records.writer_registry import WriterEntry, announce, writing_key
from system.crash.single import memory


def step(store: Store, number: int, run: int = 1, value: float = 1.0, **options) -> str:
    """One rank's step; returns its attempt."""
    tensors = {"w": Tensor(np.full(5, value))}
    return build(store, Mesh((("dp", 1),)), tensors, step=number, run=run, **options).attempt


def put_image(store: Store, step: int, attempt: str, rank: int = 1) -> str:
    key = f"steps/{step:010d}/{attempt}/r{rank:05d}.safetensors"
    store.put(key, b"being written")
    return key


def dead_attempt() -> str:
    """As `once_attempt` of a process that has ended."""
    code = "from holdfast.checkpoint.claiming import once_attempt; print(once_attempt())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def test_sweep_knows_attempts_of_any_number() -> None:
    store = memory()
    mine = msgspec.structs.replace(claim(store), run=3)
    step(store, 10, run=3)
    put_image(store, 20, "0003-1000000")
    later = put_image(store, 30, "0003-1000002")
    sweep(store, mine, 1_000_001)
    assert [key for key in store.list("steps/") if "-1000" in key] == [later]


def test_sweep_spares_what_a_writer_of_records_has_begun(tmp_path: Path) -> None:
    """The writer of a run that is over may still be at it; steps 3 and 4 are no attempt 4 of run 3."""
    store = LocalStore(tmp_path)
    mine = msgspec.structs.replace(claim(store), run=9)
    old = store.create("steps/0000000020/0003-000004/rank0.seg", 3)
    segment = store.create(segment_key(5, 3, 4, 0), 3)
    for writer in (old, segment):
        writer.write(0, b"abc")
    sweep(store, mine, 5)
    segment.finish()
    assert store.get(segment_key(5, 3, 4, 0)) == b"abc"
    with pytest.raises(NotFound):
        old.finish()


def test_files_of_the_log_are_known_as_ours() -> None:
    """By the names that those have who write them; no others are."""
    ours = [segment_key(3, 1, 2, 0), plan_key(3, hexdigest(b"plan")), writing_key(3, 0, 4711)]
    assert [run_of_log(key) for key in ours] == [3, 3, 3]
    others = [
        "train.log",
        "1763868000/events.out",
        "0000000003/notes.txt",
        "0000000003/plan-x.json",
    ]
    assert {run_of_log(f"log/{name}") for name in others} == {None}


def test_what_tells_of_writers_goes_when_a_later_run_has_saved(tmp_path: Path) -> None:
    """But not while they are at work here, nor that of the run itself; and so do plans of no records."""
    store = LocalStore(tmp_path)
    dead = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    announce(store, 1, 0, dead.pid)
    announce(store, 3, 0, dead.pid)
    dead.communicate()
    announce(store, 2, 0, os.getpid())
    elsewhere = WriterEntry("another host", os.getpid(), "1")
    store.put(writing_key(2, 1, 4711), msgspec.json.encode(elsewhere))
    store.put(writing_key(2, 2, 4712), b"{torn")
    store.put(plan_key(1, hexdigest(b"plan")), b"{}")
    tidy_log(store)
    assert len(store.list("log/")) == 6  # nobody has saved
    step(store, 10, run=3)
    tidy_log(store)
    assert store.list("log/") == [writing_key(2, 0, os.getpid()), writing_key(3, 0, dead.pid)]


def test_sweep_spares_what_is_named_and_what_is_under_way() -> None:
    store = memory()
    mine = msgspec.structs.replace(claim(store), run=3)
    named = step(store, 10, run=3)
    gone = [
        put_image(store, 10, "0002-000009"),  # an older run's, of the same step
        put_image(store, 20, "0003-000004"),  # a failed one of this run
        put_image(store, 20, "0002-1000000"),  # of a run that has made a million snapshots
        put_image(store, 50, dead_attempt()),  # a save by itself, of a process that is gone
    ]
    stay = [
        put_image(store, 30, "0003-000006"),  # the next save of this run: rank 1 is ahead of us
        put_image(store, 40, "0004-000001"),  # a run that has superseded us
        put_image(store, 50, once_attempt()),  # a save by itself, of a process that runs
        put_image(store, 50, "once-0123456789abcdef-1-1-01234567"),  # of another host
        put_image(store, 50, "once-aabbcc"),  # of who knows whom
    ]
    sweep(store, mine, 5)
    left = store.list("steps/")
    assert not set(gone) & set(left)
    assert set(stay) <= set(left)
    assert read_manifest(store, 10).attempt == named
    assert verify(store, 10).good


def test_pruning_a_step_spares_its_next_attempt() -> None:
    """A run that went back prunes an older run's step 100 while rank 1 already writes it anew."""
    store = memory()
    step(store, 100, run=1)
    step(store, 60, run=2)
    ahead = put_image(store, 100, "0002-000007")
    assert prune(store, Keep(last=1)) == [100]
    assert [k for k in store.list("steps/") if "/0000000100/" in k] == [ahead]
    assert holdfast.steps(store.url) == [60]


def test_a_step_of_a_newer_format_is_not_deleted() -> None:
    store = memory()
    store.put(manifest_key(5), b'{"holdfast":2,"step":5,"run":1,' + b" " * 100)
    put_image(store, 5, "0001-000001")
    step(store, 6, run=1)
    before = store.list("steps/")
    assert prune(store, Keep(last=1)) == []
    assert not delete_step(store, 5)
    assert store.list("steps/") == before


def test_the_newest_good_step_stays_even_if_newer_ones_are_damaged() -> None:
    store = memory()
    for number in (1, 2, 3):
        step(store, number)
    for key in store.list("steps/0000000003/"):
        if not key.endswith("manifest.json"):
            store.delete(key)
    assert prune(store, Keep(last=1)) == [1]
    assert verify(store, 2).good


@pytest.mark.parametrize("cut", [20, 200])
def test_a_damaged_manifest_keeps_the_files_it_may_name(cut) -> None:
    store = memory()
    attempt = step(store, 1)
    store.put(manifest_key(1), store.get(manifest_key(1))[:cut])
    before = store.list("steps/")
    discard(store, 1, attempt)
    sweep(store, msgspec.structs.replace(claim(store), run=9), 99)
    assert store.list("steps/") == before


def test_keep_every() -> None:
    store = memory()
    for number in range(1, 11):
        step(store, number)
    assert prune(store, Keep(last=2, every=4)) == [1, 2, 3, 5, 6, 7]
    assert holdfast.steps(store.url) == [4, 8, 9, 10]
    assert prune(store, Keep()) == []


def test_sweeping_reads_no_whole_manifest_where_there_is_nothing_to_delete() -> None:
    store = Counting(memory())
    for number in (1, 2, 3):
        step(store, number)
    store.calls.clear()
    assert sweep(store, msgspec.structs.replace(claim(store), run=9), 99) == []
    assert store.calls["get"] == 0


def test_a_save_by_itself_sweeps_what_a_dead_one_left(tmp_path) -> None:
    store = open_store(tmp_path)
    left = put_image(store, 7, dead_attempt())
    holdfast.save(tmp_path, {"x": 1}, step=8)
    assert left not in store.list("steps/")
    assert holdfast.steps(str(tmp_path)) == [8]


KILLED = """
import os, signal, sys
import holdfast
from holdfast.core.store.local import LocalWriter
LocalWriter.finish = lambda self: os.kill(os.getpid(), signal.SIGKILL)
import torch
holdfast.save(sys.argv[1], {"x": torch.zeros(300_000)}, step=7)
"""


@pytest.mark.slow
def test_a_save_by_itself_leaves_nothing_of_one_killed_while_it_wrote(tmp_path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False)
    assert done.returncode == -9
    assert any(p.name.startswith(".tmp-") for p in tmp_path.rglob("*"))
    holdfast.save(tmp_path, {"x": 1}, step=8)
    assert not any(p.name.startswith(".tmp-") for p in tmp_path.rglob("*"))
    assert [p.name for p in (tmp_path / "steps").iterdir()] == ["0000000008"]


def test_unfinished_files_of_older_runs_go_whoever_made_them(tmp_path) -> None:
    """Of another host, or of this one before it booted: the run is over, and that is enough."""
    store = open_store(tmp_path)
    attempts = {"0001-000003": True, "0009-000001": False, "once-aabbcc": False}
    for attempt in attempts:
        folder = tmp_path / "steps/0000000007" / attempt
        folder.mkdir(parents=True)
        (folder / f".tmp-0123456789abcdef-1-{'0' * 16}").write_bytes(b"half")
    sweep(store, msgspec.structs.replace(claim(store), run=2), 0)
    left = {a: not (tmp_path / "steps/0000000007" / a).exists() for a in attempts}
    assert left == attempts


def test_a_live_run_of_this_process_is_not_over() -> None:
    """Two Checkpointers in one process: the second supersedes the first, and deletes nothing of it."""
    store = memory()
    first = claim(store)
    assert not first.is_over()
    assert claim(store).run == first.run + 1
