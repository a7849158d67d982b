"""The checkpoint has the epoch alone, and a resume begins the next one: the rest of this is never seen."""

from itertools import islice

import torch
from parts import BATCHES, EVERY, STEPS, arguments, dataset, network, newest, save
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
order = torch.Generator()
loader = DataLoader(dataset(), batch_size=4, shuffle=True, generator=order)
step = epoch = done = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
    epoch, done = divmod(step, BATCHES) if args.right else (saved["epoch"] + 1, 0)
while step < STEPS:
    order.manual_seed(epoch)
    for inputs, targets in islice(loader, done, None):
        optim.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optim.step()
        step += 1
        if step % EVERY == 0:
            state = {"model": model.state_dict(), "optim": optim.state_dict()}
            save(args.root, step, **state, epoch=epoch)
        if step == STEPS:
            break
    epoch, done = epoch + 1, 0
