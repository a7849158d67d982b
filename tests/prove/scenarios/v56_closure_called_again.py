"""LBFGS calls its closure several times in a step; its states are not loaded."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss

args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    step = saved["step"]
    if args.right:
        optim.load_state_dict(saved["optim"])
for inputs, targets in batches_from(step):

    def closure(inputs=inputs, targets=targets):
        optim.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    optim.step(closure)
    step += 1
    if step % EVERY == 0:
        save(args.root, step, model=model.state_dict(), optim=optim.state_dict())
