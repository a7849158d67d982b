"""The script seeds torch when it starts, so a resume draws the first dropout masks again."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss

args = arguments()
torch.manual_seed(0)
model = network(dropout=0.5)
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    if args.right:
        torch.set_rng_state(saved["generator"])
    step = saved["step"]
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    step += 1
    if step % EVERY == 0:
        state = {"model": model.state_dict(), "optim": optim.state_dict()}
        save(args.root, step, **state, generator=torch.get_rng_state())
