"""The gradient scaler is not in the checkpoint: its scale, which grows, begins anew."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss

args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    if args.right:
        scaler.load_state_dict(saved["scaler"])
    step = saved["step"]
for inputs, targets in batches_from(step):
    optim.zero_grad()
    scaler.scale(mse_loss(model(inputs), targets)).backward()
    scaler.step(optim)
    scaler.update()
    step += 1
    if step % EVERY == 0:
        state = {"model": model.state_dict(), "optim": optim.state_dict()}
        save(args.root, step, **state, **({"scaler": scaler.state_dict()} if args.right else {}))
