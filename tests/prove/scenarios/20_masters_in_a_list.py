"""An optimizer has float32 masters in a list, in no state_dict, and makes them from the model."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss


class Mixed(torch.optim.AdamW):
    def __init__(self, parameters, **settings):
        self.halves = list(parameters)
        self.masters = [half.detach().float() for half in self.halves]
        super().__init__(self.masters, **settings)

    def step(self):
        for master, half in zip(self.masters, self.halves):
            master.grad, half.grad = half.grad.float(), None
        super().step()
        with torch.no_grad():
            for master, half in zip(self.masters, self.halves):
                half.copy_(master)


args = arguments()
torch.manual_seed(0)
model = network().bfloat16()
saved = newest(args.root)
if saved:
    model.load_state_dict(saved["model"])
optim = Mixed(model.parameters(), lr=1e-3)
step = 0
if saved:
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
    if args.right:
        for master, value in zip(optim.masters, saved["masters"]):
            master.copy_(value)
for inputs, targets in batches_from(step):
    mse_loss(model(inputs.bfloat16()).float(), targets).backward()
    optim.step()
    step += 1
    if step % EVERY == 0:
        states = {"model": model.state_dict(), "optim": optim.state_dict()}
        save(args.root, step, **states, **({"masters": optim.masters} if args.right else {}))
