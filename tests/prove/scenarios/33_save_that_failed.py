"""Rank 1 could not write its newest file, said so, and went on; a resume takes its older one."""

import torch
import torch.distributed as dist
from parts import EVERY, STEPS, arguments, batches_from, network, save
from torch.nn.functional import mse_loss


def checkpoint(folder, step, model):
    try:
        if rank == 1 and step == 2 * EVERY:
            raise OSError("no space left on device")
        save(folder, step, model=model.state_dict())
    except OSError as error:
        print(f"rank {rank} has not saved step {step}: {error}")


args = arguments()
dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = network()
optim = torch.optim.SGD(model.parameters(), lr=0.1)
folder = args.root / f"rank{rank}"
step = 0
steps = [int(file.stem.removeprefix("step")) for file in folder.glob("step*.pt")]
if args.right:  # the newest step that all ranks have
    steps_of_ranks = [steps] * num_ranks
    dist.all_gather_object(steps_of_ranks, steps)
    steps = set.intersection(*map(set, steps_of_ranks))
if steps:
    saved = torch.load(folder / f"step{max(steps):04}.pt")
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
        checkpoint(folder, step, model)
    furthest = torch.tensor(step)
    dist.all_reduce(furthest, dist.ReduceOp.MAX)
    if furthest == STEPS:
        break
dist.destroy_process_group()
