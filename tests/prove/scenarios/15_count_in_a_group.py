"""An optimizer counts its steps in its groups; the script saves the states of the parameters alone."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss


class Averaging(torch.optim.Optimizer):
    """Steps along the mean of all gradients so far."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 1 / group["k"])
                parameter.sub_(mean, alpha=group["lr"])


args = arguments()
torch.manual_seed(0)
model = network()
optim = Averaging(model.parameters(), lr=0.1)
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    if args.right:
        optim.load_state_dict(saved["optim"])
    else:
        for parameter, state in zip(model.parameters(), saved["optim"]["state"].values()):
            optim.state[parameter] = state
    step = saved["step"]
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    step += 1
    if step % EVERY == 0:
        save(args.root, step, model=model.state_dict(), optim=optim.state_dict())
