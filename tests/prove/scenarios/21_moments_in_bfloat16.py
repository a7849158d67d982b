"""Moments are saved in bfloat16, to spare the disk, and cast to float32 without a word when loaded."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss

args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    step += 1
    if step % EVERY == 0:
        state = optim.state_dict()
        if not args.right:
            state["state"] = {
                number: {
                    name: value.bfloat16() if value.ndim else value for name, value in own.items()
                }
                for number, own in state["state"].items()
            }
        save(args.root, step, model=model.state_dict(), optim=state)
