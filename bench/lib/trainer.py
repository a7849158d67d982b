"""A training whose steps compute for a known time, on the state of 1.5 GB."""

from __future__ import annotations

import time

import torch

from bench.lib.common import Job, over_ranks
from bench.lib.state import State


class Trainer:
    """Steps with a known amount of computing."""

    def __init__(self, job: Job) -> None:
        self.state = State(job.size, small=job.args.small)
        for p in self.state.model.parameters():
            p.grad = torch.full_like(p, 1e-3)
        self.matrix = torch.rand(1024, 1024) / 512
        self.products = 1
        self.compute()
        started = time.perf_counter()
        for _ in range(8):
            self.compute()
        took = over_ranks(time.perf_counter() - started) / 8
        self.products = max(1, round(job.args.compute / took))

    def compute(self) -> float:
        started = time.perf_counter()
        x = self.matrix
        for _ in range(self.products):
            x = x @ self.matrix
        return time.perf_counter() - started

    def update(self) -> float:
        started = time.perf_counter()
        self.state.optim.step()
        return time.perf_counter() - started
