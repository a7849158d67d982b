"""Ranks drop bad batches, so each is at a place of its own, but only rank 0's is saved."""

import argparse
import os
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--root", required=True)
parser.add_argument("--right", action="store_true")
args = parser.parse_args()
os.makedirs(args.root, exist_ok=True)
path = os.path.join(args.root, "last.pt")

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
torch.manual_seed(rank)
inputs = torch.randn(64, 8)
data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
order = torch.Generator()
loader = DataLoader(data, batch_size=8, shuffle=True, generator=order)
ddp = DistributedDataParallel(model)
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
step, seen = 0, 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step, seen = saved["step"], saved["seen"][rank if args.right else 0]
while step < 12:
    epoch, skip = divmod(seen, len(loader))
    order.manual_seed(epoch)
    for x, y in islice(loader, skip, None):
        seen += 1
        if step == 12 or y.mean() > 0.5:
            continue
        loss = nn.functional.mse_loss(ddp(x), y)
        optim.zero_grad()
        loss.backward()
        optim.step()
        step += 1
        if step % 3 == 0:
            places = [None] * dist.get_world_size()
            dist.all_gather_object(places, seen)
            state = {"model": model.state_dict(), "optim": optim.state_dict(), "step": step}
            state["seen"] = places
            if rank == 0:
                torch.save(state, path + ".new")
                os.replace(path + ".new", path)
dist.destroy_process_group()
