"""A sampler counts its epochs itself, and begins at 0; nothing else draws from torch's generator."""

import numpy as np
import torch
from parts import BATCHES, EVERY, STEPS, arguments, dataset, network, newest, save
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Sampler


class Shuffled(Sampler):
    def __init__(self, length):
        self.length, self.epoch, self.begin = length, 0, 0

    def __iter__(self):
        order = np.random.RandomState(self.epoch).permutation(self.length)
        return iter(order[self.begin :].tolist())

    def __len__(self):
        return self.length


args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
data = dataset()
sampler = Shuffled(len(data))
loader = DataLoader(data, len(data) // BATCHES, sampler=sampler)
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
    sampler.begin = step % BATCHES * (len(data) // BATCHES)
    if args.right:
        sampler.epoch = step // BATCHES
while step < STEPS:
    for inputs, targets in loader:
        optim.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optim.step()
        step += 1
        if step % EVERY == 0:
            save(args.root, step, model=model.state_dict(), optim=optim.state_dict())
        if step == STEPS:
            break
    sampler.epoch, sampler.begin = sampler.epoch + 1, 0
