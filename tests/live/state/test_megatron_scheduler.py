"""Megatron-Core's scheduler of learning rates, whose `load_state_dict` adds steps to those that it has."""

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast

pytest.importorskip("megatron.core")

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


@pytest.mark.parametrize("is_nested", [False, True])
def test_it_is_restored_as_often_as_one_likes(tmp_path: Path, is_nested: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    ends = {"init_lr": 0.0, "max_lr": 1.0, "min_lr": 0.0, "start_wd": 0.0, "end_wd": 0.1}
    steps = {"lr_warmup_steps": 2, "lr_decay_steps": 10, "wd_incr_steps": 10}
    styles = {"lr_decay_style": "linear", "wd_incr_style": "linear"}
    scheduler = OptimizerParamScheduler(optimizer, **ends, **steps, **styles)
    held: Any = {"of": [scheduler]} if is_nested else scheduler
    with holdfast.Checkpointer(tmp_path, {"optim": optimizer, "scheduler": held}) as ckpt:
        scheduler.step(3)
        rate = optimizer.param_groups[0]["lr"]
        ckpt.save(3)
        for _ in range(2):
            scheduler.step(1)
            ckpt.restore()
            assert (scheduler.num_steps, optimizer.param_groups[0]["lr"]) == (3, rate)
