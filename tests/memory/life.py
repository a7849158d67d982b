"""One life of a training: a rank from its start to its end, which may be a SIGKILL.

Run in forks of `zygote`; writes what it saw as JSON lines to a file of its own.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import holdfast
from holdfast.memory.node.fetch import Peer
from memory.agents import kill

WIDTH = 400


def make(layout: str, width: int = WIDTH) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model under DDP, FSDP2, HSDP or FSDP2 over tensor parallelism, and its optimizer."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
    )
    world = dist.get_world_size()
    match layout:
        case "ddp" | "batchnorm":
            model = nn.parallel.DistributedDataParallel(model)
        case "fsdp":
            fully_shard(model)
        case "hsdp":
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
            fully_shard(model, mesh=mesh)
        case "tp":
            mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
            fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def digest(model: nn.Module, optim: torch.optim.Optimizer) -> str:
    """Of all parameters and states, gathered whole by torch; collective."""
    seen = hashlib.sha256()
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    for name, p in inner.named_parameters():
        for key, value in [("", p), *sorted(optim.state.get(p, {}).items())]:
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            seen.update(f"{name}.{key}".encode() + whole.detach().numpy().tobytes())
    return seen.hexdigest()


def train_step(
    model: nn.Module, optim: torch.optim.Optimizer, step: int, layout: str, width: int = WIDTH
) -> None:
    """On data of its own for each rank, where that is data parallelism which sums up alike after a restart
    (DDP arranges its buckets anew after the first step, and so sums up in another order)."""
    own = dist.get_rank() if layout in ("fsdp", "hsdp", "batchnorm") else 0
    torch.manual_seed(1000 * step + own)
    model(torch.randn(16, width)).square().mean().backward()
    optim.step()
    optim.zero_grad()


def held(model: nn.Module, optim: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = [p.detach() for p in model.parameters()]
    return found + [v for s in optim.state.values() for v in s.values() if v.ndim]


def poison(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    """NaN everywhere, in a way that no version counter sees."""
    for tensor in held(model, optim):
        tensor.data.numpy()[...] = float("nan")


def nans(model: nn.Module, optim: torch.optim.Optimizer) -> float:
    """The part of what this rank holds that is NaN."""
    found = held(model, optim)
    bad = sum(int(t.isnan().sum()) for t in map(local, found))
    return bad / max(sum(local(t).numel() for t in found), 1)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def kill_while_reading(node: Path) -> None:
    """The agent of a node gets SIGKILL when this process has had a range of an image from some agent."""
    read, reads = Peer.read, itertools.count()

    def counted(peer: Peer, path: str, offset: int, into: memoryview) -> None:
        read(peer, path, offset, into)
        if next(reads) == 0:
            kill(node)

    Peer.read = counted  # type: ignore[method-assign]


class Life:
    """What a rank does, as a script says; see `zygote`."""

    def __init__(self, rank: int, script: dict[str, Any], out: Path) -> None:
        self.rank = rank
        self.script = script
        self.out = out.open("w", buffering=1)
        self.events: Counter[str] = Counter()

    def write(self, **fields: Any) -> None:
        self.out.write(json.dumps(fields) + "\n")

    def _listen(self, event: holdfast.events.Event) -> None:
        self.events[event.name] += 1
        kept = ("retuned", "memory.", "agent.", "restore.", "replica.", "snapshot.protect")
        if "failed" in event.name or event.name.startswith(kept):
            self.write(event=event.name, **{k: str(v) for k, v in event.fields.items()})

    def run(self) -> None:
        s = self.script
        dist.init_process_group("gloo")
        holdfast.events.subscribe(self._listen)
        self.width = s.get("width", WIDTH)
        model, optim = make(s["layout"], self.width)
        if s.get("reference"):
            for step in range(s["until"]):
                train_step(model, optim, step, s["layout"], self.width)
                self.write(step=step + 1, digest=digest(model, optim))
            return
        state: dict[str, Any] = {"model": model, "optim": optim}
        if "grow_at" in s:
            state["told"] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", holdfast.HoldfastWarning)
            self._train(model, optim, state)

    def _train(self, model: nn.Module, optim: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        s = self.script
        often, records = s.get("memory", 1), s.get("delta")
        every: Any = holdfast.Every(
            memory=often, durable=s.get("durable"), delta=None if records is None else 1
        )
        if "auto" in s:
            every = holdfast.Auto(**s["auto"])
        memory = holdfast.Memory(**s.get("options", {})) if often else None
        delta = None if records is None else holdfast.Delta(**records)
        ckpt = holdfast.Checkpointer(
            s["root"], state, every=every, memory=memory, delta=delta, deadline_s=20
        )
        before = Counter(holdfast.events.counters)
        if s.get("reader_kills", [-1])[0] == self.rank:
            kill_while_reading(Path(s["reader_kills"][1]))
        step = ckpt.restore()
        moved = Counter(holdfast.events.counters) - before
        moved = {k: v for k, v in moved.items() if k.endswith("bytes") or k.startswith("memory")}
        self.write(restored=step, digest=digest(model, optim), moved=moved, nans=nans(model, optim))
        while step < s["until"]:
            train_step(model, optim, step, s["layout"], self.width)
            step += 1
            if s.get("poison_at") == step and self.rank in s["poison"]:
                poison(model, optim)
            if s.get("kill_at") == step and self.rank in s["kill"]:
                os.kill(os.getpid(), signal.SIGKILL)
            if s.get("grow_at") == step and self.rank in s["grow"]:
                state["told"]["long"] = "x" * 300_000
            ckpt.step(step)
            if s.get("settle", True):
                self._settle(ckpt)
            self.write(step=step, digest=digest(model, optim), events=dict(self.events))
            time.sleep(s.get("pause", 0.0))
        if s.get("die"):
            self._settle(ckpt)
            self.write(done=step)
            os.kill(os.getpid(), signal.SIGKILL)
        ckpt.close()
        self.write(done=step)

    @staticmethod
    def _settle(ckpt: holdfast.Checkpointer) -> None:
        """Until the snapshot is complete, so that a script knows what there is."""
        ckpt.wait(30)
