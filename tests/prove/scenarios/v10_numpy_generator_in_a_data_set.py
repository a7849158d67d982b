"""The data set adds noise from a numpy Generator of its own, which begins anew with each process."""

import argparse
import os
from itertools import islice

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--root", required=True)
parser.add_argument("--right", action="store_true")
args = parser.parse_args()
os.makedirs(args.root, exist_ok=True)
path = os.path.join(args.root, "last.pt")


class NoisyVectors(Dataset):
    def __init__(self, inputs):
        self.inputs = inputs
        self.noise = np.random.default_rng(0)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, n):
        noise = torch.from_numpy(self.noise.normal(0, 0.1, 8)).float()
        return self.inputs[n] + noise, self.inputs[n].sin().sum(0, keepdim=True)


torch.manual_seed(0)
data = NoisyVectors(torch.randn(64, 8))
order = torch.Generator()
loader = DataLoader(data, batch_size=8, shuffle=True, generator=order)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
    if args.right:
        data.noise.bit_generator.state = saved["noise"]
while step < 12:
    before = data.noise.bit_generator.state  # of this epoch
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
            if args.right:
                state["noise"] = before
            torch.save(state, path + ".new")
            os.replace(path + ".new", path)
