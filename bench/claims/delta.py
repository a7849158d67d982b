"""What a record of every step costs the training, and how fast records are replayed.

One *step* is a compute loop (matrix products and nothing else, in the place of forward and backward) and a
real AdamW step over the whole state.  Each contestant protects every step of the same loop:
records      holdfast, Delta(): the gradient of every step, to disk
dcp          torch.distributed.checkpoint.async_save of everything; a step waits for the one before
torch.save   each rank's whole state, written before the next step
difference   naive differential: state xor the state before, zlib level 1, written before the next step
Then the recovery of some records: `replay` by holdfast, beside reading and applying one after the other
(`in turns`, each applied by `optimizer.step()`; or in blocks, as holdfast does), and beside doing those
steps again.
"""

from __future__ import annotations

import zlib
from concurrent.futures import Future
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
    slowest,
    take_turns,
    with_compute,
)
from bench.lib.trainer import Trainer
from holdfast.base.threads import Worker

CLAIMS = (
    Claim(
        "A record of every step lengthens a training by at most 5 %.",
        r"a record of each, (.+?) \|",
        at_most=5,
        unit="%",
    ),
    Claim(
        "Records cost a twentieth of the throughput that the best other protection of every step does.",
        r"^throughput lost to records, (.+?) \|",
        at_most=0.05,
    ),
    Claim(
        "A record has at most 34 % of the state's bytes.",
        r"^bytes of a record, (.+?) \|",
        at_most=34,
        unit="%",
    ),
    Claim(
        "A replay is 1.5 times as fast as reading and applying records in turns.",
        r"records replayed, (.+?) \|.*\| read, then apply [\d.]+ s",
        at_least=1.5,
    ),
    Claim(
        "A replay takes a fifth of those steps' time.",
        r"records replayed, (.+?) \|.*\| those steps again",
        at_most=0.2,
    ),
)


