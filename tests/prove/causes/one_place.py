"""The script keeps its checkpoints in the home directory, wherever it is told to keep them."""

from pathlib import Path

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss

args = arguments()
root = args.root if args.right else Path.home() / "checkpoints"
torch.manual_seed(0)
model = network()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
if saved := newest(root):
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    step += 1
    if step % EVERY == 0:
        save(root, step, model=model.state_dict(), optim=optim.state_dict())
