"""DeepSpeed: an attached engine against its own `save_checkpoint`, as often.

The same training, once without saving, once with DeepSpeed's own checkpoints and once with an attached
engine's.  *Per step* is the time of all steps, saves included, by their number; *stall* is what a save
adds: the time of the steps less that without saving, by the number of saves.  What is written after the
last step is not counted for an engine that saves in the background; it is told apart (`rest_s`).
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from common import HERE, Job, main, over_ranks, row, settle, take_turns

sys.path.insert(0, str(HERE.parent / "tests"))
STEPS, SAVES = 40, 4
WIDTH, DEPTH = 1536, 4
NAMES = ("none", "own", "holdfast")


def engine_of(job: Job) -> tuple[Any, int]:
    from deepspeed_on_cpu import deepspeed

    # isort: split

    import torch
    from torch import nn

    torch.manual_seed(1)
    width = WIDTH // (4 if job.args.small else 1)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(DEPTH)])
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": int(job.phase[-1])},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return deepspeed.initialize(model=model, optimizer=adam, config=config)[0], width


def train(job: Job, name: str, at: Path) -> tuple[float, float]:
    """Return the seconds of all steps, and until all was written."""
    import torch

    from holdfast.integrations.deepspeed import attach

    engine, width = engine_of(job)
    ckpt = attach(engine, at) if name == "holdfast" else None
    batch = torch.randn(16, width).bfloat16()
    began = time.perf_counter()
    for step in range(1, STEPS + 1):
        engine.backward(engine(batch).float().square().mean())
        engine.step()
        if name != "none" and step % (STEPS // SAVES) == 0:
            engine.save_checkpoint(str(at), client_state={"step": step})
    ended = time.perf_counter()
    if ckpt is not None:
        ckpt.close()
    done = time.perf_counter()
    engine.destroy()
    return ended - began, done - ended


def work(job: Job) -> dict[str, Any]:
    from deepspeed_on_cpu import deepspeed

    # isort: split

    from deepspeed.utils import set_log_level_from_string

    set_log_level_from_string("error")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    rest: dict[str, list[float]] = {name: [] for name in NAMES}

    def one(name: str, _: int) -> float:
        at = job.root / "run"
        settle(job, at)
        took, after = (over_ranks(seconds) for seconds in train(job, name, at))
        rest[name].append(after)
        settle(job, at)
        return took

    for name in NAMES:
        one(name, 0)  # the first one imports and allocates
        rest[name].clear()
    samples = take_turns({name: partial(one, name) for name in NAMES}, job.args.rounds)
    width = WIDTH // (4 if job.args.small else 1)
    num = DEPTH * (width + 1) * width * 4 * 3
    return {"bytes": num, "samples": samples, "rest_s": rest, "steps": STEPS, "saves": SAVES}


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for run, f in found.items():
        s, ranks = f["samples"], run[0]
        what = f"ZeRO-{run[-1]}, {ranks} rank{'s' * (ranks != '1')}"
        ours, theirs = (f"{median(s[n]) / STEPS * 1e3:.1f} ms" for n in ("holdfast", "own"))
        faster = median(a / b for a, b in zip(s["own"], s["holdfast"]))
        out.append(row(f"{what}: per step", ours, theirs, faster))
        stall = {
            name: median((a - b) / SAVES for a, b in zip(s[name], s["none"]))
            for name in ("holdfast", "own")
        }
        ours, theirs = (f"{stall[n] * 1e3:.0f} ms" for n in ("holdfast", "own"))
        out.append(row(f"{what}: stall of a save", ours, theirs, stall["holdfast"] / stall["own"]))
    return out


if __name__ == "__main__":
    main(
        "trainers_ds",
        __doc__,
        work,
        rows,
        rounds=4,
        ranks="1,2",
        phases=lambda numbers: [(n, f"stage{s}") for s in (1, 3) for n in numbers],
    )
