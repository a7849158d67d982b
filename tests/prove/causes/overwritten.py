"""The weights are restored, and then initialised: the call came first when there was no resume yet."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss


def initialise(module):
    if isinstance(module, torch.nn.Linear):
        torch.nn.init.xavier_uniform_(module.weight)
        torch.nn.init.zeros_(module.bias)


args = arguments()
torch.manual_seed(0)
model = network()
if args.right:
    model.apply(initialise)
optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
if not args.right:
    model.apply(initialise)
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    step += 1
    if step % EVERY == 0:
        save(args.root, step, model=model.state_dict(), optim=optim.state_dict())
