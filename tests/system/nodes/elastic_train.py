"""A small training that writes down what it holds: elastic_train.py ROOT LOGS [OPTIONS [UNTIL]].

Each rank appends JSON lines to LOGS/<host name>.<local rank>.jsonl: that it begins; what it has restored,
with the state as restored and where that came from; each step, with the state after it; and events of
holdfast.  A state is told by the digest of all tensors, gathered whole by torch itself, so it is the same
on any number of ranks.  Who goes on from a restored step first tries the next few without holdfast, writes
them down, and goes back.

Training ends at the step that the file LOGS/end states, once there is one.  OPTIONS is JSON: fields of
`Options`.  With UNTIL, the ranks only write what the training should be up to that step to
LOGS/reference.jsonl: without holdfast and without failures.
"""

import hashlib
import json
import os
import socket
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import holdfast

BATCH = 60
"""Rows of the global batch: shared evenly by 2 to 6 ranks."""
EVERY = 4
"""Steps between durable checkpoints, if nothing else is said."""
STEP_S = 0.1
"""How long a step takes at least."""
NOTICED_S = 40
"""How long ranks wait in a collective: for a node that has vanished when it owed them something, and they
had nothing on the way to it, no connection breaks.  Longer than a link is cut."""
NUM_TRIED = 3
"""Steps that are tried without holdfast after a restore."""
EVENTS = ("memory.", "snapshot.", "agent.", "restore.passed_over", "save.committed", "save.failed")


@dataclass
class Options:
    """How to train.  `layout`: `fsdp`, `hsdp` (two replicas) or `tp` (two ranks, under FSDP2)."""

    layout: str = "fsdp"
    width: int = 48
    every: dict[str, int] = field(default_factory=lambda: {"durable": EVERY})
    memory: dict[str, object] | None = None
    sigterm_s: float | None = 20
    deadline_s: float = 30


def make(layout: str, width: int) -> tuple[nn.Module, torch.optim.Optimizer, int, int]:
    """Model, optimizer, and which part of the batch is this rank's, of how many."""
    torch.manual_seed(0)
    hidden = width * 4 // 3
    model = nn.Sequential(
        nn.Linear(width, hidden, bias=False), nn.GELU(), nn.Linear(hidden, width, bias=False)
    )
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = None
    match layout:
        case "hsdp":
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        case "tp":
            both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(model, both["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            mesh, rank, world = both["dp"], both["dp"].get_local_rank(), world // 2
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), rank, world


class Training:
    """A model, its optimizer, and steps of both."""

    def __init__(self, options: Options) -> None:
        self.width = options.width
        self.model, self.optim, self.part, self.num_parts = make(options.layout, options.width)

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """All parameters and optimizer states, by name."""
        return [
            (f"{name}.{key}", value)
            for name, p in self.model.named_parameters()
            for key, value in [("", p), *sorted(self.optim.state.get(p, {}).items())]
        ]

    def digest(self) -> str:
        """Of all of them, gathered whole; collective."""
        seen = hashlib.sha256()
        for name, value in self.tensors():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            seen.update(name.encode() + whole.detach().numpy().tobytes())
        return seen.hexdigest()

    def step(self, step: int) -> dict[str, object]:
        """One step on this rank's rows of the global batch; what there is to write down about it."""
        rows = torch.randn(BATCH, self.width, generator=torch.Generator().manual_seed(step))
        loss = (self.model(rows.chunk(self.num_parts)[self.part]) - 1).square().mean()
        loss.backward()
        self.optim.step()
        self.optim.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        return {"step": step + 1, "loss": mean.item(), "digest": self.digest()}

    def tried(self, step: int) -> list[dict[str, object]]:
        """The next steps, without holdfast; then all is as before."""
        local = [getattr(t, "_local_tensor", t) for _, t in self.tensors()]
        before = [t.detach().clone() for t in local]
        found = [self.step(step + n) for n in range(NUM_TRIED)]
        with torch.no_grad():
            for tensor, old in zip(local, before):
                tensor.copy_(old)
        return found


def write_reference(path: Path, options: Options, until: int) -> None:
    training = Training(options)
    lines = [json.dumps(training.step(step)) + "\n" for step in range(until)]
    if dist.get_rank() == 0:
        path.with_suffix(".new").write_text("".join(lines))
        path.with_suffix(".new").replace(path)


class Log:
    """Lines of JSON, each with the time; from any thread, and whole when the process dies."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, **fields: object) -> None:
        os.write(self._fd, (json.dumps({"time": time.time(), **fields}) + "\n").encode())

    def listen(self, event: holdfast.events.Event) -> None:
        if event.name.startswith(EVENTS):
            fields = {
                k: v if isinstance(v, int | list) else str(v) for k, v in event.fields.items()
            }
            self.write(event=event.name, **fields)


def train(root: Path, logs: Path, options: Options) -> None:
    log = Log(logs / f"{socket.gethostname()}.{os.environ['LOCAL_RANK']}.jsonl")
    log.write(pid=os.getpid(), rank=dist.get_rank(), world=dist.get_world_size())
    holdfast.events.subscribe(log.listen)
    training = Training(options)
    ckpt = holdfast.Checkpointer(
        root,
        {"model": training.model, "optim": training.optim},
        every=holdfast.Every(**options.every),
        memory=holdfast.Memory(**options.memory) if options.memory is not None else None,
        sigterm_s=options.sigterm_s,
        deadline_s=options.deadline_s,
    )
    before = Counter(holdfast.events.counters)
    step = ckpt.restore()
    moved = Counter(holdfast.events.counters) - before
    restored = {"restored": step, "digest": training.digest(), "moved": moved}
    log.write(**restored, tried=training.tried(step) if step else [])
    end = logs / "end"
    while not end.exists() or step < int(end.read_text()):
        until = time.monotonic() + STEP_S
        log.write(**training.step(step), files=len(os.listdir("/proc/self/fd")))
        step += 1
        ckpt.step(step)
        time.sleep(max(0.0, until - time.monotonic()))
    ckpt.close()
    log.write(closed=step)


def main() -> None:

    warnings.simplefilter("ignore", holdfast.HoldfastWarning)
    root, logs = map(Path, sys.argv[1:3])
    options = Options(**json.loads(sys.argv[3])) if len(sys.argv) > 3 else Options()
    dist.init_process_group("gloo", timeout=timedelta(seconds=NOTICED_S))
    if len(sys.argv) > 4:
        write_reference(logs / "reference.jsonl", options, until=int(sys.argv[4]))
    else:
        train(root, logs, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
