"""A schedule holds the tensor of the learning rate; a load gives the group another tensor."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss


class Decay:
    def __init__(self, optim):
        self.lr = optim.param_groups[0]["lr"]

    def step(self):
        self.lr.mul_(0.8)


args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))
sched = Decay(optim)
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    if args.right:
        sched = Decay(optim)
    step = saved["step"]
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    sched.step()
    step += 1
    if step % EVERY == 0:
        save(args.root, step, model=model.state_dict(), optim=optim.state_dict())
