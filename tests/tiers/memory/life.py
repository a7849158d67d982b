"""One life of a training: a rank from its start to its end, which may be a SIGKILL.

Run in forks of `zygote`; writes what it saw as JSON lines to a file of its own.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import holdfast
from holdfast.live.saving import planning
from holdfast.live.state import copy_timing
from holdfast.tiers.memory import protecting
from holdfast.tiers.memory.node import client
from holdfast.tiers.memory.node.fetch import Peer
from holdfast.tiers.memory.twin import Gradient, Twin
from tiers.memory.agents import kill
from tiers.records import deaths

WIDTH = 400
RECORDS = ("delta.wrote", "delta.broken", "delta.wait", "delta.writer_died")


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5),
    "muon": lambda p: torch.optim.Muon([x for x in p if x.ndim == 2], lr=0.02),
}


def make(layout: str, width: int = WIDTH) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model under DDP (and ZeRO-1), FSDP2, HSDP or FSDP2 over tensor parallelism, and its optimizer."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
    )
    world = dist.get_world_size()
    match layout:
        case "ddp" | "batchnorm" | "topk":
            model = nn.parallel.DistributedDataParallel(model)
        case "zero1":
            model = nn.parallel.DistributedDataParallel(model)
            kind = torch.optim.AdamW
            return model, ZeroRedundancyOptimizer(model.parameters(), kind, lr=1e-2, foreach=False)
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
        case "sp":  # the norm's gradients are reduced by nobody but the optimizer
            model = nn.Sequential(nn.LayerNorm(width), *model)
            mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
            plan = {
                "0": SequenceParallel(sequence_dim=0),
                "1": ColwiseParallel(input_layouts=Shard(0)),
                "3": RowwiseParallel(output_layouts=Shard(0)),
            }
            parallelize_module(model, mesh, plan)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def digest(model: nn.Module, optim: torch.optim.Optimizer) -> str:
    """Of all parameters and states, gathered whole by torch; collective."""
    seen = hashlib.sha256()
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    for name, p in inner.named_parameters():
        for key, value in [("", p), *sorted(states(optim, name, p).items())]:
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            seen.update(f"{name}.{key}".encode() + whole.detach().numpy().tobytes())
    return seen.hexdigest()


def states(optim: torch.optim.Optimizer, name: str, p: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a parameter, wherever they are; collective."""
    if not isinstance(optim, ZeroRedundancyOptimizer):
        return optim.state.get(p, {})
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, optim.optim.state.get(p, {}))
    (found,) = [x for x in told if x] or [{}]  # one rank's
    return found


def train_step(
    model: nn.Module, optim: torch.optim.Optimizer, step: int, layout: str, width: int = WIDTH
) -> None:
    """On data of its own for each rank, where that is data parallelism which sums up alike after a restart
    (DDP arranges its buckets anew after the first step, and so sums up in another order)."""
    own = dist.get_rank() if layout in ("fsdp", "hsdp", "batchnorm", "topk") else 0
    torch.manual_seed(1000 * step + own)
    model(torch.randn(16, width)).square().mean().backward()
    if layout == "topk":
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optim.step()
    optim.zero_grad()


