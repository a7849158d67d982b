"""Worker: a training that records every step, with a home behind its root.

    launch("records_behind", 2, OUT, ROOT, BEHIND, STEPS, EVERY_S)

Each rank writes lines to OUT/told-<rank>.jsonl: what it began with, each step with a digest of its part of
the state, records that lie in the root, their uploads, and its warnings.  It ends after STEPS, or when
OUT/end is there; when OUT/die is there, it kills the process that writes its records, and itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.core.codec.digest import hexdigest

DURABLE = 10
PACE_S = 0.02


class Teller:
    """Writes the lines of a rank."""

    def __init__(self, out: Path) -> None:
        self._path = out / f"told-{dist.get_rank()}.jsonl"
        self._lock = threading.Lock()

    def tell(self, **line: Any) -> None:
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps({**line, "time": time.time()}) + "\n")

    def heard(self, event: holdfast.events.Event) -> None:
        if event.name == "upload.records":
            self.tell(upload=event.duration_s)
        elif event.name == "delta.wrote":
            self.tell(wrote=event.fields["step"])
        elif event.name == "upload.failed":
            self.tell(failed=event.fields["error"])

    def warned(self, message: Warning | str, *_: Any) -> None:
        self.tell(warned=str(message))


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 63), torch.nn.ReLU(), torch.nn.Linear(63, 8))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def digest_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    states = [v for s in optimizer.state.values() for v in s.values()]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in [*model.parameters(), *states]]
    return hexdigest(b"".join(t.detach().numpy().tobytes() for t in local))


def die(root: Path) -> None:
    for mark in root.glob(f"log/*/r{dist.get_rank():05d}-*.writing"):
        os.kill(int(mark.stem.partition("-")[2]), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def is_there(path: Path) -> bool:
    """True on all ranks if rank 0 sees a file."""
    found = torch.tensor([dist.get_rank() == 0 and path.exists()], dtype=torch.int32)
    dist.all_reduce(found)
    return bool(found)


def main() -> None:
    out, root, behind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    num_steps, every_s = int(sys.argv[4]), float(sys.argv[5])
    dist.init_process_group("gloo")
    teller = Teller(out)
    warnings.showwarning = teller.warned
    warnings.simplefilter("always")
    holdfast.events.subscribe(teller.heard)
    model, optimizer = made()
    with holdfast.Checkpointer(
        root,
        {"model": model, "optim": optimizer},
        every=holdfast.Every(durable=DURABLE, delta=1),
        delta=holdfast.Delta(upload_every_s=every_s),
        upload=behind,
        deadline_s=20,
    ) as ckpt:
        restored = ckpt.restore()
        began = {"restored": int(restored), "tier": restored.tier, "replayed": restored.replayed}
        teller.tell(**began, digest=digest_of(model, optimizer))
        for step in range(int(restored) + 1, num_steps + 1):
            torch.manual_seed(step)
            model(torch.randn(16, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            at = time.perf_counter()
            ckpt.step(step)
            teller.tell(
                step=step, took=time.perf_counter() - at, digest=digest_of(model, optimizer)
            )
            if is_there(out / "die"):
                die(root)
            if is_there(out / "end"):
                break
            threading.Event().wait(PACE_S)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
