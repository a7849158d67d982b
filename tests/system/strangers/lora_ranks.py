"""Worker, 2 ranks: LoRA under DDP or FSDP2, with snapshots in memory; see `test_lora`."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast import Every, Memory

from .test_lora import resumed_is_whole


def main() -> None:
    root, layout = Path(sys.argv[1]), sys.argv[2]
    os.environ["HOLDFAST_MEMORY_DIR"] = str(root / "node")
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")

    def wrap(model: Any) -> Any:
        if layout == "ddp":
            return nn.parallel.DistributedDataParallel(model)
        return fully_shard(model)

    resumed_is_whole(root / "stored", wrap)
    memory = Memory(redundancy="none", budget="64MiB")
    resumed_is_whole(root / "memory", wrap, every=Every(memory=1, durable=3), memory=memory)
    dist.barrier()
    assert holdfast.steps(root / "memory" / "run")[-1] == 9
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
