"""An object keeps the tensor that it is given at a restore, and holdfast deletes the step it came from."""

import torch
from parts import EVERY, arguments, batches_from, network
from torch.nn.functional import mse_loss

import holdfast


class InputMean:
    def __init__(self):
        self.mean = torch.zeros(8)

    def update(self, inputs):
        self.mean.lerp_(inputs.mean(0), 0.1)

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]


args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
inputs_mean = InputMean()
state = {"model": model, "optim": optim, "inputs": inputs_mean}
keep = holdfast.Keep(last=1)
with holdfast.Checkpointer(args.root, state, every=EVERY, keep=keep) as ckpt:
    step = ckpt.restore()
    for inputs, targets in batches_from(step):
        inputs_mean.update(inputs)
        optim.zero_grad()
        mse_loss(model(inputs - inputs_mean.mean), targets).backward()
        optim.step()
        step += 1
        ckpt.step(step)
        ckpt.wait()  # steps of this script are shorter than saves
