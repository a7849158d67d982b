"""A worker: what DeepSpeed's own loader makes of holdfast's conversion, case by case."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast

ADAMW = {"lr": 1e-2}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, **ADAMW),
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True, **ADAMW),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


def made(seed: int, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A frozen layer, a buffer and a trained layer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    return model, OPTIMIZERS[optimizer](model[2].parameters())


def main(folder: Path) -> None:
    from deepspeed_on_cpu import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    cases = json.loads((folder / "cases.json").read_text())
    found = [tried(deepspeed, folder / str(i), **case) for i, case in enumerate(cases)]
    (folder / "found.json").write_text(json.dumps(found))


def tried(
    deepspeed: Any, folder: Path, stage: int, optimizer: str, load: dict[str, Any], before: bool
) -> dict[str, Any]:
    """Which parts of a model are as they were saved, which states there are, or the error."""
    saved, optim = made(1, optimizer)
    saved(torch.randn(3, 4)).square().sum().backward()
    optim.step()
    holdfast.save(folder / "run", {"model": saved, "optim": optim}, step=1)
    holdfast.convert(folder / "run", folder / "ds", to="deepspeed")
    model, optim = made(2, optimizer)
    if before:
        holdfast.load(folder / "run", {"model": model})
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": True},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optim, config=config)
    try:
        engine.load_checkpoint(str(folder / "ds"), **load)
    except FileNotFoundError as error:
        return {"error": str(error)}
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        pairs = zip(saved.state_dict().items(), engine.module.state_dict().values())
        same = {name: torch.equal(a, b) for (name, a), b in pairs}
    states = {s for of in engine.optimizer.optimizer.state.values() for s in of}
    return {"same": same, "states": sorted(states)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
