"""The states to load into are made by a step without gradients: it decays the weights just loaded."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss


def make_states(optim):
    for group in optim.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optim.step()
    optim.zero_grad()


args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
step = 0
if saved := newest(args.root):
    if args.right:
        make_states(optim)
    model.load_state_dict(saved["model"])
    if not args.right:
        make_states(optim)
    for own, state in zip(optim.state.values(), saved["states"]):
        for name, value in state.items():
            own[name].copy_(value)
    step = saved["step"]
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    step += 1
    if step % EVERY == 0:
        save(args.root, step, model=model.state_dict(), states=list(optim.state.values()))
