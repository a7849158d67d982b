"""Batches are read two ahead, and the place that is saved is that of the reader."""

import argparse
import os
from collections import deque

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--root", required=True)
parser.add_argument("--right", action="store_true")
args = parser.parse_args()
os.makedirs(args.root, exist_ok=True)
path = os.path.join(args.root, "last.pt")


class ReadAhead:
    def __init__(self, loader, order, place):
        self.loader, self.order, self.place = loader, order, place
        self.source, self.ahead = self.read(), deque()

    def read(self):
        while True:
            epoch, skip = divmod(self.place, len(self.loader))
            self.order.manual_seed(epoch)
            for number, batch in enumerate(self.loader):
                if number >= skip:
                    self.place += 1
                    yield batch

    def next(self):
        while len(self.ahead) < 3:
            self.ahead.append(next(self.source))
        return self.ahead.popleft()


torch.manual_seed(0)
inputs = torch.randn(64, 8)
data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
order = torch.Generator()
loader = DataLoader(data, batch_size=8, shuffle=True, generator=order)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
step, place = 0, 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step, place = saved["step"], saved["place"]
reader = ReadAhead(loader, order, place)
while step < 12:
    x, y = reader.next()
    loss = nn.functional.mse_loss(model(x), y)
    optim.zero_grad()
    loss.backward()
    optim.step()
    step += 1
    if step % 3 == 0:
        state = {"model": model.state_dict(), "optim": optim.state_dict(), "step": step}
        state["place"] = reader.place - (len(reader.ahead) if args.right else 0)
        torch.save(state, path + ".new")
        os.replace(path + ".new", path)
