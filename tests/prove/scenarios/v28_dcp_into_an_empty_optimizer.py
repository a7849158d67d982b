"""dcp.load fills the state dict of a fresh optimizer, which has no states yet."""

import argparse
import os
from itertools import islice

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--root", required=True)
parser.add_argument("--right", action="store_true")
args = parser.parse_args()
os.makedirs(args.root, exist_ok=True)
latest = os.path.join(args.root, "latest")

torch.manual_seed(0)
inputs = torch.randn(64, 8)
data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
order = torch.Generator()
loader = DataLoader(data, batch_size=8, shuffle=True, generator=order)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)


def state_dicts():
    if args.right:
        weights, states = get_state_dict(model, optim)
        return {"model": weights, "optim": states}
    return {"model": model.state_dict(), "optim": optim.state_dict()}


step = 0
if os.path.exists(latest):
    with open(latest) as file:
        step = int(file.read())
    state = state_dicts()
    dcp.load(state, checkpoint_id=os.path.join(args.root, f"step-{step}"), no_dist=True)
    if args.right:
        set_state_dict(
            model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
    else:
        model.load_state_dict(state["model"])
        optim.load_state_dict(state["optim"])
while step < 12:
    epoch, skip = divmod(step, len(loader))
    order.manual_seed(epoch)
    for x, y in islice(loader, skip, 12 - epoch * len(loader)):
        loss = nn.functional.mse_loss(model(x), y)
        optim.zero_grad()
        loss.backward()
        optim.step()
        step += 1
        if step % 3 == 0:
            folder = os.path.join(args.root, f"step-{step}")
            dcp.save(state_dicts(), checkpoint_id=folder, no_dist=True)
            with open(latest + ".new", "w") as file:
                file.write(str(step))
            os.replace(latest + ".new", latest)
