"""What a restore itself saves is what it restored: objects are not asked before the script goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset

import holdfast
from holdfast import Checkpointer, Delta, Every

pytest.importorskip("torchdata")

from torchdata.stateful_dataloader import StatefulDataLoader

EPOCHS, BATCHES, AT = 3, 6, 8
"""`AT`: the step from which it goes on, in the second epoch."""


class Stream:
    """Tells of its beginning until it has gone on, as streams of Hugging Face's datasets do."""

    def __init__(self) -> None:
        self.at, self.begins_at = 0, 0

    def __iter__(self) -> Iterator[int]:
        self.at = self.begins_at
        while True:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begins_at = state["at"]


class Run:
    """A training whose data have an order for each epoch, and a stream beside; dropout draws, too."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5))
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.1)
        rows = TensorDataset(torch.arange(2.0 * BATCHES)[:, None])
        self.sampler = DistributedSampler(rows, num_replicas=1, rank=0, shuffle=True)
        self.loader = StatefulDataLoader(rows, batch_size=2, sampler=self.sampler)
        self.stream = Stream()
        self.seen: list[tuple[Any, ...]] = []

    @property
    def state(self) -> dict[str, Any]:
        data = {"loader": self.loader, "stream": self.stream}  # before "rng", by name
        return {"data": data, "model": self.model, "optim": self.optim}

    def go_on(self, ckpt: Checkpointer, step: int, until: int) -> None:
        others = iter(self.stream)
        for epoch in range(step // BATCHES, EPOCHS):
            self.sampler.set_epoch(epoch)
            batches = iter(self.loader)
            if step % BATCHES:
                ckpt.restore_rng()  # the loader has drawn
            for (batch,) in batches:
                loss = self.model(batch).sum()
                loss.backward()
                self.optim.step()
                self.optim.zero_grad()
                step += 1
                self.seen.append((step, batch.flatten().tolist(), next(others), loss.item()))
                ckpt.step(step)
                if step == until:
                    return


@pytest.mark.parametrize("num_kills", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"delta": Delta()}], ids=["saves", "records"])
def test_a_step_that_is_saved_anew_is_the_same(
    options: dict[str, Any], num_kills: int, tmp_path: Path
) -> None:
    own, root = tmp_path / "own", tmp_path / "root"
    whole = Run(0)
    with Checkpointer(own, whole.state, every=AT) as ckpt:
        whole.go_on(ckpt, 0, EPOCHS * BATCHES)
    every = Every(durable=100, delta=1 if options else None)
    for _ in range(num_kills):  # each run ends before its first step
        run = Run(1)
        with Checkpointer(root, run.state, every=every, **options) as ckpt:
            assert ckpt.restore(source=own, keep_source=True) >= AT
    run = Run(2)
    with Checkpointer(root, run.state, every=every, **options) as ckpt:
        first = int(ckpt.restore(source=own, keep_source=True))
        run.go_on(ckpt, first, EPOCHS * BATCHES)
    assert first == AT * 2 and run.seen == whole.seen[first:]
    assert holdfast.steps(root)[0] == first
