"""What the trainers' tests train: a model of some thousand weights, with dropout, and data of their own."""

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH, CLASSES = 16, 8
KILLED = -9
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples that depend on their number; `noisy` ones are drawn anew each time, as augmentation does."""

    def __init__(self, size: int, *, noisy: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, WIDTH, generator=generator)
        self.y = torch.randint(0, CLASSES, (size,), generator=generator)
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x = self.x[i] + 0.1 * torch.randn(WIDTH) if self.noisy else self.x[i]
        return {"x": x, "labels": self.y[i]}


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """The same, without a length, in an order that follows from the number of the pass."""

    def __init__(self, data: Data) -> None:
        self.data, self.epoch = data, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.epoch)
        for number in torch.randperm(len(self.data), generator=generator).tolist():
            yield self.data[number]


class Block(nn.Module):
    def __init__(self, drop: float, hidden: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))
        self.drop = nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.inner(x))


class Net(nn.Module):
    """A model as the Trainer wants it: it returns its loss."""

    def __init__(self, drop: float = 0.2, hidden: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(drop, hidden) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Texts of eight tokens."""

    def __init__(self, size: int) -> None:
        self.tokens = torch.randint(0, 32, (size, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


def digest(model: nn.Module) -> str:
    """A hash of all weights, whole."""
    found = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        if hasattr(p, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([p]):
                whole = p.detach().float().clone()
        found.update(name.rpartition("module.")[2].encode())
        found.update(whole.detach().float().contiguous().numpy().tobytes())
    return found.hexdigest()


class Journal:
    """Lines of JSON in a file, each on disk when it is written: what a killed process leaves."""

    def __init__(self, path: Path | str, *, writes: bool = True) -> None:
        self.path, self.writes = Path(path), writes

    def add(self, **values: Any) -> None:
        if self.writes:
            with self.path.open("a") as file:
                file.write(json.dumps(values) + "\n")

    def read(self) -> list[dict[str, Any]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]


def die_at(moment: int, now: int, by: int = signal.SIGKILL) -> None:
    """Send this process a signal at that moment; 0 is never.  SIGKILL takes the other ranks first, so that
    none sees another's end and fails by itself."""
    if moment and moment == now:
        if by == signal.SIGKILL:
            server = os.getppid()
            ranks = Path(f"/proc/{server}/task/{server}/children").read_text().split()
            for pid in set(map(int, ranks)) - {os.getpid()}:
                os.kill(pid, by)
        os.kill(os.getpid(), by)


def run_of(folder: Path, name: str, **options: Any) -> tuple[dict[str, Any], Journal]:
    """Options of a run in a folder of its own, and its journal."""
    journal = Journal(folder / f"{name}.jsonl")
    return {"folder": str(folder / name), "journal": str(journal.path), **options}, journal
