"""A sampler's epoch goes up by one at each end of an epoch, and a resume begins with its first."""

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


class Shuffled(Sampler):
    def __init__(self, size):
        self.size, self.epoch = size, 0

    def __len__(self):
        return self.size

    def __iter__(self):
        seeded = torch.Generator().manual_seed(1000 + self.epoch)
        yield from torch.randperm(self.size, generator=seeded).tolist()
        self.epoch += 1


torch.manual_seed(0)
inputs = torch.randn(64, 8)
data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
sampler = Shuffled(len(data))
seeds = torch.Generator()
loader = DataLoader(data, batch_size=8, sampler=sampler, generator=seeds)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
    if args.right:
        sampler.epoch = step // len(loader)
while step < 12:
    epoch, skip = divmod(step, len(loader))
    seeds.manual_seed(epoch)
    for x, y in islice(loader, skip, None):
        if step == 12:
            break
        loss = nn.functional.mse_loss(model(x), y)
        optim.zero_grad()
        loss.backward()
        optim.step()
        step += 1
        if step % 3 == 0:
            state = {"model": model.state_dict(), "optim": optim.state_dict(), "step": step}
            torch.save(state, path + ".new")
            os.replace(path + ".new", path)
