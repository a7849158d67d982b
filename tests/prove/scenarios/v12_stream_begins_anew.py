"""A stream is read from its beginning after a resume."""

import argparse
import os
from itertools import islice

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

parser = argparse.ArgumentParser()
parser.add_argument("--root", required=True)
parser.add_argument("--right", action="store_true")
args = parser.parse_args()
os.makedirs(args.root, exist_ok=True)
path = os.path.join(args.root, "last.pt")


class Stream(IterableDataset):
    def __iter__(self):
        source = torch.Generator().manual_seed(0)
        while True:
            x = torch.randn(8, generator=source)
            yield x, x.sin().sum(0, keepdim=True)


torch.manual_seed(0)
loader = DataLoader(Stream(), batch_size=8, generator=torch.Generator())
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
for x, y in islice(loader, step if args.right else 0, None):
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
