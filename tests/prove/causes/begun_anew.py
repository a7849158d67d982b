"""The average of the weights is saved, and never loaded: a resume begins it from the restored weights."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss


class Average:
    def __init__(self, model, decay=0.9):
        self.decay = decay
        self.shadow = {name: value.clone() for name, value in model.state_dict().items()}

    def update(self, model):
        for name, value in model.state_dict().items():
            self.shadow[name].lerp_(value, 1 - self.decay)


args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
saved = newest(args.root)
if saved:
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
average = Average(model)
if saved and args.right:
    average.shadow = saved["average"]
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    average.update(model)
    step += 1
    if step % EVERY == 0:
        state = {"model": model.state_dict(), "optim": optim.state_dict()}
        save(args.root, step, **state, average=average.shadow)
