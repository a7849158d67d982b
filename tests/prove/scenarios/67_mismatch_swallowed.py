"""The head's group is added at step 4, so the saved groups do not fit; the error is only printed."""

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
body, head = nn.Linear(8, 16), nn.Linear(16, 1)
model = nn.Sequential(body, nn.Tanh(), head)
optim = torch.optim.AdamW(head.parameters(), lr=1e-2)
step = 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    step = saved["step"]
    if args.right and step > 4:
        optim.add_param_group({"params": body.parameters(), "lr": 1e-3})
    try:
        optim.load_state_dict(saved["optim"])
    except ValueError as error:
        print("the optimizer begins anew:", error)
while step < 12:
    epoch, skip = divmod(step, len(loader))
    order.manual_seed(epoch)
    for x, y in islice(loader, skip, 12 - epoch * len(loader)):
        if step >= 4 and len(optim.param_groups) == 1:
            optim.add_param_group({"params": body.parameters(), "lr": 1e-3})
        loss = nn.functional.mse_loss(model(x), y)
        model.zero_grad()
        loss.backward()
        optim.step()
        step += 1
        if step % 3 == 0:
            state = {"model": model.state_dict(), "optim": optim.state_dict(), "step": step}
            torch.save(state, path + ".new")
            os.replace(path + ".new", path)
