"""A training that is killed and goes on: the claim `failure` says what is measured."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from bench.lib.common import Job, over_ranks, settle

DEVICE = " device"
"""The phase in which another device than the cores computes."""
BARE_STEPS = 4
WARM_STEPS, STEPS = 3, 24
"""With snapshots.  The first ones are waited for: they touch their memory for the first time."""


class Training:
    """A state and steps that change it."""

    def __init__(self, job: Job) -> None:
        import torch

        from bench.lib.state import State

        self.job = job
        self.state = State(job.size, small=job.args.small)
        for p in self.state.model.parameters():
            p.grad = torch.full_like(p, 1e-3)
        self.matrix = torch.rand(1024, 1024) / 512
        self.number = 0

    def calibrate(self) -> None:
        """Find out in the first life how many products take `--compute` seconds."""
        known = self.job.root / "products"
        if not known.exists():
            self._multiply(8)
            started = time.perf_counter()
            self._multiply(8)
            took = over_ranks(time.perf_counter() - started) / 8
            if self.job.rank == 0:
                known.write_text(str(max(1, round(self.job.args.compute / took))))
            settle(self.job)
        self.products = int(known.read_text())

    def _multiply(self, times: int) -> None:
        x = self.matrix
        for _ in range(times):
            x = x @ self.matrix

    def compute(self, part: float = 1.0) -> None:
        """What stands for forward and backward, or a part of it."""
        if self.job.phase == DEVICE:
            time.sleep(self.job.args.compute * part)
        else:
            self._multiply(round(self.products * part))

    def step(self) -> float:
        """One step; when it ended, on this rank."""
        import torch.distributed as dist

        self.compute()
        dist.barrier()
        self.state.optim.step()
        self.number += 1
        return time.time()

    def bare(self) -> float:
        """Seconds of a step without anything beside it, of the slowest rank."""
        self.step()
        settle(self.job)
        started = time.time()
        for _ in range(BARE_STEPS):
            self.step()
        return over_ranks(time.time() - started) / BARE_STEPS

    def killed(self, part: float) -> None:
        """A step of which the last rank sees only a part."""
        if self.job.rank == self.job.size - 1:
            self.compute(part)
            (self.job.root / "killed").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        self.step()

    def went_back(self, number: int) -> None:
        """Restored at that step: the optimizer's own count must agree."""
        counts = {float(s["step"]) for s in self.state.optim.state.values()}
        assert counts == {1.0 + number}, (counts, number)
        self.number = number


class Holdfast:
    """Snapshots in memory, of every step."""

    def __init__(self, job: Job, training: Training, number: int) -> None:
        import holdfast

        self.training = training
        self.complete_s: list[float] = []
        holdfast.events.subscribe(self._listen)
        self.ckpt = holdfast.Checkpointer(
            job.root / f"holdfast-{number}",
            training.state.for_holdfast(),
            every=holdfast.Every(memory=1),
            memory=holdfast.Memory(),
            on_error="raise",
        )

    def _listen(self, event: Any) -> None:
        if event.name == "snapshot.committed" and "seconds" in event.fields:
            self.complete_s.append(event.fields["seconds"])

    def restore(self) -> int:
        return self.ckpt.restore()

    def until_killed(self, bare: float) -> dict[str, Any]:
        """Train with snapshots; when steps ended, how long they take, and until a snapshot is complete."""
        ended: dict[int, float] = {}
        for _ in range(WARM_STEPS):
            self._step(ended)
            self.ckpt.wait()
        for _ in range(STEPS):
            self._step(ended)
        times = list(ended.values())[-STEPS:]
        took = (times[-1] - times[0]) / (len(times) - 1)
        return {"ended": ended, "step_s": took, "bare_s": bare, "complete_s": self.complete_s}

    def _step(self, ended: dict[int, float]) -> None:
        ended[self.training.number + 1] = self.training.step()
        self.ckpt.step(self.training.number)

    def close(self) -> None:
        self.ckpt.close()


class Dcp:
    """Asynchronous saves to a disk."""

    def __init__(self, job: Job, training: Training, number: int) -> None:
        import torch.distributed as dist

        self.job, self.training = job, training
        self.folder = job.root / f"dcp-{number}"
        self.tree = training.state.for_dcp()
        self.group = dist.new_group(backend="gloo")

    def restore(self) -> int:
        import torch.distributed.checkpoint as dcp

        complete = [int(p.parent.name) for p in self.folder.glob("*/.metadata")]
        dcp.load(self.tree, checkpoint_id=self.folder / str(max(complete)))
        return max(complete)

    def until_killed(self, bare: float) -> dict[str, Any]:
        """Save twice, the second time with everything allocated: what that takes, and how long."""
        self._save(bare)
        cost, duration = self._save(bare)
        return {"cost_s": cost, "duration_s": duration, "bare_s": bare}

    def _save(self, bare: float) -> tuple[float, float]:
        import torch.distributed.checkpoint as dcp

        done: list[float] = []
        settle(self.job)
        began = time.time()
        at = self.folder / str(self.training.number)
        answer: Any = dcp.async_save(self.tree, checkpoint_id=at, process_group=self.group)
        answer.add_done_callback(lambda _: done.append(time.time()))
        steps = 0
        while over_ranks(len(done), "MIN") < 1:
            self.training.step()
            steps += 1
        took = over_ranks(time.time() - began)
        answer.result()
        return max(took - steps * bare, 0.0), over_ranks(done[0] - began)

    def close(self) -> None:
        pass
