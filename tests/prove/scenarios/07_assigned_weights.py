"""assign=True gives the model new parameters, while the optimizer has those that were there before."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss

args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"], assign=not args.right)
    optim.load_state_dict(saved["optim"])
    step = saved["step"]
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    step += 1
    if step % EVERY == 0:
        save(args.root, step, model=model.state_dict(), optim=optim.state_dict())
