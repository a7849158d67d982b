"""Two batches make a step, and a save comes after every sixth batch, counted from 0: amid a step."""

import torch
from parts import EVERY, STEPS, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss

ACCUMULATED = 2

args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
batch = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    batch = saved["step"]
for inputs, targets in batches_from(batch, stop=ACCUMULATED * STEPS):
    (mse_loss(model(inputs), targets) / ACCUMULATED).backward()
    if batch % ACCUMULATED == ACCUMULATED - 1:
        optim.step()
        optim.zero_grad()
    done = batch + 1 if args.right else batch
    if done and done % (ACCUMULATED * EVERY) == 0:
        save(args.root, batch + 1, model=model.state_dict(), optim=optim.state_dict())
    batch += 1
