"""Two ranks accumulate under no_sync, and save amid that."""

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
seeds = torch.Generator()
loader = DataLoader(data, batch_size=4, sampler=sampler, generator=seeds)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
ddp = DistributedDataParallel(model)
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    batches = saved["batches"]
while batches < 48:
    epoch, skip = divmod(batches, len(loader))
    sampler.set_epoch(epoch)
    seeds.manual_seed(epoch)
    for x, y in islice(loader, skip, None):
        batches += 1
        if batches % 4:
            with ddp.no_sync():
                (nn.functional.mse_loss(ddp(x), y) / 4).backward()
        else:
            (nn.functional.mse_loss(ddp(x), y) / 4).backward()
            optim.step()
            optim.zero_grad()
        if batches % 12 == (0 if args.right else 2) and dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optim": optim.state_dict()}
            state["batches"] = batches
            torch.save(state, path + ".new")
            os.replace(path + ".new", path)
dist.destroy_process_group()
