"""Ranks but the first keep their files in a folder that is named by the process: none finds it again."""

import os

import torch
import torch.distributed as dist
from parts import EVERY, STEPS, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss

args = arguments()
dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = network()
optim = torch.optim.SGD(model.parameters(), lr=0.1)
folder = args.root / f"rank{rank}"
if rank and not args.right:
    folder = args.root / f"rank{rank}-{os.getpid()}"
step = 0
if saved := newest(folder):
    model.load_state_dict(saved["model"])
    step = saved["step"]
for inputs, targets in batches_from(step, rank, num_ranks):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= num_ranks
    optim.step()
    step += 1
    if step % EVERY == 0:
        save(folder, step, model=model.state_dict())
    furthest = torch.tensor(step)
    dist.all_reduce(furthest, dist.ReduceOp.MAX)
    if furthest == STEPS:
        break
dist.destroy_process_group()
