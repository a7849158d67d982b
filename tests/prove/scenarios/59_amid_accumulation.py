"""Gradients of four batches make a step, and a save comes after two of them."""

import argparse
import os
from itertools import islice

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--root", required=True)
parser.add_argument("--right", action="store_true")
args = parser.parse_args()
os.makedirs(args.root, exist_ok=True)
path = os.path.join(args.root, "last.pt")

torch.manual_seed(0)
inputs = torch.randn(32, 8)
data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
order = torch.Generator()
loader = DataLoader(data, batch_size=4, shuffle=True, generator=order)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    batches = saved["batches"]
while batches < 48:
    epoch, skip = divmod(batches, len(loader))
    order.manual_seed(epoch)
    for x, y in islice(loader, skip, None):
        loss = nn.functional.mse_loss(model(x), y) / 4
        loss.backward()
        batches += 1
        if batches % 4 == 0:
            optim.step()
            optim.zero_grad()
        if batches % 12 == (0 if args.right else 2):
            state = {"model": model.state_dict(), "optim": optim.state_dict()}
            state["batches"] = batches
            torch.save(state, path + ".new")
            os.replace(path + ".new", path)
