"""The average is made after two steps, so at a resume there is none yet that could be loaded."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

FIRST = 2

args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = {"model": model, "optim": optim}


def make_average():
    state["average"] = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


step = 0
if saved := newest(args.root):
    if args.right and "average" in saved:
        make_average()
    for name, value in state.items():
        value.load_state_dict(saved[name])
    step = saved["step"]
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    step += 1
    if step >= FIRST:
        if "average" not in state:
            make_average()
        state["average"].update_parameters(model)
    if step % EVERY == 0:
        save(args.root, step, **{name: value.state_dict() for name, value in state.items()})
