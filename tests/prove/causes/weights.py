"""Names in the checkpoint begin with `module.`, as of a wrapped model; strict=False then loads none."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss

args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
wrapped = torch.nn.DataParallel(model)
step = 0
if saved := newest(args.root):
    weights = saved["model"]
    if args.right:
        weights = {name.removeprefix("module."): value for name, value in weights.items()}
    model.load_state_dict(weights, strict=args.right)
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(wrapped(inputs), targets).backward()
    optim.step()
    step += 1
    if step % EVERY == 0:
        save(args.root, step, model=wrapped.state_dict(), optim=optim.state_dict())
