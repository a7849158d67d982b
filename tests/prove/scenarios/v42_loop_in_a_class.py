"""A loop in a class anneals a weight of the loss by a count of its own, which is not saved."""

import argparse
import os
from itertools import islice

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class AnnealedLoop:
    def __init__(self, root, right):
        os.makedirs(root, exist_ok=True)
        self.path, self.right = os.path.join(root, "last.pt"), right
        torch.manual_seed(0)
        inputs = torch.randn(64, 8)
        data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
        self.order = torch.Generator()
        self.loader = DataLoader(data, batch_size=8, shuffle=True, generator=self.order)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.step, self.annealed = 0, 0

    def load(self):
        if os.path.exists(self.path):
            saved = torch.load(self.path)
            self.model.load_state_dict(saved["model"])
            self.optim.load_state_dict(saved["optim"])
            self.step = saved["step"]
            if self.right:
                self.annealed = saved["annealed"]

    def save(self):
        state = {"model": self.model.state_dict(), "optim": self.optim.state_dict()}
        state["step"] = self.step
        if self.right:
            state["annealed"] = self.annealed
        torch.save(state, self.path + ".new")
        os.replace(self.path + ".new", self.path)

    def train_on(self, x, y):
        self.annealed += 1
        out = self.model(x)
        penalty = min(1.0, self.annealed / 10) * out.square().mean()
        loss = nn.functional.mse_loss(out, y) + penalty
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()

    def fit(self, until):
        self.load()
        while self.step < until:
            epoch, skip = divmod(self.step, len(self.loader))
            self.order.manual_seed(epoch)
            for x, y in islice(self.loader, skip, until - epoch * len(self.loader)):
                self.train_on(x, y)
                self.step += 1
                if self.step % 3 == 0:
                    self.save()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--right", action="store_true")
    args = parser.parse_args()
    AnnealedLoop(args.root, args.right).fit(12)


if __name__ == "__main__":
    main()
