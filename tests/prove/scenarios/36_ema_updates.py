"""The number of an average's updates is a plain attribute of its module: no state_dict has it."""

import argparse
import math
import os
from copy import deepcopy
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


class WarmAverage(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.module = deepcopy(model).requires_grad_(False)
        self.updates = 0

    def update(self, model):
        self.updates += 1
        decay = 0.99 * (1 - math.exp(-self.updates / 20))
        for mine, live in zip(self.module.parameters(), model.parameters()):
            mine.lerp_(live.detach(), 1 - decay)


torch.manual_seed(0)
inputs = torch.randn(64, 8)
data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
order = torch.Generator()
loader = DataLoader(data, batch_size=8, shuffle=True, generator=order)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
ema = WarmAverage(model)
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    ema.load_state_dict(saved["ema"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
    if args.right:
        ema.updates = saved["updates"]
while step < 12:
    epoch, skip = divmod(step, len(loader))
    order.manual_seed(epoch)
    for x, y in islice(loader, skip, 12 - epoch * len(loader)):
        loss = nn.functional.mse_loss(model(x), y)
        optim.zero_grad()
        loss.backward()
        optim.step()
        ema.update(model)
        step += 1
        if step % 3 == 0:
            state = {"model": model.state_dict(), "ema": ema.state_dict(), "step": step}
            state["optim"] = optim.state_dict()
            if args.right:
                state["updates"] = ema.updates
            torch.save(state, path + ".new")
            os.replace(path + ".new", path)
