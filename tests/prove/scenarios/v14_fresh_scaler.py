"""The gradient scaler begins with its first scale, and skips batches again until it fits."""

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
inputs = torch.randn(64, 8)
data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
order = torch.Generator()
loader = DataLoader(data, batch_size=8, shuffle=True, generator=order)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
step, batches = 0, 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step, batches = saved["step"], saved["batches"]
    if args.right:
        scaler.load_state_dict(saved["scaler"])
while step < 12:
    epoch, skip = divmod(batches, len(loader))
    order.manual_seed(epoch)
    for x, y in islice(loader, skip, None):
        if step == 12:
            break
        loss = nn.functional.mse_loss(model(x), y, reduction="sum")
        optim.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optim)
        scale = scaler.get_scale()
        scaler.update()
        batches += 1
        if scaler.get_scale() < scale:  # this step was left out
            continue
        step += 1
        if step % 3 == 0:
            state = {"model": model.state_dict(), "optim": optim.state_dict(), "step": step}
            state["batches"] = batches
            if args.right:
                state["scaler"] = scaler.state_dict()
            torch.save(state, path + ".new")
            os.replace(path + ".new", path)
