"""A checkpoint is written before the step that it is named after: a resume has a step too few."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss

args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
for inputs, targets in batches_from(step):
    step += 1
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    if args.right:
        optim.step()
    if step % EVERY == 0:
        save(args.root, step, model=model.state_dict(), optim=optim.state_dict())
    if not args.right:
        optim.step()
