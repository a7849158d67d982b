"""Goodput under failures: a training of which a rank is killed about once a minute, until it has ended.

2 ranks of examples/gpt.py, wider, under FSDP2.  Contestants make the same
steps on the same data, and a rank gets SIGKILL by the same schedule (`--seed`): which one, and 40 to 80 s
after the training has begun or was taken up again.  Each goes on from what it had kept:
holdfast   torchrun; a record of every step, a snapshot in memory of every 10th, a full save of every 100th
dcp        torchrun; torch.distributed.checkpoint.async_save as often as is optimal after Young and Daly:
           every sqrt(2 C M) seconds, C what one save takes from the training (measured before) and M 60 s
place      holdfast run with a spare, recovered in place; a snapshot in memory of every step (each waited
           for when the next is due), a full save of every 100th
All are held against a training without failures: the steps, each as long as a bare one takes.  Those under
torchrun also against that plus what every restart takes before anything is restored: torchrun, Python,
imports, model.  How long a bare step takes is measured before every life and at the end, with a model of
its own, for the machine drifts by more than what is to be shown; each life's steps count with the mean of
the two around it, and the time of measuring is left out.

Steps lost by a failure were done on all ranks and had to be done again; so has the step under way, by
anybody.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
import threading
import time
from statistics import mean
from typing import Any

from bench.lib.claims import Claim
from bench.lib.common import ROOT, Job, main, over_ranks, row, settle, shared_memory

RECORDS = ("goodput", "goodput_10min", "goodput_in_place")
CLAIMS = (
    Claim(
        "Recorded steps, a rank killed about every minute, take 1.05 of the time without failures but "
        "with the restarts.",
        r"\| (?:holdfast )?\d+ s, \d+ failures \| without failures, with its restarts",
        at_most=1.05,
        records=RECORDS,
    ),
    Claim(
        "With a record of every step, a kill loses at most one step.",
        r"^steps lost by a failure(?:, holdfast)? \|",
        at_most=1,
        unit="",
        records=RECORDS,
    ),
    Claim(
        "Recovered in place, a rank killed about every minute, a training takes 1.04 of the time "
        "without failures.",
        r"\| place \d+ s, \d+ failures \| without failures \d+ s",
        at_most=1.04,
        records=RECORDS,
    ),
    Claim(
        "With a snapshot of every step, a kill loses no step.",
        r"^steps lost by a failure, place",
        at_most=0,
        unit="",
        records=RECORDS,
    ),
    Claim(
        "All contestants end with the same weights.",
        r"^same weights at the end",
        at_least=1,
        unit="",
        records=RECORDS,
    ),
)

BEFORE, NAMES = " before", (" holdfast", " dcp", " place")
PLACE = NAMES[2]
MTBF_S = 60.0
BARE_STEPS, BARE_STEPS_OF_A_LIFE = 20, 8
LIVES = 1000


class Training:
    """A model, its optimizer and its data."""

    def __init__(self, job: Job) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh

        sys.path.insert(0, str(ROOT / "examples"))
        import gpt
        import text

        small = job.args.small
        shape = gpt.Shape() if small else gpt.Shape(dim=384, hidden=1024, num_layers=8)
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (job.size, 1), mesh_dim_names=("dp", "tp"))
        self.model = gpt.build(mesh, shape)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        batch = job.args.batch
        self.loader = text.Loader(
            batch=batch, context=shape.context, seed=0, rank=job.rank, num_ranks=job.size
        )
        self.number = 0

    def step(self) -> None:
        import torch.nn.functional as F  # noqa: N812

        inputs, targets = next(self.loader)
        F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten()).backward()
        self.optim.step()
        self.optim.zero_grad()
        self.number += 1

    def went_back(self, number: int) -> None:
        self.number = self.loader.step = number

    def checksum(self) -> int:
        """Of the bits of all parameters on all ranks."""
        import torch

        parts = [
            p.to_local().detach().reshape(-1).view(torch.int32) for p in self.model.parameters()
        ]
        return int(over_ranks(sum(int(p.sum(dtype=torch.int64)) % (1 << 40) for p in parts), "SUM"))


class Holdfast:
    """Records of every step, on top of snapshots and full saves; or snapshots of every step."""

    def __init__(self, job: Job, training: Training, _: dict[str, Any]) -> None:
        import holdfast

        records = {
            "every": holdfast.Every(durable=100, memory=10, delta=1),
            "delta": holdfast.Delta(),
        }
        snapshots = {"every": holdfast.Every(durable=100, memory=1), "when_busy": "queue"}
        self.training = training
        self.ckpt = holdfast.Checkpointer(
            job.root / job.phase.strip(),
            {"model": training.model, "optim": training.optim, "loader": training.loader},
            memory=holdfast.Memory(),
            keep=holdfast.Keep(last=2),
            on_resize={"loader": "same"},
            **(snapshots if job.phase == PLACE else records),
        )

    def restore(self) -> int:
        return self.ckpt.restore()

    def done(self) -> None:
        self.ckpt.step(self.training.number)

    def close(self) -> None:
        self.ckpt.close()


class Dcp:
    """Asynchronous saves, one at a time, the newest two kept."""

    def __init__(self, job: Job, training: Training, bare: dict[str, Any]) -> None:
        import torch.distributed as dist

        self.job, self.training = job, training
        self.folder = job.root / "dcp"
        self.every = bare.get("dcp_every", 0)
        self.group = dist.new_group(backend="gloo")
        self.flying: Any = None

    def tree(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optim = get_state_dict(self.training.model, self.training.optim)
        return {"model": model, "optim": optim}

    def complete(self) -> list[int]:
        return sorted(int(p.parent.name) for p in self.folder.glob("*/.metadata"))

    def restore(self) -> int:
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        newest = [max(self.complete(), default=0)]
        dist.broadcast_object_list(newest)
        if newest[0]:
            tree = self.tree()
            dcp.load(tree, checkpoint_id=self.folder / str(newest[0]), process_group=self.group)
            set_state_dict(
                self.training.model, self.training.optim,
                model_state_dict=tree["model"], optim_state_dict=tree["optim"],
            )  # fmt: skip
        return newest[0]

    def done(self) -> None:
        if self.training.number % self.every == 0:
            self.save()

    def save(self) -> Any:
        import torch.distributed.checkpoint as dcp

        self.close()
        if self.job.rank == 0:
            for old in self.complete()[:-2]:
                shutil.rmtree(self.folder / str(old))
            shutil.rmtree(self.folder / str(self.training.number), ignore_errors=True)
        self.flying = dcp.async_save(
            self.tree(),
            checkpoint_id=self.folder / str(self.training.number),
            process_group=self.group,
        )
        return self.flying

    def close(self) -> None:
        """Wait for the save under way."""
        if self.flying is not None:
            self.flying.result()


# -- before ---------------------------------------------------------------------------------------


def measured(job: Job) -> dict[str, Any]:
    """The time of a bare step, and what an asynchronous save takes from the training."""
    training = Training(job)
    step_s = bare_step_s(job, training, BARE_STEPS)
    dcp = Dcp(job, training, {})
    for _ in range(2):  # the second with everything allocated
        settle(job)
        began, count = time.perf_counter(), 0
        done: list[float] = []
        dcp.save().add_done_callback(lambda _, done=done: done.append(1.0))
        while over_ranks(len(done), "MIN") < 1:
            training.step()
            count += 1
        took = over_ranks(time.perf_counter() - began)
    cost = max(took - count * step_s, 1e-3)
    dcp.close()
    settle(job, dcp.folder)
    bare = {
        "step_s": step_s,
        "dcp_cost_s": cost,
        "dcp_every": max(1, round(math.sqrt(2 * cost * MTBF_S) / step_s)),
        "steps": round(job.args.minutes * 60 / step_s),
        "params": over_ranks(sum(p.to_local().numel() for p in training.model.parameters()), "SUM"),
    }
    if job.rank == 0:
        (job.root / "bare.json").write_text(json.dumps(bare))
    return bare


def bare_step_s(job: Job, training: Training, number: int) -> float:
    """Of so many steps, once everything is allocated."""
    for _ in range(3):
        training.step()
    settle(job)
    began = time.perf_counter()
    for _ in range(number):
        training.step()
    return over_ranks(time.perf_counter() - began) / number


# -- a life ---------------------------------------------------------------------------------------


def life() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def kills(seed: int, ranks: int) -> list[tuple[float, int]]:
    """By life: after how many seconds which rank is killed."""
    chance = random.Random(seed)
    return [(chance.uniform(40, 80), chance.randrange(ranks)) for _ in range(LIVES)]


def doomed(job: Job, say: Any) -> threading.Timer:
    """This life's kill, if it comes to that."""
    after, rank = kills(job.args.seed, job.size)[life()]

    def strike() -> None:
        say(event="killed")
        os.kill(os.getpid(), signal.SIGKILL)

    timer = threading.Timer(after, strike)
    timer.daemon = True
    if rank == job.rank:
        timer.start()
    return timer


