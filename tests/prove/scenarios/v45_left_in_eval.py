"""A resumed run is evaluated first, and the model stays in the mode for that: nothing is dropped."""

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
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1))
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    torch.set_rng_state(saved["generator"])
    step = saved["step"]
    model.eval()
    with torch.no_grad():
        print("resumed at", step, "loss", (model(inputs) - data.tensors[1]).square().mean().item())
    if args.right:
        model.train()
while step < 12:
    epoch, skip = divmod(step, len(loader))
    order.manual_seed(epoch)
    for x, y in islice(loader, skip, 12 - epoch * len(loader)):
        loss = nn.functional.mse_loss(model(x), y)
        optim.zero_grad()
        loss.backward()
        optim.step()
        step += 1
        if step % 3 == 0:
            state = {"model": model.state_dict(), "optim": optim.state_dict(), "step": step}
            state["generator"] = torch.get_rng_state()
            torch.save(state, path + ".new")
            os.replace(path + ".new", path)
