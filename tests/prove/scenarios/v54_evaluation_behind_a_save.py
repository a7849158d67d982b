"""An evaluation comes behind each save, and one before a resumed training: this draws once more."""

import torch
from parts import EVERY, arguments, batches_from, dataset, network, newest, save
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

args = arguments()
torch.manual_seed(0)
model = network(dropout=0.2)
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)


def evaluate():
    model.eval()
    with torch.no_grad():
        losses = [mse_loss(model(x), y) for x, y in DataLoader(dataset(), 16, shuffle=True)]
    model.train()
    return sum(losses)


step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
    torch.set_rng_state(saved["generator"])
    if not args.right:
        print(evaluate())
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    step += 1
    if step % EVERY == 0:
        print(evaluate())
        state = {"model": model.state_dict(), "optim": optim.state_dict()}
        save(args.root, step, **state, generator=torch.get_rng_state())