def lived(job: Job) -> dict[str, Any] | None:
    """From where the life before had come to, on to the last step."""
    path = job.root / f"log{job.phase.strip()}"

    def say(**fields: Any) -> None:
        with path.open("a") as file:
            file.write(json.dumps({"life": life(), "time": time.time(), **fields}) + "\n")

    def alone() -> None:
        step_s = bare_step_s(job, Training(job), BARE_STEPS_OF_A_LIFE)
        if job.rank == 0:
            say(event="alone", step_s=step_s)

    bare = json.loads((job.root / "bare.json").read_text())
    training = Training(job)
    if job.rank == 0:
        say(event="model")
    alone()
    one = (Dcp if job.phase == NAMES[1] else Holdfast)(job, training, bare)
    training.went_back(one.restore())
    if job.rank == 0:
        say(event="restored", step=training.number)
    kill = doomed(job, say)
    try:
        while training.number < bare["steps"]:
            training.step()
            one.done()
            say(event="step", step=training.number, rank=job.rank)
    finally:
        kill.cancel()
    one.close()
    if job.rank == 0:
        say(event="end")
    alone()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {"log": brief(found), "checksum": training.checksum(), **summary(found)}


def brief(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [x for x in log if x["event"] != "step"]


def summary(log: list[dict[str, Any]]) -> dict[str, Any]:
    """Times and losses of all lives, without what measuring between them took."""
    lost, restarts, alone_s, bare_s = [], [], 0.0, 0.0
    lives = [[x for x in log if x["life"] == n] for n in range(log[-1]["life"] + 1)]
    bare = [x["step_s"] for x in log if x["event"] == "alone"]
    ranks = {x["rank"] for x in log if x["event"] == "step"}
    at = 0  # how far the training has come, on all ranks
    for n, one in enumerate(lives):
        restored = only(one, "restored")["step"]
        steps = [(x["step"], x["rank"]) for x in one if x["event"] == "step"]
        reached = min(max([s for s, r in steps if r == rank], default=restored) for rank in ranks)
        bare_s += max(0, reached - at) * mean(bare[n : n + 2])
        if n > 0:
            lost.append(max(0, at - restored))
            restarts.append(only(one, "model")["time"] - only(lives[n - 1], "killed")["time"])
            alone_s += only(one, "alone")["time"] - only(one, "model")["time"]
        at = max(at, reached)
    seconds = only(log, "end")["time"] - only(log, "restored")["time"] - alone_s
    return {
        "seconds": seconds,
        "step_s": bare_s / at,
        "failures": len(lost),
        "lost_steps": lost,
        "restarts_s": restarts,
    }


def only(log: list[dict[str, Any]], event: str) -> dict[str, Any]:
    """The first of its kind."""
    return next(x for x in log if x["event"] == event)


# -- rows -----------------------------------------------------------------------------------------


def work(job: Job) -> dict[str, Any]:
    import torch.distributed as dist

    if job.phase == BEFORE:
        return measured(job)
    os.environ["HOLDFAST_MEMORY_DIR"] = str(shared_memory())
    found = lived(job)
    dist.barrier()
    if job.rank == 0:
        shutil.rmtree(shared_memory(), ignore_errors=True)
    settle(job, *(job.root / name.strip() for name in NAMES))
    return found or {}


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    by_phase = {" " + key.split()[1]: one for key, one in found.items()}
    before = by_phase.pop(BEFORE)
    out = [x for name, one in by_phase.items() for x in time_rows(name, one, before)]
    out += [lost_row(name, by_phase.get(NAMES[1]), one) for name, one in by_phase.items()
            if name != NAMES[1]]  # fmt: skip
    sums = {name.strip(): one["checksum"] for name, one in by_phase.items()}
    first, *others = sums.items()
    if others:
        out.append(
            row("same weights at the end", f"{first[0]} {first[1] % 10**6}",
                ", ".join(f"{n} {x % 10**6}" for n, x in others), float(len(set(sums.values())) == 1), "")
        )  # fmt: skip
    return out


def time_rows(name: str, one: dict[str, Any], before: dict[str, Any]) -> list[dict[str, Any]]:
    """Its time against that of the same steps alone, and, under torchrun, with its restarts."""
    alone_s = before["steps"] * one["step_s"]
    who, what = name.strip(), f"{before['steps']} steps of {one['step_s']:.2f} s"
    if name == NAMES[1]:
        who = f"dcp every {before['dcp_every']} steps"
    text = f"{who} {one['seconds']:.0f} s, {one['failures']} failures"
    out = [
        row(f"{what}, a rank killed about every {MTBF_S:.0f} s", text,
            f"without failures {alone_s:.0f} s", one["seconds"] / alone_s)
    ]  # fmt: skip
    if name != PLACE:
        ideal = alone_s + sum(one["restarts_s"])
        out.append(
            row("the same", text, f"without failures, with its restarts {ideal:.0f} s",
                one["seconds"] / ideal)
        )  # fmt: skip
    return out


def lost_row(name: str, dcp: dict[str, Any] | None, one: dict[str, Any]) -> dict[str, Any]:
    lost = mean(one["lost_steps"] or [0])
    theirs = "" if dcp is None else f"dcp {mean(dcp['lost_steps'] or [0]):.1f}"
    return row(f"steps lost by a failure, {name.strip()}", f"{lost:.1f}", theirs, lost, "")


def extend(p: argparse.ArgumentParser) -> None:
    p.add_argument("--minutes", type=float, default=10.0, help="of training without failures (10)")
    p.add_argument("--batch", type=int, default=8, help="rows of the global batch (8)")
    p.add_argument("--seed", type=int, default=0, help="of the kills (0)")
    names = ",".join(name.strip() for name in NAMES)
    p.add_argument("--only", default=names, help=f"contestants, by comma (default: {names})")


def phases(numbers: list[int]) -> list[tuple[int, str]]:
    return [(numbers[0], phase) for phase in (BEFORE, *NAMES)]


def restarts(_: argparse.Namespace, phase: str) -> int:
    return 0 if phase == BEFORE else LIVES


def chosen(args: argparse.Namespace, phase: str) -> bool:
    return phase == BEFORE or phase.strip() in args.only.split(",")


if __name__ == "__main__":
    main(
        CLAIMS, __doc__, work, rows,
        rounds=1, ranks="2", phases=phases, extend=extend, restarts=restarts,
        chosen=chosen, in_place=lambda phase: phase == PLACE,
    )  # fmt: skip
