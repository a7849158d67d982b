"""A toy framework: a float32 master of each bfloat16 weight.  The program of docs/how-to/framework.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from holdfast import sources


class Mixed:
    """Adam on float32 masters of a bfloat16 model."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = list(model.parameters())
        self.masters = [nn.Parameter(p.detach().float()) for p in self.weights]
        self.adam = torch.optim.Adam(self.masters)

    def step(self) -> None:
        for p, master in zip(self.weights, self.masters):
            master.grad = None if p.grad is None else p.grad.float()
        self.adam.step()
        self.publish()

    def publish(self) -> None:
        for p, master in zip(self.weights, self.masters):
            p.data.copy_(master.detach())


class MixedSource(sources.Source):
    framework = "mixed"

    def __init__(self, optimizer: Mixed) -> None:
        self.of = optimizer
        pairs = zip(optimizer.weights, optimizer.masters)
        self.masters = {id(p): sources.Master(master, optimizer.adam) for p, master in pairs}

    def groups(self, optimizer: Any) -> list[sources.Group]:
        return [(self.of.adam.param_groups[0], self.of.weights)]

    def master(self, p: torch.Tensor) -> sources.Master | None:
        return self.masters.get(id(p))

    def refresh(self) -> None:
        self.of.publish()

    def poison(self) -> None:
        for p in self.of.weights:
            p.data.fill_(float("nan"))


class MixedFramework(sources.Framework):
    def owns(self, value: Any) -> bool:
        return isinstance(value, Mixed)

    def sources(
        self, modules: Mapping[str, Sequence[nn.Module]], state: Mapping[str, Any]
    ) -> dict[int, sources.Source]:
        found: dict[int, sources.Source] = {}
        for optimizer in filter(self.owns, state.values()):
            source = MixedSource(optimizer)
            models = [m for some in modules.values() for m in some]
            served = [m for m in models if any(id(p) in source.masters for p in m.parameters())]
            found |= {id(one): source for one in (optimizer, *served)}
        return found


sources.register(MixedFramework())
