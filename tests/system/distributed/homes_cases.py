"""Worker, 2 ranks: a home behind the root, of which each rank uploads its own files."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast.core.checkpoint.names import read_manifest
from holdfast.core.checkpoint.verifying import verify
from holdfast.errors import Unavailable
from holdfast.store import LocalStore, Store, open_store
from holdfast.testing import Counting, Faulty
from holdfast.tiers.mirror import behind as home_behind
from holdfast.tiers.mirror import upload as uploading
from holdfast.tiers.mirror.records import Outage

from .cases import run_all

WAIT_S = 120.0
SHAPE = (512, 513)


def state_of(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.full(SHAPE, float(value))
    return {"data": {"a": distribute_tensor(whole, mesh, [Shard(0)]), "value": float(value)}}


def set_value(state: dict[str, Any], value: float) -> None:
    state["data"]["a"].to_local().fill_(value)
    state["data"]["value"] = float(value)


def value_of(state: dict[str, Any]) -> float:
    values = {float(v) for v in state["data"]["a"].to_local().unique()}
    assert values == {state["data"]["value"]}
    return values.pop()


@contextmanager
def stores(root: Path, behind: Store | None = None) -> Iterator[None]:
    """Let the home behind be a wrapper of it on this rank."""

    def opened(url: str) -> Store:
        store = open_store(url)
        return behind if behind is not None and behind.url == store.url else store

    with patch("holdfast.live.roots.open_store", opened):
        yield


def homes_of(root: Path) -> dict[str, Any]:
    return {"path": root / "root", "upload": root / "behind", "deadline_s": WAIT_S}


def save(ckpt: holdfast.Checkpointer, state: dict[str, Any], step: int) -> holdfast.Save:
    set_value(state, step)
    done = ckpt.save(step)
    done.wait(WAIT_S)
    return done


def until_uploaded(save: holdfast.Save) -> None:
    waited = threading.Event()
    for _ in range(int(WAIT_S * 100)):
        if save.uploaded:
            return
        waited.wait(0.01)
    raise AssertionError("never uploaded")


def is_good(root: Path, step: int) -> bool:
    return verify(LocalStore(root), step).good


def each_rank_uploads_its_own_file(root: Path) -> None:
    state, wanted = state_of(0), []
    copy = home_behind.transfer_files

    def watched(files: Any, target: Store, these: Any, **options: Any) -> int:
        wanted.extend(file.rank for file in these)
        return copy(files, target, these, **options)

    with (
        patch.object(home_behind, "transfer_files", watched),
        holdfast.Checkpointer(state=state, **homes_of(root)) as ckpt,
    ):
        until_uploaded(save(ckpt, state, 3))
    assert wanted == [dist.get_rank()]
    assert is_good(root / "behind", 3)
    one, other = (LocalStore(root / home) for home in ("root", "behind"))
    assert all(one.get(key) == other.get(key) for key in one.list("steps/"))


def a_root_that_is_lost_is_read_from_behind_once(root: Path) -> None:
    state = state_of(0)
    with holdfast.Checkpointer(state=state, **homes_of(root)) as ckpt:
        save(ckpt, state, 3)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root / "root")
    dist.barrier()
    set_value(state, 0)
    counting = Counting(open_store(root / "behind"))
    with (
        stores(root, counting),
        holdfast.Checkpointer(state=state, **homes_of(root)) as ckpt,
    ):
        before = counting.bytes_read
        restored = ckpt.restore()
        read = torch.tensor([counting.bytes_read - before])
        assert (restored, restored.tier, value_of(state)) == (3, "upload", 3.0)
        dist.all_reduce(read)
        files = read_manifest(counting.inner, 3).files
        assert int(read) < 1.1 * sum(file.bytes for file in files)
        until_uploaded(save(ckpt, state, 4))
    assert is_good(root / "behind", 4) and is_good(root / "root", 4)


def what_fails_on_one_rank_is_uploaded_later(root: Path) -> None:
    state, is_away = state_of(0), dist.get_rank() == 1

    def fail(op: str, key: str) -> Exception | None:
        return Unavailable("the bucket is away") if is_away and op == "create" else None

    faulty = Faulty(open_store(root / "behind"), fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with (
            patch.object(uploading, "PAUSE_S", 0.1),
            stores(root, faulty),
            holdfast.Checkpointer(state=state, **homes_of(root)) as ckpt,
        ):
            first = save(ckpt, state, 1)
            while ckpt._tiers.get("upload")._news.failure is None:
                threading.Event().wait(0.01)
            assert not first.uploaded
            dist.barrier()
            assert holdfast.steps(root / "behind") == []
            is_away = False
            until_uploaded(first)
    told = [str(w.message) for w in caught]
    assert len([t for t in told if "training and saves go on" in t]) == (dist.get_rank() == 0)
    assert is_good(root / "behind", 1)


def ranks_that_are_behind_take_the_same_step(root: Path) -> None:
    state, gate = state_of(0), threading.Event()

    def hold(op: str, key: str) -> Exception | None:
        if op == "create" and dist.get_rank() == 1:
            assert gate.wait(WAIT_S)
        return None

    with (
        stores(root, Faulty(open_store(root / "behind"), hold)),
        holdfast.Checkpointer(state=state, **homes_of(root)) as ckpt,
    ):
        saves = [save(ckpt, state, step) for step in (1, 2, 3, 4)]
        gate.set()
        until_uploaded(saves[-1])
    assert [one.uploaded for one in saves] == [True, False, False, True]
    dist.barrier()
    assert holdfast.steps(root / "behind") == [1, 4]


def one_rank_tells_of_an_outage(root: Path) -> None:
    """Whoever posts it first; and again of the next one."""
    state = state_of(0)

    def count(is_so: bool) -> int:
        found = torch.tensor([is_so], dtype=torch.int32)
        dist.all_reduce(found)
        return int(found)

    with holdfast.Checkpointer(state=state, **homes_of(root)) as ckpt:
        outage = Outage(ckpt._tiers.group)
        for _ in range(3):
            assert count(outage.begins()) == 1
            outage.look()
            assert count(outage.begins()) == 0
            assert count(outage.ends() is not None) == 1
            assert count(outage.ends() is not None) == 0


CASES = [
    each_rank_uploads_its_own_file,
    a_root_that_is_lost_is_read_from_behind_once,
    what_fails_on_one_rank_is_uploaded_later,
    ranks_that_are_behind_take_the_same_step,
    one_rank_tells_of_an_outage,
]


def dies(root: Path) -> None:
    """A run of which rank 1 dies in the middle of an upload."""
    dist.init_process_group("gloo")
    state = state_of(0)

    def fail(op: str, key: str) -> Exception | None:
        if op == "finish" and "0000000002" in key and dist.get_rank() == 1:
            os._exit(9)
        return None

    faulty = Faulty(open_store(root / "behind"), fail)
    with (
        stores(root, faulty),
        holdfast.Checkpointer(state=state, **homes_of(root)) as ckpt,
    ):
        until_uploaded(save(ckpt, state, 1))
        until_uploaded(save(ckpt, state, 2))


if __name__ == "__main__":
    if sys.argv[2:] == ["dies"]:
        dies(Path(sys.argv[1]))
    else:
        run_all(CASES)
