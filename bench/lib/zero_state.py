"""A GPT-2-small-like model trained for two steps by DeepSpeed on CPUs, and its checkpoint.

bf16 weights, fp32 masters and AdamW's moments.  `make` and `started` run this file under torchrun.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.lib.watching import watch

ENV = {"DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}


def torchrun(ranks: int, *words: str) -> str:
    """Run this file; what it prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "bench.lib.zero_state", *words]
    return watch(command, env=ENV).output


def make(folder: Path, stage: int, width: int, layers: int) -> Path:
    """A checkpoint by DeepSpeed on two ranks."""
    torchrun(2, str(folder), f"--stage={stage}", f"--width={width}", f"--layers={layers}")
    return folder


def started(option: str, url: Path, stage: int, width: int, layers: int) -> float:
    """Seconds of the load alone, into an engine on one rank that then does a step."""
    sizes = (f"--stage={stage}", f"--width={width}", f"--layers={layers}")
    output = torchrun(1, "-", f"--{option}={url}", *sizes)
    return max(float(x) for x in re.findall(r"LOADED ([\d.]+)", output))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.c_attn(self.ln_1(x)).chunk(3, -1)
        x = x + self.c_proj(nn.functional.scaled_dot_product_attention(q, k, v))
        return x + self.c_out(nn.functional.gelu(self.c_fc(self.ln_2(x))))


class Gpt(nn.Module):
    def __init__(self, width: int, layers: int, vocab: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(1024, width)
        self.h = nn.ModuleList(Block(width) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.wte(x) + self.wpe(torch.arange(x.shape[-1]))
        for block in self.h:
            y = block(y)
        return nn.functional.cross_entropy(self.head(self.ln_f(y)).flatten(0, 1), x.flatten())


def config(stage: int, universal: bool = False) -> dict[str, Any]:
    """DeepSpeed's."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
        "checkpoint": {"load_universal": universal},
    }


def engine(width: int, layers: int, stage: int, universal: bool = False) -> Any:
    """An engine of this process's ranks; two groups with different weight decay."""
    import deepspeed

    torch.manual_seed(0)
    model = Gpt(width, layers, 50304)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optim = torch.optim.AdamW(groups, lr=1e-4)
    return deepspeed.initialize(model=model, optimizer=optim, config=config(stage, universal))[0]


def step(engine: Any, seed: int = 0) -> float:
    """One training step; its loss."""
    torch.manual_seed(seed)
    loss = engine(torch.randint(0, 50304, (1, 16)))
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("out")
    p.add_argument("--stage", type=int, default=1)
    p.add_argument("--width", type=int, default=768)
    p.add_argument("--layers", type=int, default=12)
    p.add_argument("--load", help="a universal checkpoint to continue from, instead of saving")
    p.add_argument("--holdfast", help="any checkpoint to continue from, loaded by holdfast")
    args = p.parse_args()
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    found = engine(args.width, args.layers, args.stage, universal=bool(args.load))
    if args.load or args.holdfast:
        import holdfast

        torch.distributed.barrier()
        began = time.perf_counter()
        if args.load:
            found.load_checkpoint(args.load)
        else:
            state = {"model": found, "optim": found.optimizer}
            holdfast.load(args.holdfast, state)
        torch.distributed.barrier()
        print(f"LOADED {time.perf_counter() - began:.3f} LOSS {step(found, 2)}", flush=True)
    else:
        for i in range(2):
            step(found, i)
        found.save_checkpoint(args.out)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
