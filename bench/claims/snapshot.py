"""What a snapshot in host memory costs: the training thread, the throughput, and until it is complete.

One *step* is a compute loop (matrix products and nothing else, in the place of forward and backward) and a
real AdamW step over the whole state.
held        of the training thread by a snapshot: its call, plus what the optimizer's step takes longer than
            the one just before, without a snapshot (medians), beside dcp.async_save with its defaults.
            The same with no snapshot at all is the control: how far two steps in a row differ by
            themselves.  The part of a step is what a snapshot adds to that
complete    from the call until the snapshot is committed, digests and protection included, with nothing
            else running, beside dcp.async_save, and beside a plain copy of the same bytes by one thread
copy        of that, the copying into shared memory alone
loop        steps per second with a snapshot every tenth step, and of the same loop without
`none` is one agent for all ranks; `guarded` gives every rank a node of its own, so that ranks keep a copy
(2 ranks) or parity (more) for each other: over loopback, with the agents on the same cores as the training.
"""

from __future__ import annotations

import os
import shutil
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
    shared_memory,
    slowest,
    take_turns,
    with_compute,
)
from bench.lib.trainer import Trainer

RECORDS = ("snapshot", "snapshot_2_ranks", "snapshot_4_ranks")
CLAIMS = (
    Claim(
        "A snapshot holds the training for at most 2 % of a step.",
        r"^held by a snapshot, (.+?) \|.*\| step",
        at_most=2,
        unit="%",
        records=RECORDS,
    ),
    Claim(
        "A snapshot holds the training for at most a twentieth of what dcp.async_save does.",
        r"^held by a snapshot, (.+?) \|.*\| dcp.async_save",
        at_least=20,
        records=RECORDS,
    ),
    Claim(
        "A snapshot is copied at 0.8 of a plain copy's speed.",
        r"^copy into shared memory, (.+?) \|",
        at_least=0.8,
        records=RECORDS,
    ),
    Claim(
        "With a snapshot every tenth step, steps take at most 2 % longer.",
        r"a snapshot every 10, (.+?) \|",
        at_most=2,
        unit="%",
        records=RECORDS,
    ),
)
LOOP_STEPS = 20
OURS = ("none", "guarded")


