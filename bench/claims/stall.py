"""How long a save holds the training thread: holdfast against dcp.async_save.

One *step* is a compute loop of about a second (matrix products and nothing else, in the place of forward
and backward) and a real AdamW step over the whole state.  The save is called after a step; then come
the compute loop and the optimizer's step.  *Held* is the time of the call, plus what must be waited for
before the optimizer may change the state, plus what the optimizer's step takes longer than without a save
(median of the same run).  What the compute loop takes longer, because cores are shared with the save, is
told apart: `interference.py` is about that.
holdfast     Checkpointer.save(step); its hook waits in optimizer.step()
dcp thread   async_save with its defaults: stages in the call, writes in a thread
dcp process  async_save(async_checkpointer_type=PROCESS): stages in the call, writes in a process
dcp staged   async_save with a DefaultStager that stages in a thread and is kept: the user must wait for
             its staging_completion before the optimizer's step (code around every save; no default)
"""

from __future__ import annotations

import time
from statistics import median
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
    settle,
    take_turns,
    with_compute,
)

CLAIMS = (
    Claim(
        "A durable save holds the training for at most a tenth of what dcp.async_save does.",
        r"^held by a save, (.+?) \|.*\| dcp (?:thread|process)",
        at_most=0.1,
    ),
)

DCP = ("dcp thread", "dcp process", "dcp staged")


def work(job: Job) -> dict[str, Any]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    import holdfast
    from bench.lib.trainer import Trainer

    trainer = Trainer(job)
    tree = trainer.state.for_dcp()
    group = dist.new_group(backend="gloo")
    stager = DefaultStager(StagingOptions(False, False, True, False))
    ckpt = holdfast.Checkpointer(
        job.root / "holdfast",
        trainer.state.for_holdfast(),
        keep=holdfast.Keep(last=1),
        on_error="raise",
    )
    options: dict[str, dict[str, Any]] = {
        "dcp thread": {"process_group": group},
        "dcp process": {"async_checkpointer_type": AsyncCheckpointerType.PROCESS},
        "dcp staged": {"process_group": group, "async_stager": stager},
    }
    step = iter(range(1, 1000))
    alone: list[tuple[float, float]] = []
    beside: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ("holdfast", *DCP)}

    def one(name: str) -> float:
        """A step without a save, then one with: its call, its compute loop, its optimizer's step."""
        alone.append((trainer.compute(), trainer.update()))
        dist.barrier()
        started = time.perf_counter()
        if name == "holdfast":
            save = ckpt.save(next(step))
            ended, ready = save.wait, None
        else:
            at = job.root / "dcp" / f"{next(step)}"
            answer: Any = dcp.async_save(tree, checkpoint_id=at, **options[name])
            ready = getattr(answer, "staging_completion", None)
            ended = answer.upload_completion.result if ready else answer.result
        called = time.perf_counter() - started
        computed = trainer.compute()
        started = time.perf_counter()
        if ready:
            ready.result()
        trainer.state.optim.step()
        beside[name].append((called, computed, time.perf_counter() - started))
        ended()
        settle(job, job.root / "dcp")
        return called

    for name in beside:  # the first ones, which allocate and start processes, are told apart
        one(name)
    take_turns({name: lambda _, name=name: one(name) for name in beside}, job.args.rounds)
    ckpt.close()
    stager.close()

    base = median(u for _, u in alone)
    held = {n: [over_ranks(c + max(0.0, u - base)) for c, _, u in x] for n, x in beside.items()}
    return {
        "bytes": over_ranks(trainer.state.local_bytes, "SUM"),
        "compute_s": over_ranks(median(c for c, _ in alone)),
        "update_s": over_ranks(base),
        "samples": {n: x[1:] for n, x in held.items()},
        "firsts": {n: x[0] for n, x in held.items()},
        "called_s": {n: [over_ranks(c) for c, _, _ in x[1:]] for n, x in beside.items()},
        "compute_during_save_s": {
            n: [over_ranks(c) for _, c, _ in x[1:]] for n, x in beside.items()
        },
    }


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for ranks, f in found.items():
        s = f["samples"]
        best = min(DCP[:2], key=lambda n: median(s[n]))
        who, ours = f"held by a save, {ranks_of(ranks)}", seconds(s, "holdfast")
        for name in (best, "dcp staged"):
            out.append(row(who, ours, f"{name}: {seconds(s, name)}", ratio(s, "holdfast", name)))
    return out


if __name__ == "__main__":
    main(CLAIMS, __doc__, work, rows, rounds=4, extend=with_compute)
