"""Ranks that end without `close()`, as `scripts_that_end` do."""

import sys
import warnings
from pathlib import Path

import torch.distributed as dist

import holdfast
from system.disks.scripts_that_end import train

warnings.simplefilter("always")
dist.init_process_group("gloo")
train(Path(sys.argv[1]), holdfast.Every(durable=1))
dist.destroy_process_group()
