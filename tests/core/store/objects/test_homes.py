"""Two homes of which one is a bucket, on SeaweedFS: behind a disk, before one, and away for a while."""

from __future__ import annotations

import shutil
import threading
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch

import holdfast
from core.store.objects.fixtures import fresh
from core.store.objects.proxy import Fate, Proxy, Request
from core.store.objects.servers import SeaweedFS
from core.store.objects.test_requests import kind_of
from holdfast import Keep
from holdfast.store import LocalStore, open_store
from holdfast.tiers.mirror import upload as uploading
from system.crash.single import WAIT_S, contents, leftovers, state_of


def until_uploaded(save: holdfast.Save) -> None:
    waited = threading.Event()
    for _ in range(int(WAIT_S * 100)):
        if save.uploaded:
            return
        waited.wait(0.01)
    raise AssertionError("never uploaded")


def saved(ckpt: holdfast.Checkpointer, state: dict, step: int) -> holdfast.Save:
    state["data"].update(state_of(step)["data"])
    save = ckpt.save(step)
    save.wait(WAIT_S)
    return save


@pytest.mark.parametrize("bucket_first", [False, True], ids=["behind-a-disk", "before-a-disk"])
def test_the_one_that_is_left_is_enough(
    seaweed: SeaweedFS, tmp_path: Path, bucket_first: bool
) -> None:
    bucket, disk, state = seaweed.url(fresh()), str(tmp_path / "disk"), state_of(0)
    root, behind = (bucket, disk) if bucket_first else (disk, bucket)
    with holdfast.Checkpointer(root, state, upload=behind, upload_keep=Keep(last=2)) as ckpt:
        for step in (1, 2, 3):
            until_uploaded(saved(ckpt, state, step))
    store = open_store(behind)
    assert contents(store) == {2: 2.0, 3: 3.0}
    assert leftovers(store) == []
    if bucket_first:
        root = seaweed.url(fresh())
    else:
        shutil.rmtree(disk)
    state = state_of(0)
    with holdfast.Checkpointer(root, state, upload=behind) as ckpt:
        restored = ckpt.restore()
        assert (restored, restored.tier) == (3, "upload")
        assert torch.equal(state["data"]["a"], state_of(3)["data"]["a"])
        saved(ckpt, state, 4)
    assert max(contents(store)) == 4


def test_the_requests_of_an_upload(seaweed: SeaweedFS, proxy: Proxy, tmp_path: Path) -> None:
    """Beside the image, as few as a save in a bucket makes, whatever the number of steps kept."""
    kinds: Counter[str] = Counter()

    def count(request: Request) -> Fate:
        kinds[kind_of(request)] += 1
        return Fate.PASSED

    proxy.choose = count
    state, costs = state_of(0), []
    with holdfast.Checkpointer(
        tmp_path / "disk",
        state,
        upload=seaweed.url(fresh(), proxy.endpoint),
        upload_keep=Keep(last=9),
    ) as ckpt:
        for step in range(1, 6):
            before = kinds.copy()
            until_uploaded(saved(ckpt, state, step))
            ckpt._tiers.get("upload")._worker.settle(WAIT_S)
            costs.append(dict(kinds - before))
    assert costs[-1] == costs[-2]
    assert sum(costs[-1].values()) <= 8, costs[-1]


@pytest.mark.soak
def test_a_bucket_that_is_away_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server is killed and started again: saves go on, and the newest step is uploaded."""
    monkeypatch.setattr(uploading, "PAUSE_S", 0.2)
    (tmp_path / "weed").mkdir()
    state = state_of(0)
    with SeaweedFS(tmp_path / "weed") as server, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        url = server.url(fresh())
        with holdfast.Checkpointer(tmp_path / "disk", state, upload=url, deadline_s=4.0) as ckpt:
            until_uploaded(saved(ckpt, state, 1))
            server.kill()
            for step in (2, 3):
                last = saved(ckpt, state, step)
            while ckpt._tiers.get("upload")._news.failure is None:
                threading.Event().wait(0.05)
            server.start()
            until_uploaded(last)
        assert contents(LocalStore(tmp_path / "disk")) == {1: 1.0, 2: 2.0, 3: 3.0}
        found = contents(open_store(url))
    assert found[3] == 3.0
    told = [str(w.message) for w in caught]
    assert len([t for t in told if "training and saves go on" in t]) == 1, told
    assert len([t for t in told if "go on, after" in t]) == 1, told
