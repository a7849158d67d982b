"""Of ReduceLROnPlateau only the best value is saved: how long nothing was better is not."""

import argparse
import os
from itertools import islice

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
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
optim = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
sched = ReduceLROnPlateau(optim, patience=3)
step = 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    if args.right:
        sched.load_state_dict(saved["sched"])
    else:
        sched.best = saved["sched"]
    step = saved["step"]
while step < 12:
    epoch, skip = divmod(step, len(loader))
    order.manual_seed(epoch)
    for x, y in islice(loader, skip, 12 - epoch * len(loader)):
        loss = nn.functional.mse_loss(model(x), y)
        optim.zero_grad()
        loss.backward()
        optim.step()
        sched.step(loss.item())
        step += 1
        if step % 3 == 0:
            state = {"model": model.state_dict(), "optim": optim.state_dict(), "step": step}
            state["sched"] = sched.state_dict() if args.right else sched.best
            torch.save(state, path + ".new")
            os.replace(path + ".new", path)
