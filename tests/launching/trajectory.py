"""Worker: a training under FSDP2 that tells its state after every step, and what it holds at each entry.

    trajectory.py ROOT [--steps N] [--tiers memory,records,durable] [--size N] [--raise-each N] [--pause S]
                  [--linger] [--bad-spares] [--fail KIND RANK STEP TIMES] ...

Each rank appends lines of JSON to ROOT.told: what it begins an attempt with, and after every step a digest
of its parts of parameters and optimizer state.  The run ends at step N, or when there is a file ROOT.stop.
Where there is a file ROOT.order with the words RANK EVENT, the rank kills itself at the next event of that
name that holdfast reports.  KIND is `raise`, `exit`, `kill`, `stop`, `wait` (for ever) or `hoard` (memory),
done at that step while fewer than TIMES were done.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import signal
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast

parser = argparse.ArgumentParser()
parser.add_argument("root")
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument("--tiers", default="")
parser.add_argument("--size", type=int, default=32, help="each of 4 layers has SIZE x SIZE weights")
parser.add_argument("--raise-each", type=int, default=0, help="rank 1 raises after N steps")
parser.add_argument("--kill-each", type=int, default=0, help="rank 1 is killed after N steps")
parser.add_argument("--pause", type=float, default=0.0, help="seconds that each step takes besides")
parser.add_argument("--quick", action="store_true", help="tell no digests, and count nothing")
parser.add_argument(
    "--linger", action="store_true", help="once rank 1 does not return with the rest"
)
parser.add_argument(
    "--bad-spares", action="store_true", help="processes without a rank end at once"
)
parser.add_argument(
    "--fail", nargs=4, action="append", default=[], metavar=("KIND", "RANK", "STEP", "TIMES")
)
given = parser.parse_args()
tiers = set(filter(None, given.tiers.split(",")))


def tell(**about: Any) -> None:
    about |= {"rank": int(os.environ["RANK"]), "pid": os.getpid(), "at": time.time()}
    about["attempt"] = int(os.environ.get("HOLDFAST_ATTEMPT", "1"))
    with open(f"{given.root}.told", "ab", buffering=0) as file:
        file.write(json.dumps(about).encode() + b"\n")


def obey(event: holdfast.events.Event) -> None:
    """Kill this process if it was ordered for this event."""
    with suppress(OSError):
        rank, name = Path(f"{given.root}.order").read_text().split()
        if (rank, name) == (os.environ["RANK"], event.name):
            os.unlink(f"{given.root}.order")
            tell(ordered=name)
            os.kill(os.getpid(), signal.SIGKILL)


def fail(step: int) -> None:
    """Do what each `--fail` says, as often as it says."""
    for number, (kind, rank, at, times) in enumerate(given.fail):
        if dist.get_rank() == int(rank) and step == int(at):
            if any(once(f"failed-{number}-{n}") for n in range(int(times))):
                befall(kind, step)


def befall(kind: str, step: int) -> None:
    if kind == "raise":
        raise ValueError(f"a fault at step {step}")
    if kind == "exit":
        raise SystemExit(3)
    if kind == "wait":
        threading.Event().wait()
    hoard = []
    while kind == "hoard":
        hoard.append(b"x" * (16 << 20))
    os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)


def once(name: str) -> bool:
    """True for the first who asks."""
    with suppress(FileExistsError):
        os.close(os.open(f"{given.root}.{name}", os.O_CREAT | os.O_EXCL))
        return True
    return False


def holds() -> dict[str, Any]:
    """Count what this process holds.

    Threads that wait for a next call of storage are counted by themselves: there are as many as calls that
    were ever made at once.  The file of what is told is no file of the run.
    """
    gc.collect()
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    links = [link for link in links if link != f"{given.root}.told"]
    status = Path("/proc/self/status").read_text()
    names = [t.name for t in threading.enumerate()]
    idle = names.count("holdfast-storage")
    return {
        "links": sorted(link for link in links if not link.startswith("socket:")),
        "fds": len(links),
        "sockets": sum(link.startswith("socket:") for link in links),
        "threads": len(os.listdir("/proc/self/task")) - idle,
        "python_threads": len(names) - idle,
        "storage_threads": idle,
        "names": sorted(names),
        "maps": Path("/proc/self/maps").read_text().count("/dev/shm"),
        "anonymous": int(status.partition("RssAnon:")[2].split()[0]) << 10,
        "rss": int(status.partition("VmRSS:")[2].split()[0]) << 10,
        "tensors": sum(isinstance(o, torch.Tensor) for o in gc.get_objects()),
        "groups": sum(type(o).__name__.startswith("ProcessGroup") for o in gc.get_objects()),
    }


def digest(optimizer: torch.optim.Optimizer) -> str:
    """Digest of this rank's parts of every parameter and state."""
    found = hashlib.blake2b(digest_size=8)
    for p in optimizer.param_groups[0]["params"]:
        states = optimizer.state[p]
        for value in (p, *(states[name] for name in sorted(states))):
            local = value.to_local() if hasattr(value, "to_local") else value
            found.update(local.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: nn.Module = nn.Sequential(*[nn.Linear(given.size, given.size) for _ in range(4)])
    if hasattr(torch.cpu.Stream, "record_event"):
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:  # this torch has no FSDP2 on CPUs
        model = nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def checkpointer(state: dict[str, Any]) -> Any:
    if not tiers:
        return nullcontext()
    every = holdfast.Every(
        durable=20 if "durable" in tiers else None,
        memory=1 if "memory" in tiers else None,
        delta=1 if "records" in tiers else None,
    )
    return holdfast.Checkpointer(
        given.root,
        state,
        every=every,
        memory=holdfast.Memory() if "memory" in tiers else None,
        delta=holdfast.Delta() if "records" in tiers else None,
        keep=holdfast.Keep(last=2),
        when_busy="queue",
        deadline_s=60,
    )


def is_last(step: int) -> bool:
    flag = torch.tensor([step >= given.steps or os.path.exists(f"{given.root}.stop")])
    dist.broadcast(flag, 0)
    return bool(flag)


def take(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    model(torch.randn(4, given.size, generator=generator)).square().mean().backward()
    if given.raise_each and step % given.raise_each == given.raise_each - 1:
        if dist.get_rank() == 1 and once(f"raised-{step}"):
            raise ValueError(f"a fault at step {step}")
    if given.kill_each and step % given.kill_each == given.kill_each - 1:
        if dist.get_rank() == 1 and once(f"killed-{step}"):
            os.kill(os.getpid(), signal.SIGKILL)
    fail(step + 1)
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(given.pause)


def main() -> None:
    times = {"entered": time.time()}
    held: dict[str, Any] = {} if given.quick else holds()
    dist.init_process_group("gloo")
    times["group"] = time.time()
    model, optimizer = build()
    times["built"] = time.time()
    try:
        with checkpointer({"model": model, "optim": optimizer}) as ckpt:
            times["checkpointer"] = time.time()
            restored = ckpt.restore() if ckpt is not None else first_step()
            times["restored"] = time.time()
            step = int(restored)
            about = {"tier": restored.tier, "replayed": restored.replayed} if ckpt else {}
            tell(begins=step, holds=held, times=times, **about)
            if step and not given.quick:
                tell(state=step, digest=digest(optimizer), restored=True)
            train(step, model, optimizer, ckpt)
            times["left"] = time.time()
    except BaseException as error:
        now = time.time()
        tell(left=type(error).__name__, raised=times.get("raised"), cleaned=now)
        raise
    dist.destroy_process_group()
    if given.linger and os.environ["RANK"] == "1" and once("lingered"):
        threading.Event().wait()


def first_step() -> int:
    """Where nothing is restored: two steps before the one that fails, so that not all are done again."""
    attempt = int(os.environ.get("HOLDFAST_ATTEMPT", "1"))
    return max(given.raise_each * attempt - 3, 0)


def train(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, ckpt: Any) -> None:
    try:
        while not is_last(step):
            take(step, model, optimizer)
            step += 1
            if ckpt is not None:
                ckpt.step(step)
            tell(state=step, digest="" if given.quick else digest(optimizer))
    except BaseException as error:
        tell(broken=type(error).__name__, at_step=step)
        raise


if given.bad_spares and "RANK" not in os.environ:
    raise SystemExit(4)
if __name__ == "__main__":
    holdfast.events.subscribe(obey)
    holdfast.recoverable(main)()
    if not tiers:  # nothing of holdfast is there that would see to torch's threads when Python ends
        os._exit(0)
