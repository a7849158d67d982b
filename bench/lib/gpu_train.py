"""Worker of the claims `gpu` and `before`: a training under `holdfast run`; a rank fails once at step 20.

python -m bench.lib.gpu_train ROOT BACKEND FAULT DEVICE
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import holdfast

STEPS, BREAKS_AT = 40, 20
root, backend, fault, kind = sys.argv[1:]


def tell(**about: Any) -> None:
    line = json.dumps({"rank": int(os.environ["RANK"]), "at": time.time(), **about}) + "\n"
    fd = os.open(f"{root}.told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, line.encode())
    os.close(fd)


def fail_once() -> None:
    done = f"{root}.done"
    if os.path.exists(done):
        return
    open(done, "w").close()
    tell(fault=True)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("a fault")


@holdfast.recoverable
def main() -> None:
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    last = dist.get_rank() == dist.get_world_size() - 1
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).to(device)
    model = nn.parallel.DistributedDataParallel(net)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with holdfast.Checkpointer(
        root,
        {"model": model, "optim": optim},
        every=holdfast.Every(memory=1),
        memory=holdfast.Memory("none"),
        when_busy="queue",
        deadline_s=60,
    ) as ckpt:
        for step in range(int(ckpt.restore()) + 1, STEPS + 1):
            optim.zero_grad()
            loss = model(torch.randn(64, 1024, device=device)).square().mean()
            loss.backward()
            optim.step()
            ckpt.step(step)
            loss.item()
            tell(step=step)
            if step == BREAKS_AT and last:
                fail_once()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