def work(job: Job) -> dict[str, Any]:
    import numpy as np
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    import holdfast
    from holdfast.live.state.arrays import raw_array

    trainer = Trainer(job)
    tree = trainer.state.for_dcp()
    group = dist.new_group(backend="gloo")
    shm = shared_memory()
    copies: list[float] = []
    holdfast.events.subscribe(
        lambda e: copies.append(e.duration_s or 0.0) if e.name == "snapshot.copy" else None
    )
    ckpts = {}
    for name in OURS[: 1 if job.size == 1 else 2]:
        os.environ["HOLDFAST_MEMORY_DIR"] = str(
            shm / (f"node{job.rank}" if name == "guarded" else name)
        )
        ckpts[name] = holdfast.Checkpointer(
            job.root / name,
            trainer.state.for_holdfast(),
            every=holdfast.Every(memory=1),
            memory=holdfast.Memory("auto", budget="64GB"),
            on_error="raise",
        )
    number = iter(range(1, 100_000))
    buffers = [np.empty_like(raw_array(t)) for t in trainer.state.locals()]

    def plain() -> None:
        for into, tensor in zip(buffers, trainer.state.locals()):
            np.copyto(into, raw_array(tensor))

    def save(name: str) -> Any:
        """Start one; a function that waits for it, and one to call before the optimizer's step."""
        if name in ckpts:
            ckpts[name].step(next(number))
            return ckpts[name].wait
        answer: Any = dcp.async_save(
            tree, checkpoint_id=job.root / "dcp" / f"{next(number)}", process_group=group
        )
        return answer.result

    steps: list[float] = []
    held: dict[str, list[tuple[float, float]]] = {n: [] for n in (*ckpts, "dcp", "nothing")}
    copy_s: dict[str, list[float]] = {n: [] for n in ckpts}

    def holding(name: str) -> float:
        compute, update = trainer.compute(), trainer.update()
        steps.append(compute + update)
        dist.barrier()
        started = time.perf_counter()
        wait = save(name) if name != "nothing" else lambda: None
        called = time.perf_counter() - started
        trainer.compute()
        held[name].append((called, trainer.update() - update))
        wait()
        settle(job, job.root / "dcp")
        return called

    def complete(name: str) -> float:
        if name == "plain":
            return slowest(plain)
        took = slowest(lambda: save(name)())
        if name in ckpts:
            copy_s[name].append(over_ranks(copies[-1]))
        settle(job, job.root / "dcp")
        return took

    def loop(name: str) -> float:
        def run() -> None:
            for i in range(LOOP_STEPS):
                trainer.compute()
                trainer.update()
                if name in ckpts and i % 10 == 5:
                    ckpts[name].step(next(number))

        took = slowest(run)
        if name in ckpts:
            ckpts[name].wait()
        return took

    for name in (*ckpts, "dcp", "plain"):  # the first ones allocate and start processes
        complete(name)
        complete(name)
    for one in copy_s.values():
        one.clear()
    rounds = job.args.rounds
    take_turns({n: lambda _, n=n: holding(n) for n in held}, rounds)
    done = take_turns({n: lambda _, n=n: complete(n) for n in (*ckpts, "dcp", "plain")}, rounds)
    loops = take_turns(
        {n: lambda _, n=n: loop(n) for n in (*ckpts, "without")}, max(rounds // 2, 3)
    )
    for ckpt in ckpts.values():
        ckpt.close()
    dist.barrier()
    if job.rank == 0:
        shutil.rmtree(shm, ignore_errors=True)
    return {
        "bytes": over_ranks(trainer.state.local_bytes, "SUM"),
        "step_s": over_ranks(median(steps)),
        "held": {name: [over_ranks(median_held(pairs))] for name, pairs in held.items()},
        "called": {n: [over_ranks(called) for called, _ in pairs] for n, pairs in held.items()},
        "longer": {n: [over_ranks(longer) for _, longer in pairs] for n, pairs in held.items()},
        "complete": done,
        "copy": copy_s,
        "loop": loops,
    }


def median_held(pairs: list[tuple[float, float]]) -> float:
    """From the calls, and what the optimizer's steps took longer: the medians' sum."""
    called, longer = zip(*pairs)
    return median(called) + max(0.0, median(longer))


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for ranks, f in found.items():
        who = ranks_of(ranks)
        for name in f["copy"]:
            what = f"{who}, {name}"
            longer = median(f["longer"][name]) - median(f["longer"]["nothing"])
            part = 100 * (median(f["called"][name]) + longer) / f["step_s"]
            out += [
                row(f"held by a snapshot, {what}", seconds(f["held"], name),
                    f"step {f['step_s']:.2f} s; the call {seconds(f['called'], name)}; "
                    f"without a snapshot {seconds(f['held'], 'nothing')}",
                    part, " %"),
                row(f"held by a snapshot, {what}", seconds(f["held"], name),
                    f"dcp.async_save {seconds(f['held'], 'dcp')}", ratio(f["held"], "dcp", name)),
                row(f"snapshot complete, {what}", seconds(f["complete"], name, f["bytes"]),
                    f"dcp.async_save {seconds(f['complete'], 'dcp')}",
                    ratio(f["complete"], "dcp", name)),
                row(f"copy into shared memory, {what}", seconds(f["copy"], name, f["bytes"]),
                    f"plain copy {seconds(f['complete'], 'plain', f['bytes'])}",
                    median(f["complete"]["plain"]) / median(f["copy"][name])),
                row(f"{LOOP_STEPS} steps, a snapshot every 10, {what}", seconds(f["loop"], name),
                    f"without {seconds(f['loop'], 'without')}",
                    100 * (ratio(f["loop"], name, "without") - 1), " %"),
            ]  # fmt: skip
    return out


if __name__ == "__main__":
    main(CLAIMS, __doc__, work, rows, rounds=6, ranks="1,2,4", extend=with_compute)
