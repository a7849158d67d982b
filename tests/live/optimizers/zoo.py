"""Optimizers of torch and of others, in the forms in which scripts have them.

Each is a `Trained`: what is handed to a checkpointer as "optim", the torch optimizers inside, and how a
step is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

LR = 0.01


@dataclass
class Trained:
    model: nn.Module
    optim: Any
    """Value of the state: an optimizer, a list, a dict or a container of some."""
    parts: list[Optimizer]
    makes_steps: bool = True
    """False if the optimizers step in backward."""
    needs_closure: bool = False

    def step(self, loss: Callable[[], torch.Tensor]) -> None:
        """Take one step on a loss."""
        if self.needs_closure:
            for part in self.parts:
                part.step(lambda: self._backward(loss))
            return
        self._backward(loss)
        for part in self.parts if self.makes_steps else ():
            part.step()

    def _backward(self, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
        for p in self.model.parameters():
            p.grad = None
        value = loss()
        value.backward()
        return value


Build = Callable[[nn.Module], Trained]
ZOO: dict[str, Build] = {}
"""How to make the optimizer of a model, by name."""


def one(name: str, module: str, kind: str, **options: Any) -> None:
    """An optimizer of a package by its class."""

    def build(model: nn.Module) -> Trained:
        made = getattr(importlib.import_module(module), kind)(model.parameters(), lr=LR, **options)
        if callable(getattr(made, "train", None)):  # schedule-free ones have two modes
            made.train()
        return Trained(model, made, [made], needs_closure=kind == "LBFGS")

    ZOO[name] = build


for kind, options in {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"foreach": False},
    "AdamW": {"amsgrad": True, "foreach": False},
    "Adamax": {"foreach": False},
    "NAdam": {"foreach": False},
    "RAdam": {"foreach": False},
    "RMSprop": {"centered": True, "momentum": 0.9, "foreach": False},
    "Adagrad": {"foreach": False},
    "Adadelta": {"foreach": False},
    "Rprop": {"foreach": False},
    "ASGD": {"foreach": False},
    "Adafactor": {"foreach": False},
    "LBFGS": {"max_iter": 2},
}.items():
    one(kind, "torch.optim", kind, **options)
for kind in ("AdamW8bit", "AdamW4bit", "AdamWFp8", "_AdamW"):
    one(f"torchao {kind}", "torchao.optim", kind)
one("bitsandbytes AdamW8bit", "bitsandbytes.optim", "AdamW8bit")
for kind, options in {
    "SOAP": {"precondition_frequency": 1},
    "Shampoo": {},
    "Lion": {},
    "ScheduleFreeAdamW": {},
    "Prodigy": {},
    "Adan": {},
    "CAME": {},
    "Lamb": {},
    "AdEMAMix": {},
    "MARS": {},
    "Kron": {},
}.items():
    one(kind, "pytorch_optimizer", kind, **options)
one("schedulefree AdamWScheduleFree", "schedulefree", "AdamWScheduleFree", foreach=False)
one("prodigyopt Prodigy", "prodigyopt", "Prodigy")


def matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters of two dims, and the others."""
    params = list(model.parameters())
    return [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]


def _muon(model: nn.Module) -> Trained:
    two, others = matrices(model)
    parts: list[Optimizer] = [
        torch.optim.Muon(two, lr=LR),
        torch.optim.AdamW(others, lr=LR, foreach=False),
    ]
    return Trained(model, parts, parts)


def _dict(model: nn.Module) -> Trained:
    two, others = matrices(model)
    parts: dict[str, Optimizer] = {
        "matrices": torch.optim.SGD(two, lr=LR, momentum=0.9, foreach=False),
        "others": torch.optim.Adam(others, lr=LR, foreach=False),
    }
    return Trained(model, parts, list(parts.values()))


class Container(Optimizer):
    """Shows what several optimizers have, as torchtitan's does, and makes no steps of its own."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers
        params = [p for one in optimizers for group in one.param_groups for p in group["params"]]
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.optimizers:
            one.step()


def _container(model: nn.Module) -> Trained:
    two, others = matrices(model)
    container = Container(
        [
            torch.optim.AdamW(two, lr=LR, foreach=False),
            torch.optim.RMSprop(others, lr=LR, foreach=False),
        ]
    )
    return Trained(model, container, list(container.optimizers))


def _in_backward(model: nn.Module) -> Trained:
    parts: list[Optimizer] = []
    for p in model.parameters():
        part = torch.optim.AdamW([p], lr=LR, foreach=False)
        parts.append(part)

        def step(_: torch.Tensor, part: Optimizer = part) -> None:
            part.step()

        p.register_post_accumulate_grad_hook(step)
    return Trained(model, parts, parts, makes_steps=False)


ZOO |= {
    "Muon and AdamW in a list": _muon,
    "SGD and Adam in a dict": _dict,
    "AdamW and RMSprop in a container": _container,
    "AdamW in backward": _in_backward,
}
