"""Worker: trains until told to stop; rank LAST gets SIGTERM at step 5.  OUT/<rank>.json: how it ended."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import holdfast

TOLD_AT, TOO_FAR = 5, 50


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.parallel.DistributedDataParallel(nn.Linear(20, 20))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optim": optimizer}
    ckpt = holdfast.Checkpointer(out / "run", state, sigterm_s=20, deadline_s=30)
    step = ckpt.restore()
    code = None
    try:
        while step < TOO_FAR:
            optimizer.zero_grad()
            model(torch.ones(4, 20) * step).sum().backward()
            optimizer.step()
            step += 1
            if step == TOLD_AT and rank == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            ckpt.step(step)
    except SystemExit as stopped:
        code = stopped.code
    weight = model.module.weight.detach().tolist()
    found = {"step": step, "code": code, "weight": weight}
    (out / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
