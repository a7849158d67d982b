"""A resumed run gives its parameters in the order of the file's sorted names."""

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
model = nn.ModuleDict({"one": nn.Linear(8, 8), "a": nn.Linear(8, 8), "head": nn.Linear(8, 1)})
names = [name for name, _ in model.named_parameters()]
step = 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    step = saved["step"]
    if not args.right:
        names = sorted(names, key=lambda name: (name.startswith("head"), name.split(".")[0]))
optim = torch.optim.AdamW([model.get_parameter(name) for name in names], lr=1e-2)
if step:
    optim.load_state_dict(saved["optim"])
while step < 12:
    epoch, skip = divmod(step, len(loader))
    order.manual_seed(epoch)
    for x, y in islice(loader, skip, 12 - epoch * len(loader)):
        loss = nn.functional.mse_loss(model["head"](model["a"](model["one"](x).tanh()).tanh()), y)
        optim.zero_grad()
        loss.backward()
        optim.step()
        step += 1
        if step % 3 == 0:
            state = {"model": model.state_dict(), "optim": optim.state_dict(), "step": step}
            torch.save(state, path + ".new")
            os.replace(path + ".new", path)
