"""Files are named by tokens and sorted as text: 96 comes behind 192 and is taken for the newest."""

import os

import torch
from parts import EVERY, arguments, batches_from, network
from torch.nn.functional import mse_loss

TOKENS = 32

args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
if files := list(args.root.glob("*.pt")):
    last = max(files, key=lambda file: int(file.stem) if args.right else file.stem)
    saved = torch.load(last)
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["tokens"] // TOKENS
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    step += 1
    if step % EVERY == 0:
        tokens = step * TOKENS
        states = {"model": model.state_dict(), "optim": optim.state_dict()}
        torch.save({**states, "tokens": tokens}, args.root / "unfinished")
        os.replace(args.root / "unfinished", args.root / f"{tokens}.pt")
