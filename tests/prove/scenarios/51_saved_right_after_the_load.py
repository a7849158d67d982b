"""holdfast saves again what it has just restored: nothing is wrong here."""

import argparse
from itertools import islice

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast

parser = argparse.ArgumentParser()
parser.add_argument("--root", required=True)
parser.add_argument("--right", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
inputs = torch.randn(64, 8)
data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
order = torch.Generator()
loader = DataLoader(data, batch_size=8, shuffle=True, generator=order)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 12)
state = {"model": model, "optim": optim, "sched": sched}
with holdfast.Checkpointer(args.root, state, every=3) as ckpt:
    step = int(ckpt.restore())
    if step:
        ckpt.save(step)
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
            ckpt.step(step)
