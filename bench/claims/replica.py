"""What snapshots from gradients cost the training, beside snapshots of the state.

One *step* is a compute loop (matrix products and nothing else, in the place of forward and backward) and a
real AdamW step over the whole state.
gradient     Memory(feed="gradient"): a replica on the host makes every step, too; a snapshot is taken of
             it whenever the one before is complete
state        Memory(): a snapshot of the state whenever the one before is complete
without      neither
On CPUs the replica shares the cores with the training, so its optimizer steps are paid for twice; on a GPU
it has the host's cores for itself.
"""

from __future__ import annotations

import os
from typing import Any

from bench.lib.claims import Claim
from bench.lib.common import (
    Job,
    main,
    over_ranks,
    ranks_of,
    ratio,
    row,
    seconds,
    shared_memory,
    slowest,
    take_turns,
    with_compute,
)
from bench.lib.trainer import Trainer

CLAIMS = (
    Claim(
        "Snapshots from gradients lengthen a training by at most 2 %: the aim for devices.",
        r"snapshots from gradients, (.+?) \|",
        at_most=2,
        unit="%",
    ),
)
STEPS = 10
FEEDS = ("gradient", "state")


def work(job: Job) -> dict[str, Any]:
    import torch.distributed as dist

    import holdfast

    trainer = Trainer(job)
    os.environ["HOLDFAST_MEMORY_DIR"] = str(shared_memory())
    seen: list[str] = []
    holdfast.events.subscribe(lambda e: seen.append(e.name))
    number = iter(range(1, 100_000))
    followed: list[int] = []
    lost: list[int] = []

    def step() -> None:
        trainer.compute()
        trainer.update()

    def loop(name: str) -> float:
        if name == "without":
            return slowest(lambda: [step() for _ in range(STEPS)])
        ckpt = holdfast.Checkpointer(
            job.root / name,
            trainer.state.for_holdfast(),
            every=holdfast.Every(memory=1),
            memory=holdfast.Memory("none", budget="64GB", feed=name),
            on_error="raise",
        )
        for _ in range(4):  # the first allocate, and the replica learns and proves itself
            step()
            ckpt.step(next(number))
            ckpt.wait()
        seen.clear()

        def run() -> None:
            for _ in range(STEPS):
                step()
                ckpt.step(next(number))

        took = slowest(run)
        ckpt.wait()
        if name == "gradient":
            followed.append(seen.count("feed.followed"))
            lost.append(seen.count("twins.lost"))
        ckpt.close()
        dist.barrier()
        return took

    loops = take_turns({n: lambda _, n=n: loop(n) for n in (*FEEDS, "without")}, job.args.rounds)
    return {
        "bytes": over_ranks(trainer.state.local_bytes, "SUM"),
        "loop": loops,
        "snapshots": over_ranks(sum(followed) / len(followed)),
        "lost": over_ranks(float(sum(lost))),
    }


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for ranks, f in found.items():
        who = ranks_of(ranks)
        for name in FEEDS:
            what = f"{STEPS} steps, snapshots of the {name}, {who}"
            if name == "gradient":
                what = f"{STEPS} steps, {f['snapshots']:.0f} snapshots from gradients, {who}"
            out.append(
                row(what, seconds(f["loop"], name), f"without {seconds(f['loop'], 'without')}",
                    100 * (ratio(f["loop"], name, "without") - 1), " %")
            )  # fmt: skip
    return out


if __name__ == "__main__":
    main(CLAIMS, __doc__, work, rows, rounds=3, ranks="1,2", extend=with_compute)
