"""A replay buffer, and how often each class was seen, are attributes that no file has."""

from collections import deque

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss


class Memory:
    def __init__(self):
        self.seen = deque(maxlen=6)
        self.total = torch.zeros(2)

    def mix(self, inputs, targets):
        self.seen.append((inputs[0], targets[0]))
        self.total += targets.sign().sum()
        old = [torch.stack(column) for column in zip(*self.seen, strict=True)]
        return torch.cat([inputs, old[0]]), torch.cat([targets, old[1]])


args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
memory = Memory()
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
    if args.right:
        memory.seen.extend(saved["seen"])
        memory.total = saved["total"]
for inputs, targets in batches_from(step):
    optim.zero_grad()
    x, y = memory.mix(inputs, targets)
    mse_loss(model(x), y).backward()
    optim.step()
    step += 1
    if step % EVERY == 0:
        state = {"model": model.state_dict(), "optim": optim.state_dict()}
        if args.right:
            state |= {"seen": list(memory.seen), "total": memory.total}
        save(args.root, step, **state)
