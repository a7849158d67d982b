"""A toy framework: bfloat16 weights, and one flat float32 master of all of them, cut over the ranks.

`Optimizer` is the framework; `ToySource` and `Toy` tell holdfast of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from holdfast.sources import Framework, Group, Master, Source, flat_cut, register


class Optimizer:
    """Adam on this rank's piece of the master."""

    def __init__(self, model: nn.Module) -> None:
        self.params, self.steps = list(model.parameters()), 0
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        whole = parameters_to_vector(self.params).detach().float()
        self.start, self.stop = len(whole) * rank // ranks, len(whole) * (rank + 1) // ranks
        self.master = nn.Parameter(whole[self.start : self.stop].clone())
        self.inner = torch.optim.Adam([self.master], lr=0.01)

    def step(self) -> None:
        grads = parameters_to_vector([p.grad for p in self.params if p.grad is not None])
        if dist.is_initialized():
            dist.all_reduce(grads)
        self.master.grad = grads[self.start : self.stop].float()
        self.inner.step()
        self.steps += 1
        self.publish()

    def publish(self) -> None:
        pieces = [self.master.detach()]
        if dist.is_initialized():
            pieces *= dist.get_world_size()
            dist.all_gather_object(pieces, self.master.detach())
        vector_to_parameters(torch.cat(pieces).bfloat16(), self.params)


class ToySource(Source):
    framework = "toy"
    by_master = True  # one state of Adam serves all weights

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.masters, at = optimizer, {}, 0
        for p in optimizer.params:
            start, stop = (
                min(max(end - at, 0), p.numel()) for end in (optimizer.start, optimizer.stop)
            )
            cut = flat_cut(p.shape, start, stop, max(at - optimizer.start, 0))
            self.masters[id(p)] = Master(optimizer.master, optimizer.inner, tuple(p.shape), cut)
            at += p.numel()

    def groups(self, optimizer: Any) -> list[Group]:
        return [(self.optimizer.inner.param_groups[0], self.optimizer.params)]

    def master(self, p: torch.Tensor) -> Master | None:
        return self.masters.get(id(p))

    def extras(self) -> dict[str, Any]:
        return {"steps": self.optimizer.steps}

    def put_extras(self, saved: dict[str, Any]) -> None:
        self.optimizer.steps = saved["steps"]

    def refresh(self) -> None:
        self.optimizer.publish()

    def poison(self) -> None:
        for p in self.optimizer.params:
            p.data.fill_(float("nan"))


class Toy(Framework):
    def owns(self, value: Any) -> bool:
        return isinstance(value, Optimizer)

    def sources(
        self, modules: Mapping[str, Sequence[nn.Module]], state: Mapping[str, Any]
    ) -> dict[int, Source]:
        found: dict[int, Source] = {}
        for optimizer in (value for value in state.values() if self.owns(value)):
            source = found[id(optimizer)] = ToySource(optimizer)
            for module in (m for some in modules.values() for m in some):
                if any(id(p) in source.masters for p in module.parameters()):
                    found[id(module)] = source
        return found


register(Toy())
