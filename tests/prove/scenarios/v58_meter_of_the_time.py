"""A meter of the time differs in each run; what is wrong is the optimizer, which is not loaded."""

import time

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss


class Meter:
    def __init__(self):
        self.last, self.rate = time.time(), 0.0

    def tick(self):
        now = time.time()
        self.rate, self.last = 1 / max(now - self.last, 1e-9), now


args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
meter = Meter()
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    step = saved["step"]
    if args.right:
        optim.load_state_dict(saved["optim"])
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    meter.tick()
    step += 1
    if step % EVERY == 0:
        save(args.root, step, model=model.state_dict(), optim=optim.state_dict())
