"""The batch of one rank is fixed, so on other ranks the same number of batches is another place."""

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
torch.manual_seed(0)
inputs = torch.randn(64, 8)
data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
sampler = DistributedSampler(data)
size = 8 // dist.get_world_size() if args.right else 4
seeds = torch.Generator()
loader = DataLoader(data, batch_size=size, sampler=sampler, generator=seeds)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
ddp = DistributedDataParallel(model)
optim = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
step = 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
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
        if step % 3 == 0 and dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optim": optim.state_dict(), "step": step}
            torch.save(state, path + ".new")
            os.replace(path + ".new", path)
dist.destroy_process_group()
