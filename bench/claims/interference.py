"""Training speed while saves run: holdfast against dcp.async_save and against no save.

A small GPT-like model trains on the CPU, data-parallel over gloo, while 1.5 GB of further state (GPT-2
small with AdamW's moments, not trained) is saved with it.  A window lasts `--window` seconds and has
one save, at its start; what counts is the steps done in it, as a rate.  All save once per window, so
the work is the same.  The rate over windows with a save, relative to the neighbouring windows without:
1 means that saving costs nothing.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

from bench.lib.claims import Claim
from bench.lib.common import Job, main, over_ranks, ranks_of, row, settle

CLAIMS = (
    Claim(
        "Beside a save, a training is at least as fast as beside dcp.async_save.",
        r"^training beside a save, (.+?) \|.*\| dcp.async_save",
        at_least=1,
    ),
)


def make_model() -> Any:
    """Four transformer layers of width 256, 3 M parameters."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.Embedding(512, 256), nn.TransformerEncoder(layer, 4), nn.Linear(256, 512)
    )


def work(job: Job) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    import holdfast
    from bench.lib.state import State

    ballast = State(job.size, small=job.args.small)
    model: Any = make_model()
    if job.size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(512, (4, 129))

    def train() -> None:
        logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optim.step()
        optim.zero_grad()

    train()
    live = {"small": model, "small_optim": optim} | ballast.for_holdfast()
    ckpt = holdfast.Checkpointer(
        job.root / "holdfast", live, keep=holdfast.Keep(last=1), on_error="raise"
    )
    group = dist.new_group(backend="gloo")
    step = iter(range(1, 1000))

    def dcp_save() -> Any:
        plain = model.module if job.size > 1 else model
        names = dict(plain.named_parameters())
        tree = ballast.for_dcp() | {
            "small": plain.state_dict(),
            "small_optim": {n: dict(optim.state[p]) for n, p in names.items()},
        }
        return dcp.async_save(
            tree, checkpoint_id=job.root / "dcp" / f"{next(step)}", process_group=group
        )

    starts: dict[str, Any] = {
        "none": lambda: None,
        "holdfast": lambda: ckpt.save(next(step)),
        "dcp": dcp_save,
    }
    ends = {"none": lambda _: None, "holdfast": lambda s: s.wait(), "dcp": lambda f: f.result()}

    def window(name: str) -> dict[str, float]:
        dist.barrier()
        started, steps, done_s = time.perf_counter(), 0, 0.0
        save = starts[name]()
        go = torch.ones(1)
        while go.item():
            train()
            steps += 1
            spent = time.perf_counter() - started
            if save is not None and not done_s and save.done():
                done_s = spent
            go.fill_(float(spent < job.args.window))
            dist.broadcast(go, 0)  # all ranks stop at the same step
        rate = steps / (time.perf_counter() - started)
        ends[name](save)
        done_s = done_s or time.perf_counter() - started
        settle(job, job.root / "dcp")
        return {"steps_per_s": over_ranks(rate, "MIN"), "save_s": over_ranks(done_s)}

    for name in ("none", "holdfast", "dcp"):
        window(name)
    rounds: list[dict[str, Any]] = []
    for number in range(job.args.rounds):
        names = ["none", "holdfast", "dcp"] if number % 2 else ["dcp", "holdfast", "none"]
        rounds.append({name: window(name) for name in names})
    ckpt.close()
    return {"bytes": over_ranks(ballast.local_bytes, "SUM"), "rounds": rounds}


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for ranks, f in found.items():
        rates = {n: [r[n]["steps_per_s"] for r in f["rounds"]] for n in ("none", "holdfast", "dcp")}
        saves = {n: median(r[n]["save_s"] for r in f["rounds"]) for n in ("holdfast", "dcp")}
        kept = {n: median(a / b for a, b in zip(rates[n], rates["none"])) for n in rates}
        text = {n: f"{median(rates[n]):.1f} steps/s (save {saves[n]:.1f} s)" for n in saves}
        who = f"training beside a save, {ranks_of(ranks)}"
        versus = median(a / b for a, b in zip(rates["holdfast"], rates["dcp"]))
        out.append(row(who, text["holdfast"], f"dcp.async_save: {text['dcp']}", versus))
        none = f"no save: {median(rates['none']):.1f} steps/s (dcp keeps {kept['dcp']:.2f})"
        out.append(row(who, text["holdfast"], none, kept["holdfast"]))
    return out


def extend(p: argparse.ArgumentParser) -> None:
    p.add_argument("--window", type=float, default=6.0, help="seconds per window (default: 6)")


if __name__ == "__main__":
    main(CLAIMS, __doc__, work, rows, ranks="1,2", extend=extend)
