"""Replicas are averaged at every fourth step and differ in between, when rank 0's is saved for all."""

import torch
import torch.distributed as dist
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss

TOGETHER = 4

args = arguments()
dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = network()
optim = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    step = saved["step"]
for inputs, targets in batches_from(step, rank, num_ranks):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    step += 1
    if step % TOGETHER == 0:
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= num_ranks
    if step % (TOGETHER if args.right else EVERY) == 0:
        if rank == 0:
            save(args.root, step, model=model.state_dict())
        dist.barrier()
dist.destroy_process_group()
