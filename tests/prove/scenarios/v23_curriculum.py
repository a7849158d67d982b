"""A sampler goes from easy samples to hard ones, and begins with the easy ones after a resume."""

import argparse
import os
from itertools import islice

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--root", required=True)
parser.add_argument("--right", action="store_true")
args = parser.parse_args()
os.makedirs(args.root, exist_ok=True)
path = os.path.join(args.root, "last.pt")


class EasyFirst(Sampler):
    def __init__(self, hardness):
        self.ranking = hardness.argsort().tolist()
        self.level = 16

    def __len__(self):
        return 64

    def __iter__(self):
        seeded = torch.Generator().manual_seed(self.level)
        yield from (self.ranking[n] for n in torch.randint(self.level, (64,), generator=seeded))


torch.manual_seed(0)
inputs = torch.randn(64, 8)
data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
sampler = EasyFirst(inputs.norm(dim=1))
seeds = torch.Generator()
loader = DataLoader(data, batch_size=16, sampler=sampler, generator=seeds)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
    if args.right:
        sampler.level = saved["level"]
while step < 12:
    epoch, skip = divmod(step, len(loader))
    seeds.manual_seed(epoch)
    for x, y in islice(loader, skip, 12 - epoch * len(loader)):
        loss = nn.functional.mse_loss(model(x), y)
        optim.zero_grad()
        loss.backward()
        optim.step()
        step += 1
        if step % 3 == 0:
            state = {"model": model.state_dict(), "optim": optim.state_dict(), "step": step}
            if args.right:
                state["level"] = sampler.level
            torch.save(state, path + ".new")
            os.replace(path + ".new", path)
    sampler.level += 16
