"""DCP's set_state_dict makes the states of a fresh optimizer by a step of rate 0, and then loads them."""

import os

import torch
import torch.distributed.checkpoint as dcp
from parts import EVERY, arguments, batches_from, network
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import StepLR

args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
sched = StepLR(optim, step_size=4, gamma=0.5)
step = 0
newest = args.root / "newest"
if newest.exists():
    weights, moments = get_state_dict(model, optim)
    state = {"model": weights, "optim": moments, "sched": sched.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=newest.resolve())
    set_state_dict(model, optim, model_state_dict=weights, optim_state_dict=state["optim"])
    sched.load_state_dict(state["sched"])
    step = state["step"]
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    sched.step()
    step += 1
    if step % EVERY == 0:
        weights, moments = get_state_dict(model, optim)
        state = {"model": weights, "optim": moments, "sched": sched.state_dict(), "step": step}
        dcp.save(state, checkpoint_id=args.root / f"{step:04}")
        link = args.root / "link"
        link.symlink_to(f"{step:04}")
        os.replace(link, newest)
