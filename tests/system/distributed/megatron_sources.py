"""Worker, 4 ranks: trains GPTs in several arrangements and saves them as Megatron-Core does."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

from .cases import Case, run_all
from .megatron_cpu import on_cpu
from .megatron_gpt import Run, Setup

STEPS = 3
SOURCES = {
    "tp4": Setup(tp=4, layers=2, heads=8, groups=4, gated=False),
    "tp2_pp2_bf16_tied": Setup(tp=2, pp=2, bf16=True, tied=True, fp8=True),
    "tp2_dp2_zero_bf16": Setup(tp=2, bf16=True, distributed=True, sequence_parallel=True),
    "pp2_dp2_zero_by_layer": Setup(pp=2, distributed=True, homogeneous=False, fp8=True),
    "tp2_ep2_zero_moe": Setup(
        tp=2, ep=2, experts=4, distributed=True, bf16=True, sequence_parallel=True, layers=2
    ),
}
"""By name, which is also the folder's."""


def whole(setup: Setup) -> Setup:
    """The same model on one rank: its vocabulary is padded as much."""
    return replace(
        setup, tp=1, pp=1, ep=1, sequence_parallel=False, divisible=setup.padded_vocab,
        sharding="fully_reshardable",
    )  # fmt: skip


def _case(name: str) -> Case:
    def save(root: Path) -> None:
        run = Run(SOURCES[name])
        run.train(STEPS)
        run.save(root)

    save.__name__ = name
    return save


CASES = [_case(name) for name in SOURCES]

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    on_cpu()
    run_all(CASES)
