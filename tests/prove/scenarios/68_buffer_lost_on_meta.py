"""A resumed model is made on the meta device, and its buffer that is not persistent is never filled."""

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


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(0.5, 2.0, 8), persistent=False)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head((x * self.frequencies).sin())


torch.manual_seed(0)
inputs = torch.randn(64, 8)
data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
order = torch.Generator()
loader = DataLoader(data, batch_size=8, shuffle=True, generator=order)
if os.path.exists(path):
    with torch.device("meta"):
        model = Waves()
    model.to_empty(device="cpu")
    if args.right:
        model.frequencies.copy_(torch.linspace(0.5, 2.0, 8))
else:
    model = Waves()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
torch.manual_seed(1)
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
            torch.save(state, path + ".new")
            os.replace(path + ".new", path)
