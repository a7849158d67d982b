"""What a record of every step costs a training whose gradients TopK compresses.

A GPT as large as GPT-2 small trains under DDP with `TopK(ratio=0.01)` and AdamW, on random bytes.
without      that training
records      the same with holdfast, Delta(): what all ranks have sent, of every step, to disk
"""

from __future__ import annotations

import argparse
import sys
from statistics import median
from typing import Any

from common import HERE, Job, main, ratio, row, seconds, settle, slowest, take_turns

sys.path.insert(0, str(HERE.parent / "examples"))

STEPS = 6
RATIO = 0.01


def work(job: Job) -> dict[str, Any]:
    import torch
    import torch.nn.functional as F  # noqa: N812  its usual name
    from gpt import GPT, Shape
    from torch import nn

    import holdfast

    torch.manual_seed(0)
    wide = Shape(768, 2048, 4 if job.args.small else 15, 12, 12)
    model = nn.parallel.DistributedDataParallel(GPT(wide))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-4)
    topk = holdfast.compression.TopK(RATIO)
    topk.register(model)
    state = {"model": model, "optim": optim, "topk": topk}
    torch.manual_seed(job.rank)
    number = iter(range(1, 1_000_000))
    written: list[int] = []
    holdfast.events.subscribe(
        lambda e: written.append(e.fields["bytes"]) if e.name == "delta.wrote" else None
    )

    def train() -> None:
        tokens = torch.randint(wide.vocab, (job.args.batch, wide.context + 1))
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optim.step()
        optim.zero_grad()

    def loop() -> float:
        def run() -> None:
            for _ in range(STEPS):
                train()

        return slowest(run)

    def with_records() -> float:
        ckpt = holdfast.Checkpointer(
            job.root / "topk",
            state,
            every=holdfast.Every(delta=1),
            delta=holdfast.Delta(),
            on_error="raise",
        )

        def one() -> None:
            train()
            ckpt.step(next(number))

        def run() -> None:
            for _ in range(STEPS):
                one()

        one()
        ckpt.wait()
        for _ in range(2):  # the plan, and memory
            one()
        took = slowest(run)
        ckpt.close()
        settle(job, job.root / "topk")
        return took

    for _ in range(2):
        train()
    samples = take_turns(
        {"without": lambda _: loop(), "records": lambda _: with_records()}, job.args.rounds
    )
    full = sum(p.numel() * p.element_size() for p in model.parameters()) * 3
    return {"record": median(written) * job.size, "full": full, "samples": samples}


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for ranks, f in found.items():
        who = f"{ranks} rank{'s' * (ranks != '1')}"
        s = f["samples"]
        out += [
            row(f"{STEPS} steps with TopK 1 %, a record of each, {who}", seconds(s, "records"),
                f"without {seconds(s, 'without')}", 100 * (ratio(s, "records", "without") - 1),
                "<= 3.1", " %"),
            row(f"bytes of a record, TopK 1 %, {who}", f"{f['record'] / 1e6:.1f} MB",
                f"state {f['full'] / 1e6:.0f} MB", 100 * f["record"] / f["full"], "<= 1.5", " %"),
        ]  # fmt: skip
    return out


def extend(p: argparse.ArgumentParser) -> None:
    p.add_argument("--batch", type=int, default=2, help="sequences of 128 bytes (default: 2)")


if __name__ == "__main__":
    main("topk", __doc__, work, rows, rounds=5, ranks="1,2", extend=extend)
