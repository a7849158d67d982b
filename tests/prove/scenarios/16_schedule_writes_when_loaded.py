"""A schedule, when it is loaded, writes to the groups before it has its own count: those of the start."""

import torch
from parts import EVERY, STEPS, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss


class Schedule:
    """Learning rate down to a tenth, weight decay up from 0 to 0.5."""

    def __init__(self, optim):
        self.optim = optim
        self.num_steps = 0

    def write(self):
        share = self.num_steps / STEPS
        for group in self.optim.param_groups:
            group["lr"] = 1e-2 * (1 - 0.9 * share)
            group["weight_decay"] = 0.5 * share

    def step(self):
        self.num_steps += 1
        self.write()

    def state_dict(self):
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state):
        if args.right:
            self.num_steps = state["num_steps"]
        self.write()
        self.num_steps = state["num_steps"]


args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
sched = Schedule(optim)
step = 0
if saved := newest(args.root):
    for name, value in (("model", model), ("optim", optim), ("sched", sched)):
        value.load_state_dict(saved[name])
    step = saved["step"]
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    sched.step()
    step += 1
    if step % EVERY == 0:
        states = {"model": model.state_dict(), "sched": sched.state_dict()}
        save(args.root, step, **states, optim=optim.state_dict())
