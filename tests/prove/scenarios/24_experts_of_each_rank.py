"""Each rank has an expert of its own under the same name; rank 0 saves, and all ranks get its expert."""

import torch
import torch.distributed as dist
from parts import EVERY, arguments, batches_from, newest, save
from torch.nn.functional import mse_loss

args = arguments()
dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.ModuleDict({"body": torch.nn.Linear(8, 8), "expert": torch.nn.Linear(8, 4)})
optim = torch.optim.SGD(model.parameters(), lr=0.1)
folder = args.root / f"rank{rank}" if args.right else args.root
step = 0
if saved := newest(folder):
    model.load_state_dict(saved["model"])
    step = saved["step"]
for inputs, targets in batches_from(step, rank, num_ranks):
    optim.zero_grad()
    mse_loss(model["expert"](model["body"](inputs).tanh()), targets).backward()
    for parameter in model["body"].parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= num_ranks
    optim.step()
    step += 1
    if step % EVERY == 0:
        if rank == 0 or args.right:
            save(folder, step, model=model.state_dict())
        dist.barrier()
dist.destroy_process_group()