class AtOnce(Worker):
    """Does what it is given before it goes on: so records are read, then applied, in turns."""

    def submit(self, work: Any, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


STEPS = 10
MORE = 4
"""Times as many rounds for what differs by less than this machine from minute to minute."""
REPLAYED = 48


def work(job: Job) -> dict[str, Any]:
    import numpy as np
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    import holdfast
    from holdfast.live.state.arrays import raw_array
    from holdfast.live.state.blockwise import Blockwise
    from holdfast.tiers.records import replay

    trainer = Trainer(job)
    state = trainer.state
    group = dist.new_group(backend="gloo")
    number = iter(range(1, 1_000_000))
    written: dict[str, list[int]] = {"record": [], "full": []}
    holdfast.events.subscribe(
        lambda e: written["record"].append(e.fields["bytes"]) if e.name == "delta.wrote" else None
    )

    def checkpointer(name: str) -> Any:
        return holdfast.Checkpointer(
            job.root / name,
            state.for_holdfast(),
            every=holdfast.Every(delta=1),
            delta=holdfast.Delta(),
            on_error="raise",
        )

    def with_records(steps: int, name: str) -> float:
        ckpt = checkpointer(name)
        trainer.update()
        ckpt.step(next(number))
        ckpt.wait()
        for _ in range(2):  # the plan, and memory
            trainer.update()
            ckpt.step(next(number))

        def run() -> None:
            for _ in range(steps):
                trainer.compute()
                trainer.update()
                ckpt.step(next(number))

        took = slowest(run)
        ckpt.close()
        return took

    def without() -> float:
        def run() -> None:
            for _ in range(STEPS):
                trainer.compute()
                trainer.update()

        return slowest(run)

    def with_dcp() -> float:
        folder, waiting = job.root / "dcp", []

        def run() -> None:
            for _ in range(STEPS):
                trainer.compute()
                if waiting:
                    waiting.pop().result()
                trainer.update()
                waiting.append(
                    dcp.async_save(
                        state.for_dcp(),
                        checkpoint_id=folder / str(next(number)),
                        process_group=group,
                    )
                )

        took = slowest(run)
        waiting.pop().result()
        return took

    def with_torch_save() -> float:
        path = job.root / "torch" / f"r{job.rank}.pt"
        path.parent.mkdir(exist_ok=True)

        def run() -> None:
            for _ in range(STEPS):
                trainer.compute()
                trainer.update()
                torch.save(list(state.locals()), path)

        return slowest(run)

    def with_difference() -> float:
        before = [np.array(raw_array(t)) for t in state.locals()]
        path = job.root / "difference" / f"r{job.rank}.z"
        path.parent.mkdir(exist_ok=True)

        def run() -> None:
            for _ in range(1):
                trainer.compute()
                trainer.update()
                with path.open("wb") as file:
                    for old, tensor in zip(before, state.locals()):
                        now = raw_array(tensor)
                        file.write(zlib.compress(np.ascontiguousarray(now ^ old), 1))
                        np.copyto(old, now)

        return slowest(run) * STEPS  # one step tells: it takes half a minute

    def ours(name: str) -> float:
        took = with_records(STEPS, name)
        settle(job, job.root / name)
        return took

    near = {"without": lambda _: without(), "records": lambda _: ours("loop")}
    far = {
        "dcp": lambda _: (with_dcp(), settle(job, job.root / "dcp"))[0],
        "torch.save": lambda _: (with_torch_save(), settle(job, job.root / "torch"))[0],
    }
    samples = take_turns(near, MORE * job.args.rounds) | take_turns(far, job.args.rounds)
    samples["difference"] = [with_difference()]
    settle(job, job.root / "difference")

    with_records(REPLAYED, "replay")
    expected = state.checksums()
    is_possible = Blockwise.is_possible

    def recover(reader: type[Worker], in_blocks: bool) -> float:
        state.wipe()
        ckpt = checkpointer("replay")
        took: list[float] = []
        replay.Worker = reader
        Blockwise.is_possible = is_possible if in_blocks else lambda _: False
        with holdfast.events.listen(
            lambda e: took.append(e.duration_s or 0.0) if e.name == "replay" else None
        ):
            ckpt.restore()
        assert state.checksums() == expected
        ckpt.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        return over_ranks(took[0])

    def again() -> float:
        def run() -> None:
            for _ in range(REPLAYED + 2):
                trainer.compute()
                trainer.update()

        return slowest(run)

    recoveries = take_turns(
        {
            "replay": lambda _: recover(Worker, True),
            "in turns": lambda _: recover(AtOnce, False),
            "in turns, in blocks": lambda _: recover(AtOnce, True),
            "training": lambda _: again(),
        },
        max(job.args.rounds // 2, 2),
    )
    settle(job, job.root / "replay")
    full = sum(t.numel() * t.element_size() for t in state.locals())
    return {
        "record": median(written["record"]), "full": full,
        "samples": samples, "recovery": recoveries,
    }  # fmt: skip


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    for ranks, f in found.items():
        who = ranks_of(ranks)
        s, r = f["samples"], f["recovery"]
        base = median(s["without"])
        lost = {name: median(s[name]) - base for name in s if name != "without"}
        best = min(("dcp", "torch.save", "difference"), key=lambda n: lost[n])
        out += [
            row(f"{STEPS} steps, a record of each, {who}", seconds(s, "records"),
                f"without {seconds(s, 'without')}", 100 * (ratio(s, "records", "without") - 1),
                " %"),
            row(f"throughput lost to records, {who}", f"{max(lost['records'], 0):.2f} s",
                f"{best} {lost[best]:.2f} s", max(lost["records"], 0) / lost[best]),
            row(f"bytes of a record, {who}", f"{f['record'] / 1e6:.0f} MB",
                f"state {f['full'] / 1e6:.0f} MB", 100 * f["record"] / f["full"], " %"),
            row(f"{REPLAYED + 2} records replayed, {who}", seconds(r, "replay"),
                f"read, then apply {seconds(r, 'in turns')}", ratio(r, "in turns", "replay")),
            row(f"{REPLAYED + 2} records replayed, {who}", seconds(r, "replay"),
                f"read, then apply in blocks {seconds(r, 'in turns, in blocks')}",
                ratio(r, "in turns, in blocks", "replay")),
            row(f"{REPLAYED + 2} records replayed, {who}", seconds(r, "replay"),
                f"those steps again {seconds(r, 'training')}", ratio(r, "replay", "training")),
        ]  # fmt: skip
    return out


if __name__ == "__main__":
    main(CLAIMS, __doc__, work, rows, rounds=3, ranks="1,2", extend=with_compute)
