"""A resume skips the batches that are done, but numbers its epochs from 0: the order is another epoch's."""

from itertools import islice

import torch
from parts import BATCHES, EVERY, STEPS, arguments, dataset, network, newest, save
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler

args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
data = dataset()
sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=7)
loader = DataLoader(data, batch_size=4, sampler=sampler, generator=torch.Generator())
step = epoch = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
    if args.right:
        epoch = saved["epoch"]
while step < STEPS:
    sampler.set_epoch(epoch)
    loader.generator.manual_seed(epoch)
    for inputs, targets in islice(loader, step % BATCHES, None):
        optim.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optim.step()
        step += 1
        if step % EVERY == 0:
            state = {"model": model.state_dict(), "optim": optim.state_dict()}
            save(args.root, step, **state, epoch=step // BATCHES)
        if step == STEPS:
            break
    epoch += 1
