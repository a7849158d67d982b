"""What a stale residual of TopK costs a training: its loss after a replay, beside the uninterrupted one.

Two ranks, in one process, train a small GPT (examples/gpt.py) on this repository's own text with TopK
1 % and error feedback.  Some steps after a full save the residuals are replaced, as a replay to that step
would leave them, and the training goes on for 100 steps:
true      what they were: the uninterrupted training
base      those of the full save
empty     none
masked    those of the full save, but for elements that any rank has sent since
"""

from __future__ import annotations

import copy
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  its usual name
from torch import Tensor

from bench.lib.claims import Claim
from bench.lib.common import ROOT, report, reporting, row

sys.path.append(str(ROOT / "examples"))

from gpt import GPT, Shape

CLAIMS = (
    Claim(
        "The loss with TopK differs by less than 0.2 %, 100 steps after a record was restored.",
        r"residuals of (\d+) steps ago: base",
        at_least=-0.2,
        at_most=0.2,
        unit="%",
    ),
)
RANKS, RATIO, BASE, AFTER = 2, 0.01, 150, 100
GAPS = 10, 50
SHAPE = Shape(dim=64, hidden=128, num_layers=2, num_heads=4, num_kv_heads=2, context=64)
TEXT = b"".join(p.read_bytes() for p in sorted((ROOT / "docs").rglob("*.md")))
DATA = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()


def loss_of(model: GPT, sequences: int, seed: int) -> Tensor:
    chosen = torch.Generator().manual_seed(seed)
    at = torch.randint(len(DATA) - SHAPE.context - 1, (sequences,), generator=chosen).tolist()
    tokens = torch.stack([DATA[a : a + SHAPE.context + 1] for a in at])
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Training:
    """Top-k with error feedback, of all ranks."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = GPT(SHAPE)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.kept = [[torch.zeros_like(p) for p in self.model.parameters()] for _ in range(RANKS)]
        self.sent = [torch.zeros_like(p, dtype=torch.bool) for p in self.model.parameters()]

    def step(self, number: int) -> None:
        total = [torch.zeros_like(p) for p in self.model.parameters()]
        for rank, kept in enumerate(self.kept):
            self.model.zero_grad()
            loss_of(self.model, 4, RANKS * number + rank).backward()
            for whole, p, sum_ in zip(kept, self.model.parameters(), total):
                own = whole.add_(p.grad).view(-1)
                chosen = own.abs().topk(max(1, int(RATIO * len(own)))).indices
                sum_.view(-1)[chosen] += own[chosen] / RANKS
                own[chosen] = 0
        for p, sum_, sent in zip(self.model.parameters(), total, self.sent):
            p.grad = sum_
            sent |= sum_ != 0
        self.optim.step()


def stale(gap: int) -> dict[str, dict[str, float]]:
    """By what the residuals were replaced with, `gap` steps after the full save: their error (relative, in
    norm), and the loss of the training that went on."""
    run = Training()
    for number in range(BASE):
        run.step(number)
    base = copy.deepcopy(run.kept)
    run.sent = [torch.zeros_like(s) for s in run.sent]
    for number in range(BASE, BASE + gap):
        run.step(number)
    ways = {
        "true": run.kept,
        "base": base,
        "empty": [[torch.zeros_like(e) for e in kept] for kept in base],
        "masked": [[torch.where(s, 0, e) for e, s in zip(kept, run.sent)] for kept in base],
    }
    norm = torch.cat([e.flatten() for kept in run.kept for e in kept]).norm()
    found = {}
    for name, kept in ways.items():
        pairs = [(a, b) for x, y in zip(kept, run.kept) for a, b in zip(x, y)]
        error = torch.cat([(a - b).flatten() for a, b in pairs]).norm() / norm
        other = copy.deepcopy(run)
        other.kept = copy.deepcopy(kept)
        for number in range(AFTER):
            other.step(BASE + gap + number)
        with torch.no_grad():
            loss = float(loss_of(other.model, 256, 10**6))
        found[name] = {"error": float(error), "loss": loss}
    return found


def rows(found: dict[str, dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    return [
        row(
            f"loss, {AFTER} steps after residuals of {gap} steps ago: {name}",
            f"{one['loss']:.4f} (error of the residual {one['error']:.2f})",
            f"true {ways['true']['loss']:.4f}",
            100 * (one["loss"] / ways["true"]["loss"] - 1),
            unit=" %",
        )
        for gap, ways in found.items()
        for name, one in ways.items()
    ]


def main() -> None:
    args = reporting(__doc__).parse_args()
    torch.set_num_threads(1)
    began = time.time()
    found = {str(gap): stale(gap) for gap in GAPS}
    report(CLAIMS, __doc__, args, found, rows(found), began)


if __name__ == "__main__":
    main()
