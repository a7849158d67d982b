"""Of the optimizer only the states of its parameters are restored, so that its settings begin anew."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss

args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    if not args.right:
        saved["optim"]["param_groups"] = optim.state_dict()["param_groups"]
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    for group in optim.param_groups:  # decay less and less
        group["weight_decay"] *= 0.8
    step += 1
    if step % EVERY == 0:
        save(args.root, step, model=model.state_dict(), optim=optim.state_dict())
