"""What ranks do together in `test_rounded_records`: each function is run by every rank of a life."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from capabilities import FSDP2_ON_CPUS
from holdfast.live.state.placed import local_of

ENDS = 4
"""The step after which all ranks die."""
Make = Callable[[], nn.Module]


def build() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(24, 50), nn.Tanh(), nn.Linear(50, 7))


def fsdp_model() -> nn.Module:
    FSDP2_ON_CPUS.require()
    return fully_shard(build(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))


def ddp_model() -> nn.Module:
    model = nn.parallel.DistributedDataParallel(build())
    model.register_comm_hook(None, fp16_compress_hook)  # gloo has no bfloat16
    return model


def fsdp(root: Path) -> None:
    _dies(root, fsdp_model, torch.bfloat16)


def ddp(root: Path) -> None:
    _dies(root, ddp_model, torch.float16)


def fsdp_again(root: Path) -> None:
    """One rank's shard gets what bfloat16 does not have."""
    _goes_on(root, fsdp_model, torch.bfloat16, [2])


def ddp_again(root: Path) -> None:
    _goes_on(root, ddp_model, torch.float16, [0, 1, 2, 3])


def fsdp_elsewhere(root: Path) -> None:
    _restored(root, fsdp_model, torch.bfloat16).ckpt.close()


def ddp_elsewhere(root: Path) -> None:
    _restored(root, ddp_model, torch.float16).ckpt.close()


class Training:
    def __init__(self, root: Path, make: Make, to: torch.dtype) -> None:
        self.model = make()
        holdfast.compression.rounded(self.model.parameters(), to)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.ckpt = holdfast.Checkpointer(
            root,
            {"model": self.model, "optim": self.optim},
            every=holdfast.Every(durable=100, delta=1),
            delta=holdfast.Delta(),
            on_error="raise",
        )

    def step(self, number: int, *, is_noisy: bool = False) -> None:
        torch.manual_seed(100 * number + dist.get_rank())
        self.model(torch.randn(4, 24)).square().mean().backward()
        if is_noisy:
            for p in self.model.parameters():
                local_of(p.grad).add_(1e-5)
        self.optim.step()
        self.optim.zero_grad()
        self.ckpt.step(number)

    def held(self) -> list[torch.Tensor]:
        """Parameters and states, gathered whole by torch; collective."""
        states = [v for s in self.optim.state.values() for v in s.values()]
        both = [*self.model.parameters(), *states]
        return [t.full_tensor() if isinstance(t, DTensor) else t for t in both]


def _dies(root: Path, make: Make, to: torch.dtype) -> None:
    run = Training(root, make, to)
    assert run.ckpt.restore() == 0
    for number in range(1, ENDS + 1):
        run.step(number)
        run.ckpt.wait()
    held = run.held()
    if dist.get_rank() == 0:
        torch.save(held, root.parent / "held.pt")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _restored(root: Path, make: Make, to: torch.dtype) -> Training:
    run = Training(root, make, to)
    assert run.ckpt.restore() == ENDS
    held, expected = run.held(), torch.load(root.parent / "held.pt")
    assert len(held) == len(expected) and all(map(torch.equal, held, expected))
    return run


def _goes_on(root: Path, make: Make, to: torch.dtype, noisy: list[int]) -> None:
    run = _restored(root, make, to)
    run.step(ENDS + 1)
    run.step(ENDS + 2, is_noisy=dist.get_rank() in noisy)
    run.step(ENDS + 3)
    run.step(ENDS + 4)
    run.ckpt.close()
