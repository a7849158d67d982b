"""What a record of every step costs real trainings under DDP, of a GPT and of a ResNet, with AdamW.

gpt          as large as GPT-2 small, on random bytes
resnet       ResNet-18 on random pictures of 32 by 32
each with its gradients as they are (dense), and compressed by `TopK(ratio=0.01)`:
without      that training
records      the same with holdfast, Delta(): the gradient of every step, to disk
Beside the time that both take, the processor time of the whole machine, until all records are on disk.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

from bench.lib.claims import Claim
from bench.lib.common import (
    ROOT,
    Job,
    main,
    ranks_of,
    ratio,
    row,
    seconds,
    settle,
    slowest,
    take_turns,
)

CLAIMS = (
    Claim(
        "A dense record of every step lengthens a real training by at most 5 %.",
        r"a record of each: (\w+), dense, (.+?) \|",
        at_most=5,
        unit="%",
    ),
    Claim(
        "A record of every step with TopK lengthens a real training by at most 3.1 %.",
        r"a record of each: (\w+), topk, (.+?) \|",
        at_most=3.1,
        unit="%",
    ),
    Claim(
        "A dense record has at most 34 % of the state's bytes.",
        r"^bytes of a record: (\w+), dense, (.+?) \|",
        at_most=34,
        unit="%",
    ),
    Claim(
        "A record with TopK has at most 1.5 % of the state's bytes.",
        r"^bytes of a record: (\w+), topk, (.+?) \|",
        at_most=1.5,
        unit="%",
    ),
)
STEPS = 6
RATIO = 0.01
CASES = tuple(f" {model} {how}" for model in ("gpt", "resnet") for how in ("dense", "topk"))


def gpt(job: Job) -> tuple[Any, Callable[[Any], Any]]:
    """The model, and its loss on a new batch."""
    import torch
    import torch.nn.functional as F  # noqa: N812  its usual name

    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import GPT, Shape

    wide = Shape(768, 2048, 4 if job.args.small else 15, 12, 12)

    def loss(model: Any) -> Any:
        tokens = torch.randint(wide.vocab, (job.args.batch, wide.context + 1))
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return GPT(wide), loss


def resnet(job: Job) -> tuple[Any, Callable[[Any], Any]]:
    import torch
    import torch.nn.functional as F  # noqa: N812  its usual name

    from bench.lib.resnet import ResNet

    def loss(model: Any) -> Any:
        pictures = torch.randn(32 * job.args.batch, 3, 32, 32)
        return F.cross_entropy(model(pictures), torch.randint(10, (len(pictures),)))

    return ResNet(), loss


def busy_s() -> float:
    """Processor seconds of this machine so far, of everything that runs on it."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq = map(int, file.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def work(job: Job) -> dict[str, Any]:
    import torch
    from torch import nn

    import holdfast

    torch.manual_seed(0)
    _, kind, how = job.phase.split(" ")
    inner, loss = {"gpt": gpt, "resnet": resnet}[kind](job)
    model = nn.parallel.DistributedDataParallel(inner)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-4)
    state = {"model": model, "optim": optim}
    if how == "topk":
        state["topk"] = holdfast.compression.TopK(RATIO)
        state["topk"].register(model)
    torch.manual_seed(job.rank)
    number = iter(range(1, 1_000_000))
    written: list[int] = []
    holdfast.events.subscribe(
        lambda e: written.append(e.fields["bytes"]) if e.name == "delta.wrote" else None
    )

    def train() -> None:
        loss(model).backward()
        optim.step()
        optim.zero_grad()

    busy: dict[str, list[float]] = {"without": [], "records": []}

    def timed(step: Callable[[], None]) -> float:
        def run() -> None:
            for _ in range(STEPS):
                step()

        return slowest(run)

    def without() -> float:
        before = busy_s()
        took = timed(train)
        busy["without"].append(busy_s() - before)
        return took

    def with_records() -> float:
        ckpt = holdfast.Checkpointer(
            job.root / "records",
            state,
            every=holdfast.Every(delta=1),
            delta=holdfast.Delta(),
            on_error="raise",
        )

        def one() -> None:
            train()
            ckpt.step(next(number))

        one()
        ckpt.wait()
        for _ in range(2):  # the plan, and memory
            one()
        before = busy_s()
        took = timed(one)
        ckpt.close()
        busy["records"].append(busy_s() - before)
        settle(job, job.root / "records")
        return took

    for _ in range(2):
        train()
    samples = take_turns(
        {"without": lambda _: without(), "records": lambda _: with_records()},
        job.args.rounds,
    )
    full = sum(p.numel() * p.element_size() for p in model.parameters()) * 3
    return {"record": median(written) * job.size, "full": full, "samples": samples, "busy": busy}


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for case, f in found.items():
        ranks, model, how = case.split(" ")
        who = f"{model}, {how}, {ranks_of(ranks)}"
        s = f["samples"]
        out += [
            row(f"{STEPS} steps, a record of each: {who}", seconds(s, "records"),
                f"without {seconds(s, 'without')}", 100 * (ratio(s, "records", "without") - 1),
                " %"),
            row(f"processor time: {who}", seconds(f["busy"], "records"),
                f"without {seconds(f['busy'], 'without')}",
                100 * (ratio(f["busy"], "records", "without") - 1), " %"),
            row(f"bytes of a record: {who}", f"{f['record'] / 1e6:.1f} MB",
                f"state {f['full'] / 1e6:.0f} MB", 100 * f["record"] / f["full"],
                " %"),
        ]  # fmt: skip
    return out


def extend(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--batch",
        type=int,
        default=2,
        help="sequences of 128 bytes, or 32 pictures each (default: 2)",
    )


def phases(numbers: list[int]) -> list[tuple[int, str]]:
    return [(n, case) for n in numbers for case in CASES]


if __name__ == "__main__":
    main(
        CLAIMS, __doc__, work, rows,
        rounds=5, ranks="1,2", phases=phases, extend=extend,
    )  # fmt: skip
