"""The weights alone are loaded, and the masters stay as they were made: a step writes these to weights."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss

args = arguments()
torch.manual_seed(0)
model = network().bfloat16()
masters = [parameter.detach().float() for parameter in model.parameters()]
optim = torch.optim.SGD(masters, lr=0.1)
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    if args.right:
        for master, value in zip(masters, saved["masters"]):
            master.copy_(value)
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
        save(args.root, step, model=model.state_dict(), masters=masters)
