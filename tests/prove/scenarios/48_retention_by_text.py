"""One file is kept, the last in the order of texts: each new one is deleted as soon as it is saved."""

import argparse
import os
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--root", required=True)
parser.add_argument("--right", action="store_true")
args = parser.parse_args()
root = Path(args.root)
root.mkdir(parents=True, exist_ok=True)

torch.manual_seed(0)
inputs = torch.randn(256, 8)
data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
order = torch.Generator()
loader = DataLoader(data, batch_size=32, shuffle=True, generator=order)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
files = list(root.glob("*.pt"))
if files:
    saved = torch.load(max(files, key=lambda path: int(path.stem)))
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
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
            torch.save(state, root / "saving")
            os.replace(root / "saving", root / f"{step * loader.batch_size}.pt")
            files = sorted(root.glob("*.pt"), key=lambda path: path.stem)
            if args.right:
                files.sort(key=lambda path: int(path.stem))
            for old in files[:-1]:
                old.unlink()
