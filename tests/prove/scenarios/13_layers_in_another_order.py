"""A resume builds the layers in the order of a file whose keys were sorted; moments go by position."""

import json

import torch
from parts import EVERY, arguments, batches_from, newest, save
from torch.nn.functional import mse_loss

args = arguments()
torch.manual_seed(0)
widths = {"up": 8, "down": 8}
config = args.root / "config.json"
if config.exists():
    widths = json.loads(config.read_text())
else:
    config.write_text(json.dumps(widths, sort_keys=not args.right))
model = torch.nn.ModuleDict({name: torch.nn.Linear(8, width) for name, width in widths.items()})
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(model["down"](model["up"](inputs).tanh())[:, :4], targets).backward()
    optim.step()
    step += 1
    if step % EVERY == 0:
        save(args.root, step, model=model.state_dict(), optim=optim.state_dict())
