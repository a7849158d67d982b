"""The place in the data is restored on rank 0 alone; the other rank gives its first batches again."""

import torch
import torch.distributed as dist
from parts import EVERY, STEPS, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

args = arguments()
dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = network()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = place = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
    if rank == 0 or args.right:
        place = saved["place"]
replica = DistributedDataParallel(model)
for _, (inputs, targets) in zip(range(step, STEPS), batches_from(place, rank, num_ranks)):
    optim.zero_grad()
    mse_loss(replica(inputs), targets).backward()
    optim.step()
    step, place = step + 1, place + 1
    if step % EVERY == 0:
        if rank == 0:
            states = {"model": model.state_dict(), "optim": optim.state_dict()}
            save(args.root, step, **states, place=place)
        dist.barrier()
dist.destroy_process_group()
