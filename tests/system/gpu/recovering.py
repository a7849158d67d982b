"""Worker: a small training on CUDA devices, with a fault once.

    recovering.py ROOT STEPS BACKEND FAULT

BACKEND is what init_process_group gets, `-` for nothing.  FAULT is `kill`, `raise` or `assert` at step 5,
on the last rank: an assertion on the device makes every call of CUDA fail in that process from then on.
`repeat` raises at each of six steps.  Ranks tell what each attempt began with.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import holdfast

root, steps, backend, fault = sys.argv[1:]
WIDTH = 64


def tell(**about: Any) -> None:
    line = json.dumps({"rank": dist.get_rank(), "pid": os.getpid(), **about}) + "\n"
    fd = os.open(f"{root}.told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, line.encode())
    os.close(fd)


def fail(step: int) -> None:
    due = range(2, 8) if fault == "repeat" else [5] if fault != "none" else []
    done = Path(f"{root}.fault{step}")
    if dist.get_rank() != dist.get_world_size() - 1 or step not in due or done.exists():
        return
    done.touch()
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "assert":
        at = torch.tensor([10**6], device="cuda")
        torch.zeros(2, device="cuda")[at].sum().item()
    raise ValueError(f"a fault at step {step}")


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(None if backend == "-" else backend)
    held = torch.cuda.memory_allocated()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)).to(
        device
    )
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optim": optimizer}
    every = holdfast.Every(durable=1)
    with holdfast.Checkpointer(root, state, every=every, when_busy="queue", deadline_s=60) as ckpt:
        step = int(ckpt.restore())
        tell(begins=step, held=held)
        while step < int(steps):
            step += 1
            made = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            optimizer.zero_grad()
            loss = model(torch.randn(8, WIDTH, generator=made).to(device)).square().mean()
            fail(step)
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            total.item()  # waits for the device, as a script that logs its loss does
            optimizer.step()
            ckpt.step(step)
    found = hashlib.sha256()
    for p in model.parameters():
        found.update(p.detach().cpu().numpy().tobytes())
    tell(digest=found.hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    holdfast.recoverable(main)()
