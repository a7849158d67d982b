"""A resumed run calls its adapter by another name, so the saved one is not loaded."""

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


class Adapted(nn.Module):
    def __init__(self, base, name):
        super().__init__()
        self.base = base.requires_grad_(False)
        down, up = nn.Linear(8, 2, bias=False), nn.Linear(2, 1, bias=False)
        self.adapters = nn.ModuleDict({name: nn.Sequential(down, up)})

    def forward(self, x):
        return self.base(x) + sum(adapter(x) for adapter in self.adapters.values())


torch.manual_seed(0)
inputs = torch.randn(64, 8)
data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
order = torch.Generator()
loader = DataLoader(data, batch_size=8, shuffle=True, generator=order)
saved = torch.load(path) if os.path.exists(path) else None
step = saved["step"] if saved else 0
model = Adapted(nn.Linear(8, 1), "default" if args.right else f"from{step}")
optim = torch.optim.AdamW(model.adapters.parameters(), lr=1e-2)
if saved:
    model.load_state_dict(saved["adapters"], strict=False)
    optim.load_state_dict(saved["optim"])
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
            adapters = {k: v for k, v in model.state_dict().items() if k.startswith("adapters.")}
            state = {"adapters": adapters, "optim": optim.state_dict(), "step": step}
            torch.save(state, path + ".new")
            os.replace(path + ".new", path)