def held(model: nn.Module, optim: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = [p.detach() for p in model.parameters()]
    inner = optim.optim if isinstance(optim, ZeroRedundancyOptimizer) else optim
    return found + [v for s in inner.state.values() for v in s.values() if v.ndim]


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


def slow_down(seconds: float) -> None:
    """Each piece that is copied from now on takes so long."""
    copyto = np.copyto

    def slowly(into: Any, source: Any) -> None:
        time.sleep(seconds)
        copyto(into, source)

    np.copyto = slowly


def count_plans() -> Counter[str]:
    """How often something is planned from now on, by what."""
    found: Counter[str] = Counter()

    def watch(owner: Any, name: str, wrap: Any = lambda f: f) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return original(*args, **kwargs)

        setattr(owner, name, wrap(counted))

    watch(planning.Planner, "make_plan")
    watch(planning, "plan_image")
    watch(planning.Copies, "plan", staticmethod)
    watch(protecting, "replica_guard")
    return found


def err_in_a_twin(at: list[int]) -> None:
    """The twin of another rank's optimizer makes these of its steps wrongly."""
    apply, steps = Twin.apply, itertools.count(1)

    def wrongly(twin: Twin, gradient: Gradient) -> None:
        if next(steps) in at:
            for value in gradient.values:
                value.mul_(1.5)
        apply(twin, gradient)

    Twin.apply = wrongly  # type: ignore[method-assign]


class Life:
    """What a rank does, as a script says; see `zygote`."""

    def __init__(self, rank: int, script: dict[str, Any], out: Path) -> None:
        self.rank = rank
        self.script = script
        self.out = out.open("w", buffering=1)
        self.reached = 0
        self.events: Counter[str] = Counter()

    def write(self, **fields: Any) -> None:
        self.out.write(json.dumps(fields) + "\n")

    def _listen(self, event: holdfast.events.Event) -> None:
        self.events[event.name] += 1
        kept = (
            "retuned",
            "twins.",
            "feed.",
            "memory.",
            "agent.",
            "restore.",
            "replica.",
            "snapshot.protect",
            "snapshot.copy",
            "window.",
            *RECORDS,
        )
        if "failed" in event.name or event.name.startswith(kept):
            self.write(event=event.name, **{k: str(v) for k, v in event.fields.items()})

    def run(self) -> None:
        s = self.script
        dist.init_process_group("gloo")
        holdfast.events.subscribe(self._listen)
        if "case" in s:
            module, _, name = s["case"].partition(":")
            getattr(importlib.import_module(module), name)(Path(s["root"]))
            return
        self.width = s.get("width", WIDTH)
        model, optim = make(s["layout"], self.width)
        if "optimizer" in s:
            optim = OPTIMIZERS[s["optimizer"]](model.parameters())
        topk = holdfast.compression.TopK(**s.get("topk", {}))
        if s["layout"] == "topk":
            topk.register(model)
        if "slow" in s:
            copy_timing.COPIED_AT_CALL_BYTES = 0  # there is a window, as for larger states
        if s.get("reference"):
            for step in range(s["until"]):
                train_step(model, optim, step, s["layout"], self.width)
                self.write(step=step + 1, digest=digest(model, optim))
            return
        state: dict[str, Any] = {"model": model, "optim": optim}
        if s["layout"] == "topk":
            state["topk"] = topk
        for rank, at, number in s.get("deaths", ()):
            if rank == self.rank:
                deaths.arrange(at, number, Path(s["out"]))
        if "delay_writer" in s:
            deaths.delay_writer(s["delay_writer"])
        if "grow_at" in s:
            state["told"] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", holdfast.HoldfastWarning)
            self._train(model, optim, state)

    def _train(self, model: nn.Module, optim: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        s = self.script
        often, records = s.get("memory", 1), s.get("delta")
        every: Any = holdfast.Every(
            memory=often or None,
            durable=s.get("durable"),
            delta=None if records is None else 1,
        )
        if "auto" in s:
            every = holdfast.Auto(**s["auto"])
        memory = holdfast.Memory(**s.get("options", {})) if often else None
        delta = None if records is None else holdfast.Delta(**records)
        ckpt = holdfast.Checkpointer(
            s["root"], state, every=every, memory=memory, delta=delta,
            deadline_s=s.get("deadline_s", 120),
            keep=holdfast.Keep(**s["keep"]) if "keep" in s else None,
            replicas=s.get("replicas", "once"),
        )  # fmt: skip
        for name, value in s.get("patience", {}).items():
            setattr(client, name, value)
        before = Counter(holdfast.events.counters)
        planned = count_plans()
        if s.get("reader_kills", [-1])[0] == self.rank:
            kill_while_reading(Path(s["reader_kills"][1]))
        err_in_a_twin(s.get("twin_errs", {}).get(str(self.rank), []))
        step = ckpt.restore()
        if self.rank in s.get("kill_restored", ()):
            os.kill(os.getpid(), signal.SIGKILL)
        moved = Counter(holdfast.events.counters) - before
        moved = {k: v for k, v in moved.items() if k.endswith("bytes") or k.startswith("memory")}
        self.write(
            restored=step, digest=digest(model, optim), moved=moved, nans=nans(model, optim),
            every=asdict(ckpt.every),
        )  # fmt: skip
        began = time.monotonic()
        while step < s["until"]:
            if s.get("hook_at") == [self.rank, step]:
                optim.register_step_pre_hook(deaths.halve)
            train_step(model, optim, step, s["layout"], self.width)
            step += 1
            if s.get("poison_at") == step and self.rank in s["poison"]:
                poison(model, optim)
            if s.get("kill_at") == step and self.rank in s["kill"]:
                os.kill(os.getpid(), signal.SIGKILL)
            if s.get("grow_at") == step and self.rank in s["grow"]:
                state["told"]["long"] = "x" * 300_000
            if s.get("writer_stops", ())[:2] == [self.rank, step]:
                deaths.stop_writer(lambda: self.reached, *s["writer_stops"][2:])
            if s.get("slow", ())[:1] == [step]:
                slow_down(s["slow"][1])
            ckpt.step(step)
            self.reached = step
            if s.get("helper", ())[:1] == [step]:
                self.write(helper=deaths.helper(s["helper"][1]))
            if s.get("rebatch", ())[:1] == [step]:
                ckpt._tiers.get("delta").rebatch(s["rebatch"][1])
            if step == s.get("settle_at") or (
                s.get("settle", True) and step not in range(*s.get("hurry", [0]))
            ):
                self._settle(ckpt)
            if step in range(*s.get("flush", [0])):
                ckpt._tiers.get("delta")._capture.way.flush(60)
            took, began = time.monotonic() - began, time.monotonic()
            seen = {"events": dict(self.events), "planned": dict(planned)}
            self.write(step=step, digest=digest(model, optim), took=took, **seen)
            if ckpt._steering is not None:
                self.write(learned=ckpt._steering._tuner.learned, every=asdict(ckpt.every))
            time.sleep(s.get("pause", 0.0))
        if s.get("die"):
            self._settle(ckpt)
            self.write(done=step)
            self._await_others()
            os.kill(os.getpid(), signal.SIGKILL)
        ckpt.close()
        self.write(done=step)

    def _await_others(self) -> None:
        """Until all ranks are done, each of which needs rank 0 until then."""
        place, world = Path(self.out.name).parent, dist.get_world_size()
        until = time.monotonic() + 120
        while time.monotonic() < until:
            told = [place / f"r{rank}.jsonl" for rank in range(world)]
            if all(p.exists() and '"done"' in p.read_text() for p in told):
                return
            time.sleep(0.01)

    @staticmethod
    def _settle(ckpt: holdfast.Checkpointer) -> None:
        """Until the snapshot is complete, so that a script knows what there is."""
        ckpt.wait(120)
