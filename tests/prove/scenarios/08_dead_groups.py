"""A wrapper keeps the groups of its optimizer, which a load replaces: the scheduler steers the old ones."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR


class Clipping(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner = inner
        self.defaults = inner.defaults
        self.param_groups = inner.param_groups

    def step(self):
        clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        self.inner.step()

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)
        if args.right:
            self.param_groups = self.inner.param_groups


args = arguments()
torch.manual_seed(0)
model = network()
optim = Clipping(torch.optim.AdamW(model.parameters(), lr=1e-2))
sched = LambdaLR(optim, lambda step: 0.9**step)
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    sched.load_state_dict(saved["sched"])
    step = saved["step"]
for inputs, targets in batches_from(step):
    model.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    sched.step()
    step += 1
    if step % EVERY == 0:
        states = {"model": model.state_dict(), "sched": sched.state_dict()}
        save(args.root, step, **states, optim=optim.state_dict())
