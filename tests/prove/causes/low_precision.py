"""The optimizer steps float32 masters of a bfloat16 model; a resume makes them anew from the model."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss

args = arguments()
torch.manual_seed(0)
model = network().bfloat16()
saved = newest(args.root)
if saved:
    model.load_state_dict(saved["model"])
masters = [parameter.detach().float() for parameter in model.parameters()]
if saved and args.right:
    masters = saved["masters"]
optim = torch.optim.AdamW(masters, lr=1e-3)
step = 0
if saved:
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
for inputs, targets in batches_from(step):
    mse_loss(model(inputs.bfloat16()).float(), targets).backward()
    for master, parameter in zip(masters, model.parameters()):
        master.grad, parameter.grad = parameter.grad.float(), None
    optim.step()
    with torch.no_grad():
        for master, parameter in zip(masters, model.parameters()):
            parameter.copy_(master)
    step += 1
    if step % EVERY == 0:
        state = {"model": model.state_dict(), "optim": optim.state_dict()}
        save(args.root, step, **state, **({"masters": masters} if args.right else {}))
