"""An average of the weights is saved in bfloat16."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss

args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
average = {name: value.clone() for name, value in model.state_dict().items()}
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    average = {name: value.float() for name, value in saved["average"].items()}
    step = saved["step"]
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    step += 1
    for name, value in model.state_dict().items():
        average[name].lerp_(value, 0.1)
    if step % EVERY == 0:
        kept = {n: v if args.right else v.bfloat16() for n, v in average.items()}
        state = {"model": model.state_dict(), "optim": optim.state_dict()}
        save(args.root, step, **state, average=kept)
