"""Optimizer steps on the host: torch's own, and the same in blocks, as replays and replicas make them.

They take turns on one core, with 38 M elements in parameters as GPT-2 small has them, and must come out
bit for bit alike.
whole        optimizer.step()
blocks       holdfast.live.state.blockwise
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.lib.claims import Claim
from bench.lib.common import ratio, report, reporting, row, take_turns
from holdfast.live.state.blockwise import Blockwise

CLAIMS = (
    Claim(
        "In blocks, an optimizer's step on the host takes no longer than whole.",
        r"^a step of (?!.*left to torch)(.+?) \|",
        at_least=1,
    ),
)

SHAPES = ((768, 3072),) * 4 + ((50257, 576),) + ((768,),) * 24
ROUNDS = 6
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW, fused (left to torch)": lambda p: torch.optim.AdamW(p, fused=True),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
}


class Run:
    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        self.optim = make(self.params)
        self.blockwise = Blockwise(self.optim)
        for p in self.params:
            p.grad = torch.randn_like(p)
        self.optim.step()

    def whole(self) -> float:
        return seconds_of(self.optim.step)

    def blocks(self) -> float:
        step = self.blockwise.step if self.blockwise.is_possible() else self.optim.step
        return seconds_of(step)

    def everything(self) -> list[torch.Tensor]:
        states = [v for p in self.params for v in self.optim.state[p].values()]
        return [p.detach() for p in self.params] + states


def seconds_of(step: Callable[[], Any]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def measured(make: Callable[[Any], torch.optim.Optimizer]) -> dict[str, list[float]]:
    one, other = Run(make), Run(make)
    found = take_turns({"whole": lambda _: one.whole(), "blocks": lambda _: other.blocks()}, ROUNDS)
    assert all(torch.equal(a, b) for a, b in zip(one.everything(), other.everything()))
    return found


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    elements = sum(torch.Size(shape).numel() for shape in SHAPES)

    def each(samples: dict[str, list[float]], who: str) -> str:
        return f"{sorted(samples[who])[ROUNDS // 2] / elements * 1e9:.2f} ns per element"

    return [
        row(
            f"a step of {name}",
            each(s, "blocks"),
            f"whole {each(s, 'whole')}",
            ratio(s, "whole", "blocks"),
        )
        for name, s in found.items()
    ]


def main() -> None:
    args = reporting(__doc__).parse_args()
    torch.set_num_threads(1)
    began = time.time()
    found = {name: measured(make) for name, make in KINDS.items()}
    report(CLAIMS, __doc__, args, found, rows(found), began)


if __name__ == "__main__":
    main()
