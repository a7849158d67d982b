"""Makes `golden/megatron_0_14.tar.xz`: flattened optimizer states, which 0.16 cannot write any more.

Worker, to be run by megatron-core 0.14.0 (`pip install --no-deps --target OLD megatron-core==0.14.0`; OLD
before the rest in PYTHONPATH), twice: 4 ranks train and save, 1 rank writes down what it loads of that.

    torchrun --nproc-per-node=4 -m system.distributed.megatron_flat OUT iter_0000003
    torchrun --nproc-per-node=1 -m system.distributed.megatron_flat OUT expected
    tar cJf megatron_0_14.tar.xz -C OUT/iter_0000003 iter_0000003 expected.npz
"""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from .cases import run_all
from .megatron_cpu import on_cpu
from .megatron_gpt import Run, Setup

FLAT = Setup(
    tp=2, bf16=True, distributed=True, sharding="fully_sharded_model_space", layers=3, heads=2,
    vocab=14, divisible=4,
)  # fmt: skip


class Small(Run):
    """Of few bytes."""

    def _config(self) -> Any:
        return replace(super()._config(), hidden_size=12, ffn_hidden_size=10, kv_channels=6)


def iter_0000003(root: Path) -> None:
    os.chdir(root)
    run = Small(FLAT)
    run.train(3)
    run.save(Path())


def expected(root: Path) -> None:
    run = Small(replace(FLAT, tp=1, divisible=16), seed=2)
    saved = root.parent / "iter_0000003"
    run.load(saved / "iter_0000003")
    found = {f"model.{n}": t for n, t in run.masters().items()} | {
        f"optim.{n}.{s}": t for n, x in run.states().items() for s, t in x.items() if s != "step"
    }
    np.savez(saved / "expected.npz", **{n: t.numpy() for n, t in found.items()})


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    np.product = np.prod  # which megatron-core 0.14 calls
    on_cpu()
    run_all([iter_0000003, expected])
