"""The file lists the settings of a group as an older torch had them; the newer ones take their defaults."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss

SETTINGS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "params")

args = arguments()
torch.manual_seed(0)
model = network()
decoupled = {"weight_decay": 0.5, "decoupled_weight_decay": True}
optim = torch.optim.Adam(model.parameters(), lr=1e-2, **decoupled)
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    step += 1
    if step % EVERY == 0:
        state = optim.state_dict()
        if not args.right:
            groups = [{name: group[name] for name in SETTINGS} for group in state["param_groups"]]
            state["param_groups"] = groups
        save(args.root, step, model=model.state_dict(), optim=state)
