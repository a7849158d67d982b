"""A save is copied at once and written later; of the average only the dict is copied, not its tensors."""

import torch
from parts import EVERY, arguments, batches_from, network, newest, save
from torch.nn.functional import mse_loss

LATE = 2


class RunningMean:
    def __init__(self, model):
        self.mean = {name: value.clone() for name, value in model.state_dict().items()}

    def update(self, model):
        for name, value in model.state_dict().items():
            self.mean[name].lerp_(value, 0.1)


args = arguments()
torch.manual_seed(0)
model = network()
optim = torch.optim.SGD(model.parameters(), lr=0.1)
average = RunningMean(model)
step = 0
if saved := newest(args.root):
    model.load_state_dict(saved["model"])
    average.mean = saved["mean"]
    step = saved["step"]
waiting = None
for inputs, targets in batches_from(step):
    optim.zero_grad()
    mse_loss(model(inputs), targets).backward()
    optim.step()
    average.update(model)
    step += 1
    if step % EVERY == 0:
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        mean = dict(average.mean)
        if args.right:
            mean = {name: value.clone() for name, value in mean.items()}
        waiting = step, {"model": weights, "mean": mean}
    elif waiting and step == waiting[0] + LATE:
        save(args.root, waiting[0], **waiting[1])
