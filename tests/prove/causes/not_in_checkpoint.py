"""A temperature falls from step to step. It is a plain number of the module, which no state_dict has."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss


class Cooled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = network()
        self.temperature = 2.0

    def forward(self, inputs):
        if self.training:
            self.temperature = max(0.5, self.temperature * 0.95)
        return self.body(inputs) / self.temperature


args = arguments()
torch.manual_seed(0)
model = Cooled()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    if args.right:
        model.temperature = saved["temperature"]
    step = saved["step"]
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    step += 1
    if step % EVERY == 0:
        state = {"model": model.state_dict(), "optim": optim.state_dict()}
        if args.right:
            state["temperature"] = model.temperature
        save(args.root, step, **state)
