"""The scheduler is not in the checkpoint: after a resume the warm-up of the learning rate begins anew."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR

args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
sched = LambdaLR(optim, lambda step: min(1.0, (step + 1) / 10))
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    if args.right:
        sched.load_state_dict(saved["sched"])
    step = saved["step"]
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    sched.step()
    step += 1
    if step % EVERY == 0:
        state = {"model": model.state_dict(), "optim": optim.state_dict()}
        save(args.root, step, **state, **({"sched": sched.state_dict()} if args.right else {}))
