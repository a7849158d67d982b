"""holdfast has the weights, but nobody counts the batches: a resume begins its epoch from the start."""

from itertools import islice

import torch
from parts import BATCHES, EVERY, STEPS, arguments, dataset, network
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import holdfast

args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
order = torch.Generator()
loader = DataLoader(dataset(), batch_size=4, shuffle=True, generator=order)
with holdfast.Checkpointer(args.root, {"model": model, "optim": optim}, every=EVERY) as ckpt:
    step = ckpt.restore()
    done = step % BATCHES if args.right else 0
    for epoch in range(step // BATCHES, STEPS // BATCHES + 1):
        order.manual_seed(epoch)
        for inputs, targets in islice(loader, done, None):
            optim.zero_grad()
            mse_loss(model(inputs), targets).backward()
            optim.step()
            step += 1
            ckpt.step(step)
            ckpt.wait()  # steps of this script are shorter than saves
            if step == STEPS:
                break
        done = 0
