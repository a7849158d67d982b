"""The suite for frameworks, of Megatron-Core's models: run by `test_engines` in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch.distributed as dist

from holdfast.testing import SourceTests, Training
from system.distributed.megatron_cpu import on_cpu
from system.distributed.megatron_gpt import Run, Setup


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> None:
    address = f"tcp://127.0.0.1:{os.environ['SUITE_PORT']}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    on_cpu()


def builder(**options: bool) -> Callable[[int], Training]:
    def run(seed: int) -> Training:
        made = Run(Setup(**options), seed)

        def train() -> None:
            made.iteration = 0  # the data depend on it
            made.train(1)

        return Training({"model": made.model, "optim": made.optimizer}, train)

    return run


class TestPlain(SourceTests):
    @pytest.fixture
    def build(self) -> Callable[[int], Training]:
        return builder()


class TestMasters(SourceTests):
    @pytest.fixture
    def build(self) -> Callable[[int], Training]:
        return builder(bf16=True)


class TestDistributed(SourceTests):
    @pytest.fixture
    def build(self) -> Callable[[int], Training]:
        return builder(bf16=True, distributed=True)
