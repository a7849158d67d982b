"""The patience is in a dict of the script, and in no file."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss

args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.SGD(model.parameters(), lr=0.3)
progress = {"best": float("inf"), "bad": 0}
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
    if args.right:
        progress = saved["progress"]
for inputs, targets in batches_from(step):
    loss = mse_loss(model(inputs), targets)
    optim.zero_grad()
    loss.backward()
    optim.step()
    step += 1
    progress["bad"] = 0 if loss.item() < progress["best"] else progress["bad"] + 1
    progress["best"] = min(progress["best"], loss.item())
    if progress["bad"] == 2:
        optim.param_groups[0]["lr"] /= 2
    if step % EVERY == 0:
        state = {"model": model.state_dict(), "optim": optim.state_dict()}
        save(args.root, step, **state, **({"progress": progress} if args.right else {}))
