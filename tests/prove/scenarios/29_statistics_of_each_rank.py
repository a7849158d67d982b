"""Each rank has statistics of its own data in BatchNorm; the file has rank 0's, and all ranks get them."""

import torch
import torch.distributed as dist
from parts import EVERY, arguments, batches_from, newest, save
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

args = arguments()
dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
replica = DistributedDataParallel(model, broadcast_buffers=False)
optim = torch.optim.SGD(model.parameters(), lr=0.1)
folder = args.root / f"rank{rank}" if args.right else args.root
step = 0
if saved := newest(folder):
    model.load_state_dict(saved["model"])
    step = saved["step"]
for inputs, targets in batches_from(step, rank, num_ranks):
    optim.zero_grad()
    mse_loss(replica(inputs), targets).backward()
    optim.step()
    step += 1
    if step % EVERY == 0:
        if rank == 0 or args.right:
            save(folder, step, model=model.state_dict())
        dist.barrier()
dist.destroy_process_group()
