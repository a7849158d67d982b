"""The suite for frameworks, of DeepSpeed's engines: run by `test_engines` in a process of its own."""

from __future__ import annotations

from deepspeed_on_cpu import deepspeed

# isort: split

import os
from collections.abc import Callable

import pytest
import torch
from torch import nn

from holdfast.testing import SourceTests, Training


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> None:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ["SUITE_PORT"]}
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)


def builder(stage: int) -> Callable[[int], Training]:
    def run(seed: int) -> Training:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        config = {
            "train_batch_size": 4,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "zero_force_ds_cpu_optimizer": False,
        }
        adam = torch.optim.AdamW(model.parameters(), lr=0.01)
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)

        def train() -> None:
            inputs = torch.arange(20.0).reshape(4, 5).bfloat16() / (engine.global_steps + 10)
            engine.backward(engine(inputs).square().mean())
            engine.step()

        return Training({"model": engine, "optim": engine.optimizer}, train)

    return run


class TestZero1(SourceTests):
    @pytest.fixture
    def build(self) -> Callable[[int], Training]:
        return builder(1)


class TestZero3(SourceTests):
    @pytest.fixture
    def build(self) -> Callable[[int], Training]:
        return builder(3)
