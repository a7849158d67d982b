"""The script steps the weights itself: no optimizer of torch ever steps."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss

args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.SGD(model.parameters(), lr=0.05)
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    step = saved["step"]
for inputs, targets in batches_from(step):
    model.zero_grad()
    mse_loss(model(inputs), targets).backward()
    if args.right:
        optim.step()
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
    step += 1
    if step % EVERY == 0:
        save(args.root, step, model=model.state_dict())
