"""OneCycleLR is made anew after the optimizer was loaded, at its first step: it writes lr and betas."""

import argparse
import os
from itertools import islice

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--root", required=True)
parser.add_argument("--right", action="store_true")
args = parser.parse_args()
os.makedirs(args.root, exist_ok=True)
path = os.path.join(args.root, "last.pt")

torch.manual_seed(0)
inputs = torch.randn(64, 8)
data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
order = torch.Generator()
loader = DataLoader(data, batch_size=8, shuffle=True, generator=order)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
saved = torch.load(path) if os.path.exists(path) else None
if saved:
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
step = saved["step"] if saved else 0
sched = OneCycleLR(optim, max_lr=3e-2, total_steps=20)
if saved and args.right:
    optim.load_state_dict(saved["optim"])
    sched.load_state_dict(saved["sched"])
while step < 12:
    epoch, skip = divmod(step, len(loader))
    order.manual_seed(epoch)
    for x, y in islice(loader, skip, 12 - epoch * len(loader)):
        loss = nn.functional.mse_loss(model(x), y)
        optim.zero_grad()
        loss.backward()
        optim.step()
        sched.step()
        step += 1
        if step % 3 == 0:
            state = {"model": model.state_dict(), "optim": optim.state_dict(), "step": step}
            if args.right:
                state["sched"] = sched.state_dict()
            torch.save(state, path + ".new")
            os.replace(path + ".new", path)
