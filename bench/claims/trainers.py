"""Trainers: their own checkpoints against holdfast's integration, as often, in the same training.

The same training, once without saving, once with the trainer's own checkpoints and once with holdfast's.
*Per step* is the time of all steps, saves included, by their number; *stall* is what a save adds: the time
of the steps less that without saving, by the number of saves.  What is written after the last step is not
counted for anybody that saves in the background; it is told apart (`rest_s`).
transformers  Trainer, DDP with 2 ranks, save_steps
accelerate    Accelerator, DDP with 2 ranks, save_state()
lightning     DDP (one device with 1 rank), ModelCheckpoint(every_n_train_steps=N, save_top_k=1)
torchtitan    FSDP2, its real parts in a loop as its Trainer's; its manager synchronous, and `async`
deepspeed     ZeRO-1 and ZeRO-3, bf16, save_checkpoint()
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from functools import partial
from statistics import median
from typing import Any

from bench.lib.claims import Claim
from bench.lib.common import ROOT, Job, main, over_ranks, ranks_of, row, settle, take_turns
from bench.lib.trainers_train import (
    DEPTH,
    SAVES,
    STEPS,
    width_of,
    with_accelerate,
    with_deepspeed,
    with_lightning,
    with_torchtitan,
    with_transformers,
)

CLAIMS = (
    Claim(
        "Under each trainer, a step, saves included, takes no longer than with the trainer's own.",
        r"^(.+): per step",
        at_least=1,
    ),
    Claim(
        "Under each trainer, a save holds the training no longer than the trainer's own.",
        r"^(.+): stall of a save",
        at_most=1,
    ),
)
NAMES = ("none", "own", "holdfast")
TRAINERS = {
    "transformers": (with_transformers, NAMES),
    "accelerate": (with_accelerate, NAMES),
    "lightning": (with_lightning, NAMES),
    "torchtitan": (with_torchtitan, (*NAMES, "own async")),
    "deepspeed ZeRO-1": (partial(with_deepspeed, stage=1), NAMES),
    "deepspeed ZeRO-3": (partial(with_deepspeed, stage=3), NAMES),
}


def work(job: Job) -> dict[str, Any]:
    logging.disable(logging.CRITICAL)
    sys.path.insert(0, str(ROOT / "tests"))
    make, names = TRAINERS[job.phase]
    train = make(job)
    rest: dict[str, list[float]] = {name: [] for name in names}

    def one(name: str, _: int) -> float:
        at = job.root / "run"
        settle(job, at)
        gc.collect()
        took, after = (over_ranks(seconds) for seconds in train(name, at))
        rest[name].append(after)
        settle(job, at)
        return took

    for name in names:
        one(name, 0)  # the first one imports and allocates
        rest[name].clear()
    samples = take_turns({name: partial(one, name) for name in names}, job.args.rounds)
    num = DEPTH * (width_of(job) + 1) * width_of(job) * 4 * 3
    return {"bytes": num, "samples": samples, "rest_s": rest, "steps": STEPS, "saves": SAVES}


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for run, f in found.items():
        s = f["samples"]
        ranks, trainer = run[0], run[1:]
        stall = {
            name: median((a - b) / SAVES for a, b in zip(s[name], s["none"]))
            for name in s
            if name != "none"
        }
        for other in [name for name in stall if name != "holdfast"]:
            what = f"{trainer}, {ranks_of(ranks)}, against {other}"
            ours, theirs = (f"{median(s[n]) / STEPS * 1e3:.1f} ms" for n in ("holdfast", other))
            faster = median(a / b for a, b in zip(s[other], s["holdfast"]))
            out.append(row(f"{what}: per step", ours, theirs, faster))
            ours, theirs = (f"{stall[n] * 1e3:.0f} ms" for n in ("holdfast", other))
            share = stall["holdfast"] / stall[other] if stall[other] > 0 else float("nan")
            out.append(row(f"{what}: stall of a save", ours, theirs, share))
    return out


def extend(p: argparse.ArgumentParser) -> None:
    p.add_argument("--only", default="", help="trainers, by comma (default: all)")


if __name__ == "__main__":
    main(
        CLAIMS,
        __doc__,
        work,
        rows,
        rounds=4,
        ranks="1,2",
        phases=lambda numbers: [(n, trainer) for trainer in TRAINERS for n in numbers],
        extend=extend,
        chosen=lambda args, phase: not args.only or phase in args.only.split(","),
    )
