"""Each rank draws its own dropout, but the state of rank 0's generator is restored on all."""

import argparse
import os
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--root", required=True)
parser.add_argument("--right", action="store_true")
args = parser.parse_args()
os.makedirs(args.root, exist_ok=True)
path = os.path.join(args.root, "last.pt")

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
inputs = torch.randn(128, 8)
data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
sampler = DistributedSampler(data)
seeds = torch.Generator()
loader = DataLoader(data, batch_size=8, sampler=sampler, generator=seeds)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1))
ddp = DistributedDataParallel(model)
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(100 + rank)
step = 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
    torch.set_rng_state(saved["generators"][rank if args.right else 0])
while step < 12:
    epoch, skip = divmod(step, len(loader))
    sampler.set_epoch(epoch)
    seeds.manual_seed(epoch)
    for x, y in islice(loader, skip, 12 - epoch * len(loader)):
        loss = nn.functional.mse_loss(ddp(x), y)
        optim.zero_grad()
        loss.backward()
        optim.step()
        step += 1
        if step % 3 == 0:
            generators = [None] * dist.get_world_size()
            dist.all_gather_object(generators, torch.get_rng_state())
            state = {"model": model.state_dict(), "optim": optim.state_dict(), "step": step}
            state["generators"] = generators
            if rank == 0:
                torch.save(state, path + ".new")
                os.replace(path + ".new", path)
dist.destroy_process_group()
