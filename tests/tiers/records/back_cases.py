"""What ranks do together in `test_going_back`: each function is run by every rank of a life."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import holdfast
from holdfast.policy.wasted import Frequencies
from tiers.memory.life import digest, make, train_step

FSDP = "fsdp"


def tuned(root: Path) -> None:
    """What rank 0 decides changes with time; after going back all ranks still learn the same."""
    model, optim = make(FSDP)
    state = {"model": model, "optim": optim}
    with holdfast.Checkpointer(root, state, every=holdfast.Auto(), deadline_s=120) as ckpt:
        steering, looks = ckpt._steering, iter(range(100, 200))
        assert steering is not None
        if dist.get_rank() == 0:
            steering._decide = lambda _: Frequencies(durable=next(looks))  # type: ignore[method-assign]
        _train(ckpt, model, optim, 0, 2)
        ckpt.save(2).wait()
        _train(ckpt, model, optim, 2, 21)
        assert ckpt.restore(2) == 2
        for step in (10, 20):
            if dist.get_rank() == 0:
                time.sleep(0.2)  # the others look first
            _train(ckpt, model, optim, step - 2, step)
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, ckpt.every.durable)
            assert len(set(told)) == 1, told


def wished(root: Path) -> None:
    """Rank 1 wishes for a full save of step 9, and the run goes back; it wishes for one of step 6."""
    model, optim = make(FSDP)
    told: dict[str, str] = {}
    state = {"model": model, "optim": optim, "told": told}

    def grow(length: int) -> None:
        if dist.get_rank() == 1:
            told["long"] = "x" * length

    every, delta = holdfast.Every(delta=1), holdfast.Delta()
    with holdfast.Checkpointer(root, state, every=every, delta=delta, deadline_s=120) as ckpt:
        _train(ckpt, model, optim, 0, 7)
        grow(300_000)
        _train(ckpt, model, optim, 7, 8)
        assert ckpt.restore(3) == 3
        _train(ckpt, model, optim, 3, 4)
        grow(3_000_000)
        _train(ckpt, model, optim, 4, 7)
        expected = digest(model, optim)
    model, optim = make(FSDP)
    told = {}
    state = {"model": model, "optim": optim, "told": told}
    with holdfast.Checkpointer(root, state, every=every, delta=delta, deadline_s=120) as ckpt:
        assert ckpt.restore() == 7
        assert digest(model, optim) == expected


def _train(ckpt: holdfast.Checkpointer, model: Any, optim: Any, step: int, until: int) -> None:
    while step < until:
        train_step(model, optim, step, FSDP)
        step += 1
        ckpt.step(step)
        ckpt.wait()
