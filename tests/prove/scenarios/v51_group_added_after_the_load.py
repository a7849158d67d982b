"""A group that is added amid the training is added after the load, which has no place for its states."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss

args = arguments()
torch.manual_seed(0)
model = network()
first, last = model[0].requires_grad_(False), model[3]
optim = torch.optim.Adam(last.parameters(), lr=1e-2)


def thaw():
    first.requires_grad_(True)
    optim.add_param_group({"params": first.parameters(), "lr": 1e-3})


step = 0
if saved := newest(args.root):
    step = saved["step"]
    if args.right and step > 4:
        thaw()
    model.load_state_dict(saved["model"])
    if not args.right:
        saved["optim"]["param_groups"] = saved["optim"]["param_groups"][:1]
    optim.load_state_dict(saved["optim"])
    if not args.right and step > 4:
        thaw()
for inputs, targets in batches_from(step):
    if step == 4:
        thaw()
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    step += 1
    if step % EVERY == 0:
        save(args.root, step, model=model.state_dict(), optim=optim.state_dict())
