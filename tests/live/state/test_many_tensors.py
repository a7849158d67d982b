"""Many small tensors: Python's garbage collector does not go over them again and again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import holdfast

FEW, MANY = 2_000, 12_000
STAGES = 3
"""Parts of a save or a load at the end of each of which the collector may run once more."""


def collections_in(act: Callable[[], object]) -> int:
    """How often the collector runs meanwhile."""
    begun = []
    gc.collect()
    gc.callbacks.append(note := lambda phase, _: begun.append(phase == "start"))
    try:
        act()
    finally:
        gc.callbacks.remove(note)
    return sum(begun)


def test_the_collector_runs_as_often_for_many_tensors_as_for_few(tmp_path: Path) -> None:
    saves, loads = [], []
    for number in (FEW, FEW, MANY):  # the first time modules are imported
        model = nn.ParameterList([nn.Parameter(torch.randn(2)) for _ in range(number)])
        root, state = tmp_path / f"{len(saves)}", {"model": model}
        saves.append(
            collections_in(lambda root=root, state=state: holdfast.save(root, state, step=1))
        )
        loads.append(collections_in(lambda root=root, state=state: holdfast.load(root, state)))
    assert saves[2] <= saves[1] + STAGES
    assert loads[2] <= loads[1] + STAGES
