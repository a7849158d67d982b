"""A due save yields to storage that hangs: to that of the root, and to no other."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.base.storage_deadlines import Patience, slowest
from holdfast.live.saving import durable


def hangs(patience: Patience, until: threading.Event) -> threading.Thread:
    """An operation of a store that does not end before `until`."""
    thread = threading.Thread(target=lambda: patience.run(until.wait, "put", "somewhere"))
    thread.start()
    limit = time.monotonic() + 120
    while not slowest(0.05, patience):
        assert time.monotonic() < limit
        time.sleep(0.01)
    return thread


@pytest.mark.parametrize("of_root", [True, False], ids=["the-root", "another-store"])
def test_whose_storage_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_root: bool
) -> None:
    monkeypatch.setattr(durable, "STUCK_S", 0.05)
    state = {"model": {"w": torch.zeros(4)}}
    released = threading.Event()
    with holdfast.Checkpointer(tmp_path / "run", state, every=1) as ckpt:
        tier = ckpt._tiers.durable
        patience = tier.store.patience if of_root else Patience()
        thread = hangs(patience, released)
        try:
            assert slowest(0.05), "an operation of this process hangs"
            assert bool(tier._stuck()) is of_root
        finally:
            released.set()
            thread.join()
