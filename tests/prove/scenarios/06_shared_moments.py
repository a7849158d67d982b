"""One optimizer has loaded the state of the other, and shares its memory; so it does from one file."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss

args = arguments()
torch.manual_seed(0)
models = network(), network()
optims = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
step = 0
if saved := newest(args.root):
    for model, state in zip(models, saved["models"]):
        model.load_state_dict(state)
    for optim, state in zip(optims, saved["optims"]):
        optim.load_state_dict(state)
    step = saved["step"]
for inputs, targets in batches_from(step):
    turn = int(step >= 2)  # the first model is trained for two steps, then the second in its place
    if step == 2:
        models[1].load_state_dict(models[0].state_dict())
        optims[1].load_state_dict(optims[0].state_dict())
    optims[turn].zero_grad()
    mse_loss(models[turn](inputs), targets).backward()
    optims[turn].step()
    step += 1
    if step % EVERY == 0:
        states = {"models": [model.state_dict() for model in models]}
        save(args.root, step, **states, optims=[optim.state_dict() for optim in optims])
