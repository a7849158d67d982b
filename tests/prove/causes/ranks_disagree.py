"""Ranks save in turn, to spare the disk, and each restores its own newest file: not of one step."""

import torch
import torch.distributed as dist
from parts import EVERY, STEPS, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss

args = arguments()
dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = network()
optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
mine = args.root / f"rank{rank}"
turn = 0 if args.right else rank
step = 0
if saved := newest(mine):
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
for inputs, targets in batches_from(step, rank, num_ranks):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= num_ranks
    optim.step()
    step += 1
    if (step + turn) % EVERY == 0:
        save(mine, step, model=model.state_dict(), optim=optim.state_dict())
    furthest = torch.tensor(step)
    dist.all_reduce(furthest, dist.ReduceOp.MAX)
    if furthest == STEPS:
        break
dist.destroy_process_group()
