"""What the scripts of `causes` and `scenarios` share: arguments, data, a network, files that are whole."""

import argparse
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = 12
EVERY = 3
"""Steps from one save to the next."""
BATCHES = 8
"""Batches of an epoch, on each rank."""


def arguments() -> argparse.Namespace:
    """`root`, where the checkpoints are, and `right`, whether the script has its fault mended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--right", action="store_true")
    args = parser.parse_args()
    args.root.mkdir(parents=True, exist_ok=True)
    return args


def dataset() -> TensorDataset:
    """Inputs (32, 8) and targets (32, 4)."""
    numbers = torch.Generator().manual_seed(1)
    shapes = (32, 8), (32, 4)
    return TensorDataset(*(torch.randn(shape, generator=numbers) for shape in shapes))


def network(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 4))


def batches_from(
    step: int, rank: int = 0, num_ranks: int = 1, stop: int = STEPS
) -> Iterator[list[Tensor]]:
    """The batches of `step..stop`, each epoch in an order of its own, which depends on nothing else."""
    order = torch.Generator()
    data = dataset()
    sampler = DistributedSampler(data, num_replicas=num_ranks, rank=rank)
    loader = DataLoader(data, len(data) // BATCHES // num_ranks, sampler=sampler, generator=order)
    while step < stop:
        epoch, done = divmod(step, BATCHES)
        sampler.set_epoch(epoch)
        order.manual_seed(epoch)
        for batch in islice(loader, done, min(BATCHES, done + stop - step)):
            yield batch
            step += 1


def save(root: Path, step: int, **state: Any) -> None:
    """Write the checkpoint of a step, whole or not at all."""
    root.mkdir(parents=True, exist_ok=True)
    torch.save({"step": step, **state}, root / "unfinished")
    os.replace(root / "unfinished", root / f"step{step:04}.pt")


def newest(root: Path) -> dict[str, Any] | None:
    """The newest checkpoint, or None if there is none yet."""
    files = sorted(root.glob("step*.pt"))
    return torch.load(files[-1]) if files else None
