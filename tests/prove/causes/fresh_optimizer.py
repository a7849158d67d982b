"""DCP loads into what a state_dict has. That of a fresh optimizer is empty, so no moment is loaded."""

import torch
import torch.distributed.checkpoint as dcp
from parts import EVERY, arguments, batches_from, network
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import mse_loss

args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)


def states():
    if args.right:
        return dict(zip(("model", "optim"), get_state_dict(model, optim)))
    return {"model": model.state_dict(), "optim": optim.state_dict()}


step = 0
if complete := sorted(args.root.glob("*/.metadata")):
    state = states()
    dcp.load(state, checkpoint_id=complete[-1].parent)
    if args.right:
        set_state_dict(
            model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
    else:
        model.load_state_dict(state["model"])
        optim.load_state_dict(state["optim"])
    step = int(complete[-1].parent.name)
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    step += 1
    if step % EVERY == 0:
        dcp.save(states(), checkpoint_id=args.root / f"{step:04}")
