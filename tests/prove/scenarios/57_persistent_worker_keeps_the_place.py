"""The place is put back to 0 in the main process, while the persistent worker has its own copy of it."""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

parser = argparse.ArgumentParser()
parser.add_argument("--root", required=True)
parser.add_argument("--right", action="store_true")
args = parser.parse_args()
os.makedirs(args.root, exist_ok=True)
path = os.path.join(args.root, "last.pt")


class Lines(IterableDataset):
    def __init__(self, lines):
        self.lines, self.start = lines, 0

    def __iter__(self):
        for line in self.lines[self.start :]:
            yield line, line.sin().sum(0, keepdim=True)


def main():
    torch.manual_seed(0)
    data = Lines(torch.randn(64, 8))
    seeds = torch.Generator()
    stays = not args.right
    loader = DataLoader(
        data, batch_size=8, num_workers=1, persistent_workers=stays, generator=seeds
    )
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = 0
    if os.path.exists(path):
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optim.load_state_dict(saved["optim"])
        step = saved["step"]
        data.start = 8 * (step % 8)
    while step < 12:
        seeds.manual_seed(step // 8)
        batches = iter(loader)
        data.start = 0
        for x, y in batches:
            loss = nn.functional.mse_loss(model(x), y)
            optim.zero_grad()
            loss.backward()
            optim.step()
            step += 1
            if step % 3 == 0:
                state = {"model": model.state_dict(), "optim": optim.state_dict(), "step": step}
                torch.save(state, path + ".new")
                os.replace(path + ".new", path)
            if step == 12:
                break


if __name__ == "__main__":
    main()
