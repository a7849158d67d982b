"""The epoch is restored, the place in it is not: its first batches come again on both ranks."""

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
inputs = torch.randn(128, 8)
data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
sampler = DistributedSampler(data)
seeds = torch.Generator()
loader = DataLoader(data, batch_size=8, sampler=sampler, generator=seeds)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
ddp = DistributedDataParallel(model)
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
step, epoch, skip = 0, 0, 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step, epoch = saved["step"], saved["epoch"]
    skip = step % len(loader) if args.right else 0
while step < 12:
    sampler.set_epoch(epoch)
    seeds.manual_seed(epoch)
    for x, y in islice(loader, skip, skip + 12 - step):
        loss = nn.functional.mse_loss(ddp(x), y)
        optim.zero_grad()
        loss.backward()
        optim.step()
        step += 1
        if step % 3 == 0 and dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optim": optim.state_dict(), "step": step}
            state["epoch"] = epoch
            torch.save(state, path + ".new")
            os.replace(path + ".new", path)
    epoch, skip = epoch + 1, 0
dist.destroy_process_group()
